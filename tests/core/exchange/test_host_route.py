"""Routes that the host computes, compared with plain loops."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from layout_cases import make_stack

from tpu_embed.core.exchange import host_route
from tpu_embed.core.layout import make_axes

N = 24
SHARDS = (1, 2, 3, 8)


def ascending_rows(stack):
    """Return a strategy of ascending physical rows: any, and few ones that are frequent."""
    rows = st.integers(0, stack.physical_rows - 1) | st.integers(0, 2)
    return st.lists(rows, max_size=N).map(lambda ids: np.array(sorted(ids), np.int32))


def distinct(entries):
    """Return entries in their order, each once."""
    return list(dict.fromkeys(entries))


@pytest.mark.parametrize("shards", SHARDS)
@settings(max_examples=50)
@given(data=st.data())
def test_places_in_a_buffer(shards, data):
    stack = make_stack([23, 5, 1], shards)
    rows = data.draw(ascending_rows(stack))
    counts = [0] * shards
    expected = []
    for row in rows.tolist():  # one after the other, into the buffer of its shard
        shard = row // stack.num_rows
        expected.append((shard, counts[shard]))
        counts[shard] += 1
    capacity = max(counts) + data.draw(st.integers(0, 2))
    (at,) = host_route.bounds([rows], stack)
    places = host_route.places(at, capacity)
    assert places.tolist() == [shard * capacity + rank for shard, rank in expected]
    assert np.diff(at).tolist() == counts


@pytest.mark.parametrize("shards", SHARDS)
@settings(max_examples=50)
@given(data=st.data())
def test_partial_sums_of_all_replicas_are_merged_in_their_order(shards, data):
    """A replica sends a row several times, once for each of its blocks."""
    stack = make_stack([23, 5, 1], shards)
    replicas = data.draw(st.lists(ascending_rows(stack), min_size=1, max_size=4))
    merges = host_route.merge_sums(replicas, host_route.bounds(replicas, stack))
    assert len(merges) == shards
    for shard, sums in enumerate(merges):
        # The partial sums as they arrive, one replica's after another's; then as they are added.
        arrived = [
            (row, source)
            for source, rows in enumerate(replicas)
            for row in rows.tolist()
            if row // stack.num_rows == shard
        ]
        added = sorted((row, source, at) for at, (row, source) in enumerate(arrived))
        assert sums.order.tolist() == [at for _, _, at in added]
        assert sums.rows.tolist() == distinct(row for row, _, _ in added)
        assert sums.rows[sums.row].tolist() == [row for row, _, _ in added]


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
        assert host_route.parcel_places(axes, shard_axes)[shard].tolist() == expected
