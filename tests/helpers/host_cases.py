"""Random lines of ids for the host's kernels, and both implementations' answers."""

import numpy as np

from tpu_embed.kernels import host_native, host_reference
from tpu_embed.kernels.host_reference import Put, Take

KERNELS = host_reference, host_native


def draw_rows(rng, sizes, rows, dtype, *, absent=0.2):
    """Return the ids of several lines, of `sizes`, in [0, rows); a part of them is absent."""
    lines = [rng.integers(0, rows, size) for size in sizes]
    return [np.where(rng.random(x.size) < absent, -1, x).astype(dtype) for x in lines]


def draw_blocks(rng, lines, blocks):
    """Return the blocks of the ids of these lines; 9 for absent ids."""
    drawn = [rng.integers(0, blocks, line.size) for line in lines]
    pairs = zip(lines, drawn, strict=True)
    return [np.where(line < 0, 9, block).astype(np.int32) for line, block in pairs]


def written(kernels, sorted_lines, values, room):
    """Return what `take` and `put` write from sorted ids, in one packed array as a batch has it.

    Args:
      kernels: the implementation.
      sorted_lines: the sorted ids of each line.
      values: by line, a number of 8 bytes per id.
      room: the length of a line of the packed array's fields.
    """
    packed = np.full((len(sorted_lines), 1 + 4 * room), 77, np.int32)
    takes, puts = [], []
    for line, one, numbers in zip(packed, sorted_lines, values, strict=True):
        # The numbers of 8 bytes begin at an odd place: their address is a multiple of 4 only.
        wide, taken, put = np.split(line[1:], [2 * room, 3 * room])
        places = np.arange(one.rows.size, dtype=np.int32) * 3
        takes.append(Take(wide.view(numbers.dtype), numbers, one.order, -5))
        takes.append(Take(taken, places, one.row, 9))
        puts.append(Put(put, one.order, places, one.row, -8))
    kernels.take(takes)
    kernels.put(puts)
    return packed


def assert_same_ids(found, line, blocks):
    """Check sorted ids by loops over the line, dtypes too."""
    assert (found.rows.dtype, found.sum_rows.dtype) == (line.dtype, line.dtype)
    assert {found.order.dtype, found.row.dtype, found.sum.dtype} == {np.dtype(np.int32)}
    blocks = np.zeros(line.size, int) if blocks is None else blocks
    pairs = [*zip(line.tolist(), blocks.tolist(), strict=True)]
    order = [i for i in sorted(range(line.size), key=pairs.__getitem__) if line[i] >= 0]
    rows, sums = sorted({pairs[i][0] for i in order}), sorted({pairs[i] for i in order})
    assert found.order.tolist() == order
    assert found.rows.tolist() == rows
    assert found.row.tolist() == [rows.index(line[i]) for i in order]
    assert found.sum.tolist() == [sums.index(pairs[i]) for i in order]
    assert found.sum_rows.tolist() == [row for row, _ in sums]


def assert_twins(found, lines, blocks):
    """Check sorted ids against the reference, dtypes too."""
    for one, two in zip(found, host_reference.sort_ids(lines, blocks), strict=True):
        for got, wanted in zip(one, two, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


def check_host_kernels(rng, dtype, sizes):
    """Compare the compiled kernels with the reference on random lines; return the calls made."""
    rows = int(10 ** rng.uniform(0, 18 if dtype == np.int64 else 9))
    lines = draw_rows(rng, sizes, rows, dtype, absent=rng.random())
    blocks = draw_blocks(rng, lines, 3)
    values = [rng.integers(0, 99, line.size) for line in lines]
    for given in (None, blocks):
        found = host_native.sort_ids(lines, given)
        assert_twins(found, lines, given)
        one, two = (written(kernels, found, values, max(sizes)) for kernels in KERNELS)
        np.testing.assert_array_equal(one, two)
    return 6
