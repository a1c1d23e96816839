"""Routes that the host computes, compared with plain loops."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from layout_cases import make_stack

from tpu_embed._types import PADDING_ID
from tpu_embed.core.exchange import host_route
from tpu_embed.core.layout import make_axes

N = 24
SHARDS = (1, 2, 3, 8)


def row_ids(stack, *, size=N, dtype=np.int32):
    """Return a strategy of physical rows: any, few ones that are frequent, absent ones."""
    rows = st.integers(0, stack.physical_rows - 1) | st.integers(0, 2) | st.just(PADDING_ID)
    return st.lists(rows, min_size=0, max_size=size).map(lambda ids: np.array(ids, dtype))


@st.composite
def ids_in_blocks(draw, stack, dtype=np.int32):
    """Draw rows, and the block of each; where a row is absent, any block at all."""
    rows = draw(row_ids(stack, dtype=dtype))
    first = draw(st.integers(0, 5))
    steps = draw(st.lists(st.integers(0, 2), min_size=rows.size, max_size=rows.size))
    blocks = np.where(rows < 0, 9, first + np.cumsum(steps, dtype=np.int32))
    return rows, draw(st.none() | st.just(blocks.astype(np.int32)))


def loop_sort(rows, blocks):
    """Return (row, block, position) of every present id, in the order in which they are summed."""
    found = []
    for position, row in enumerate(rows.tolist()):
        if row >= 0:
            found.append((row, 0 if blocks is None else int(blocks[position]), position))
    return sorted(found)


def distinct(entries):
    """Return entries in their order, each once."""
    return list(dict.fromkeys(entries))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(max_examples=100)
@given(data=st.data())
def test_ids_are_sorted_by_row_and_block(dtype, data):
    stack = make_stack([23, 5, 1], 2)
    rows, blocks = data.draw(ids_in_blocks(stack, dtype))
    if dtype == np.int64:  # rows that 32 bits do not hold
        rows = np.where(rows < 0, rows, rows + 2**40 * (rows % 3))
    found, expected = host_route.sort_ids(rows, blocks), loop_sort(rows, blocks)
    assert found.order.tolist() == [position for _, _, position in expected]
    assert found.rows.tolist() == distinct(row for row, _, _ in expected)
    assert found.rows[found.row].tolist() == [row for row, _, _ in expected]
    pairs = distinct((row, block) for row, block, _ in expected)
    assert found.sum_rows.tolist() == [row for row, _ in pairs]
    assert [pairs[i] for i in found.sum] == [(row, block) for row, block, _ in expected]
    assert (found.rows.dtype, found.sum_rows.dtype) == (dtype, dtype)
    assert {found.order.dtype, found.row.dtype, found.sum.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("blocks", [None, np.zeros(4, np.int32)], ids=["one block", "blocks"])
@pytest.mark.parametrize("rows", [[], [PADDING_ID] * 4], ids=["no ids", "absent ids"])
def test_nothing_is_sorted(rows, blocks):
    given_blocks = None if blocks is None else blocks[: len(rows)]
    assert all(
        not part.size for part in host_route.sort_ids(np.array(rows, np.int32), given_blocks)
    )


@pytest.mark.parametrize("shards", SHARDS)
@settings(max_examples=50)
@given(data=st.data())
def test_places_in_a_buffer(shards, data):
    stack = make_stack([23, 5, 1], shards)
    rows = np.sort(data.draw(row_ids(stack).map(lambda ids: ids[ids >= 0])))
    counts = [0] * shards
    expected = []
    for row in rows.tolist():  # one after the other, into the buffer of its shard
        shard = row // stack.num_rows
        expected.append((shard, counts[shard]))
        counts[shard] += 1
    capacity = max(counts) + data.draw(st.integers(0, 2))
    places = host_route.places(rows, stack, capacity)
    assert places.tolist() == [shard * capacity + rank for shard, rank in expected]
    assert np.diff(host_route.bounds(rows, stack)).tolist() == counts


@pytest.mark.parametrize("shards", SHARDS)
@settings(max_examples=50)
@given(data=st.data())
def test_partial_sums_of_all_replicas_are_merged_in_their_order(shards, data):
    """A replica sends a row several times, once for each of its blocks."""
    stack = make_stack([23, 5, 1], shards)
    drawn = row_ids(stack).map(lambda ids: np.sort(ids[ids >= 0]))
    replicas = data.draw(st.lists(drawn, min_size=1, max_size=4))
    for shard in range(shards):
        merge = host_route.merge_sums(replicas, stack, shard)
        arriving = []
        for source, rows in enumerate(replicas):
            mine = [row for row in rows.tolist() if row // stack.num_rows == shard]
            arriving += [(row, source, rank) for rank, row in enumerate(mine)]
        arriving.sort()
        local = distinct(row - shard * stack.num_rows for row, _, _ in arriving)
        sent = list(zip(merge.source.tolist(), merge.rank.tolist(), strict=True))
        assert sent == [(source, rank) for _, source, rank in arriving]
        assert merge.row_ids.tolist() == local
        totals = [local[total] + shard * stack.num_rows for total in merge.total]
        assert totals == [row for row, _, _ in arriving]


def subsets(names):
    return [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]


@pytest.mark.parametrize("batch_axes", subsets(("p", "q"))[1:], ids=str)
@pytest.mark.parametrize("shard_axes", subsets(("p", "q")), ids=str)
def test_parcels_arrive_from_the_devices_that_send_them(shard_axes, batch_axes):
    """Play the all-to-all and the all-gather: a parcel is (replica, shard) of its sender."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("p", "q"))
    axes = make_axes(mesh, batch_axes)
    where = {name: np.indices((2, 3))[i].reshape(-1) for i, name in enumerate(("p", "q"))}
    size = {"p": 2, "q": 3}

    def part(names, device):
        found = 0
        for name in names:
            found = found * size[name] + int(where[name][device])
        return found

    def along(names, device):
        """Return the devices that differ from this one only along the named axes, in mesh order."""
        others = [name for name in ("p", "q") if name not in names]
        return [
            other
            for other in range(6)
            if all(where[name][other] == where[name][device] for name in others)
        ]

    shards = int(np.prod([size[name] for name in shard_axes], dtype=int))
    stack = dataclasses.replace(make_stack([23], shards), shard_axes=shard_axes)
    rest = [name for name in batch_axes if name not in shard_axes]
    for device in range(6):
        shard = part(shard_axes, device)
        senders = [source for copy in along(rest, device) for source in along(shard_axes, copy)]
        # Of the devices with the same ids, the one whose coordinates on the rows' axes are the
        # owner's sends to it.
        idle = [name for name in shard_axes if name not in batch_axes]
        expected = [
            next(
                place
                for place, sender in enumerate(senders)
                if part(batch_axes, sender) == replica
                and all(where[name][sender] == where[name][device] for name in idle)
            )
            for replica in range(axes.replicas)
        ]
        assert host_route.parcels(axes, stack, shard).tolist() == expected
