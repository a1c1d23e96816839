"""The host's kernels: what they compute, and the same bits from C++ and NumPy."""

import hypothesis
import numpy as np
import pytest
from host_cases import assert_same_ids, assert_twins, draw_blocks, draw_rows, written
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed.kernels import cpu, dispatch, host_native, host_reference
from tpu_embed.kernels.host_reference import Pieces, Put, Take

KERNELS = [host_reference] if cpu.load().path is None else [host_reference, host_native]
MANY = 2 * host_native.IDS_PER_THREAD
"""Enough ids in a line for several threads."""

both = pytest.mark.parametrize("kernels", KERNELS)
needs_library = pytest.mark.skipif(len(KERNELS) == 1, reason=f"library: {cpu.load().why_not}")


@pytest.fixture(params=[1, 2, 5])
def threads(request, monkeypatch):
    """Let the compiled kernels use this many threads, whatever the machine has."""
    monkeypatch.setattr(host_native, "cores", lambda: request.param)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.host_kernels() is host_reference
    monkeypatch.delenv(dispatch.VARIABLE)
    assert dispatch.host_kernels() is KERNELS[-1]


# -- sort ------------------------------------------------------------------------------------------

LINE = st.lists(st.integers(-2, 5) | st.integers(-(2**31), 2**31 - 1), max_size=24)


@both
@pytest.mark.parametrize(("dtype", "apart"), [(np.int32, 0), (np.int64, 0), (np.int64, 2**40)])
@settings(max_examples=50)
@given(lines=st.lists(LINE, min_size=1, max_size=3), seed=st.integers(0, 9))
@hypothesis.example(lines=[[], [-1] * 4], seed=0)
@pytest.mark.quick(2)
def test_sort_few_ids(kernels, dtype, apart, lines, seed):
    lines = [[row + apart * (row % 3) if row >= 0 else row for row in line] for line in lines]
    rows = [np.array(line, dtype) for line in lines]
    for blocks in (None, draw_blocks(np.random.default_rng(seed), rows, 3)):
        found = kernels.sort_ids(rows, blocks)
        for one, line, block in zip(found, rows, blocks or [None] * len(rows), strict=True):
            assert_same_ids(one, line, block)


@both
def test_sort_rows_of_64_bits(kernels):
    """Rows whose span takes more than 32 bits, and large ones whose span does not."""
    wide = [2**62, 5, -1, 2**40, 5 + 2**32, 2**62, 5, np.iinfo(np.int64).min]
    narrow = [2**40 + 7, 2**40 + 5, -1, 2**40 + 7, 2**40 + 2**32 - 1, 2**40 + 5, -1, 2**40]
    block = np.array([0, 0, 1, 1, 2, 2, 2, 3], np.int32)
    lines = [np.array(line, np.int64) for line in (wide, narrow)]
    for found, line in zip(kernels.sort_ids(lines, [block] * 2), lines, strict=True):
        assert_same_ids(found, line, block)


@needs_library
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("rows", [1, 100, 3_000_000, 2**31 - 1])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.quick(24)
def test_sort_many_ids(threads, dtype, rows, by_block):
    rng = np.random.default_rng(rows % 7)
    lines = draw_rows(rng, [MANY, 0, 17, MANY + 1], rows, dtype)
    # As unequal as ids come: all absent, and all of one row.
    lines += [np.full(1000, -1, dtype), np.full(MANY, rows - 1, dtype)]
    blocks = draw_blocks(rng, lines, 4) if by_block else None
    assert_twins(host_native.sort_ids(lines, blocks), lines, blocks)


# -- take and put ----------------------------------------------------------------------------------


@both
def test_take_and_put(kernels):
    out = np.zeros((3, 5), np.int32)
    source, index = np.array([10, 20, 30], np.int32), np.array([2, 0, 2, 1], np.int32)
    kernels.take([Take(out[0], source, index, -1), Take(out[1], source, None, 7)])
    kernels.put([Put(out[2], np.array([4, 1], np.int32), source, np.array([0, 2], np.int32), 9)])
    assert out.tolist() == [[30, 10, 30, 20, -1], [10, 20, 30, 7, 7], [9, 30, 9, 9, 10]]


@needs_library
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_take_and_put_many(threads, dtype):
    rng = np.random.default_rng(3)
    lines = draw_rows(rng, [MANY, 5, 0, MANY - 1], 1000, np.int32)
    values = [rng.integers(-(2**62), 2**62, line.size).astype(dtype) for line in lines]
    ordered = host_reference.sort_ids(lines, None)
    one, two = (written(kernels, ordered, values, MANY + 3) for kernels in KERNELS)
    np.testing.assert_array_equal(one, two)


@both
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_put_pieces(kernels, dtype):
    """Into places that are not aligned to 8 bytes, too."""
    lines = [np.arange(100, 110, dtype=dtype), np.array([2**30, 5], dtype)]
    room = np.zeros(2 * 3 * 4 * dtype().itemsize // 4 + 2, np.int32)
    out = room[1:-1].view(dtype).reshape(2, 3, 4)[:, :2]
    line, begin = np.array([[0, 1], [0, 0]]), np.array([[2, 0], [10, 0]])
    end, minus = np.array([[5, 2], [10, 4]]), np.array([[100, 5], [7, 200]])
    kernels.put_pieces(out, lines, Pieces(line, begin, end, minus), -1)
    assert out[0].tolist() == [[2, 3, 4, -1], [2**30 - 5, 0, -1, -1]]
    assert out[1].tolist() == [[-1, -1, -1, -1], [-100, -99, -98, -97]]
    assert not room[[0, -1]].any()


@needs_library
def test_lines_that_do_not_fit_are_refused():
    """Before C++ reads or writes anything beyond their end."""
    out, two, one = np.zeros(1, np.int32), np.arange(2, dtype=np.int32), np.array([[1]])
    beyond, before = (Pieces(one - 1, one - 1, one + end, one) for end in (1, -2))
    for call, operands in (
        (host_native.take, ([Take(out, two, None, 0)],)),
        (host_native.take, ([Take(out, np.zeros(2), two[:1], 0)],)),
        (host_native.put_pieces, (out[None, None], [two], beyond, 0)),
        (host_native.put_pieces, (out[None, None], [two], before, 0)),
        (host_native.put, ([Put(out, two, two, two[:1], 0)],)),
        (host_native.sort_ids, ([two], [two[:1]])),
    ):
        with pytest.raises(AssertionError):
            call(*operands)
    assert out.tolist() == [0]
