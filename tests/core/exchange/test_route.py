"""Fetching rows from their owners, and sending partial sums to them, on several devices."""

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh, PartitionSpec
from layout_cases import make_stack

from tpu_embed._types import PADDING_ID
from tpu_embed.core.exchange import route
from tpu_embed.core.layout import ROW_MULTIPLE, MeshAxes, Stack, make_axes, round_up
from tpu_embed.kernels import reference
from tpu_embed.kernels.operands import RowsToSum

N, D = 12, 4


def draw(stack, devices, seed=0):
    """Return physical rows [devices, N]: many of few, some absent."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-1, stack.physical_rows, (devices, N))
    few = rng.integers(0, min(3, stack.physical_rows), (devices, N))
    return np.where(rng.random((devices, N)) < 0.5, rows, few).astype(np.int32)


def most(rows, stack):
    """Return the most distinct rows that a device has of one shard."""
    return max(
        len({row for row in line.tolist() if row >= 0 and row // stack.num_rows == shard})
        for line in rows
        for shard in range(stack.num_shards)
    )


def on_devices(axes: MeshAxes, stack: Stack, function, table, *per_device):
    """Run a function of this device's shard and of its line of each array; lines come back."""
    spec = axes.spec(axes.batch_axes)

    def device(table, *lines):
        results = function(table, *(line[0] for line in lines))
        return jax.tree.map(lambda x: x[None], results)

    return jax.jit(
        jax.shard_map(
            device,
            mesh=axes.mesh,
            in_specs=(axes.spec(stack.shard_axes), *(spec for _ in per_device)),
            out_specs=PartitionSpec(axes.mesh.axis_names),
            check_vma=False,
        )
    )(table, *per_device)


def routed(rows, stack, capacity):
    """Return what a device sends, `[S, C]` local rows, and the place of each of its ids there."""
    sent = np.full((stack.num_shards, capacity), PADDING_ID, np.int32)
    places = np.full(rows.size, sent.size, np.int32)
    for shard in range(stack.num_shards):
        mine = np.unique(rows[(rows >= 0) & (rows // stack.num_rows == shard)])
        sent[shard, : mine.size] = mine - shard * stack.num_rows
        for rank, row in enumerate(mine):
            places[rows == row] = shard * capacity + rank
    return sent, places


def table_of(stack):
    return np.random.default_rng(1).normal(size=(stack.physical_rows, D)).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.quick(2)
def test_fetch_reads_every_row_where_it_lives(shards):
    stack = make_stack([23, 5, 1], shards)
    rows, table = draw(stack, shards), table_of(stack)
    capacity = most(rows, stack)
    sent, places = zip(*(routed(line, stack, capacity) for line in rows), strict=True)
    asked = np.stack(sent).swapaxes(0, 1)  # of each owner, by the device that asks

    def fetch(table, asked, places, rows):
        alone, bags = stack.num_shards == 1, np.arange(N, dtype=np.int32)
        given = RowsToSum(table, rows if alone else places, bags)
        found = route.fetch(given, None if alone else asked, stack)
        return reference.gather_rows(found.source, found.index)

    axes = make_axes(mesh(shards), None)
    found = on_devices(axes, stack, fetch, table, asked, np.stack(places), rows)
    expected = np.where((rows >= 0)[..., None], table[np.maximum(rows, 0)], 0)
    np.testing.assert_array_equal(found, expected)


def test_a_shard_keeps_its_own_rows():
    stack, rows = make_stack([23, 5], 2), np.array([[0, -1, 27, 14, 13]] * 2, np.int32)
    found = on_devices(
        make_axes(mesh(2), None),
        stack,
        lambda table, rows: route.rows_of_shard(rows, stack),
        table_of(stack),
        rows,
    )
    size = stack.num_rows
    own = [[r % size if r >= 0 and r // size == s else -1 for r in rows[0]] for s in (0, 1)]
    assert found.tolist() == own


def sums_by_row(stack, axes, rows, gradients, capacity):
    """Send each device's partial sums to the owners; return what they hold, a line a device."""

    sent, places = zip(*(routed(line, stack, capacity) for line in rows), strict=True)
    orders = np.stack([np.argsort(line, kind="stable") for line in places])

    def device(table, sent, order, places, gradients):
        num_sums = stack.num_shards * capacity
        sums = reference.segment_sum(gradients[order], places[order], num_sums)
        received = route.send_sums(sums, stack, axes)
        arrived = route.send_rows(route.only_mine(sent, stack, axes), stack, axes)
        merged = route.merge(route.route_merge(*received, arrived, stack, axes))
        return merged.row_ids, merged.sums

    lines = np.stack(sent), orders, np.stack(places), gradients
    return on_devices(axes, stack, device, table_of(stack), *lines)


def expected_sums(rows, gradients):
    """Return row -> sum: over a device's ids in order, then over devices in order, float32."""
    totals = {}
    for line, values in zip(rows, gradients, strict=True):
        partial = {}
        for row, value in zip(line.tolist(), values, strict=True):
            if row >= 0:
                partial[row] = partial.get(row, np.zeros(D, np.float32)) + value
        for row, value in partial.items():
            totals[row] = totals.get(row, np.zeros(D, np.float32)) + value
    return totals


def check_owners(stack, rows, sums, expected, shard_of):
    """Check that each device has the rows of its shard, distinct, padded, with the exact sums."""
    for device, (line, values) in enumerate(zip(np.asarray(rows), np.asarray(sums), strict=True)):
        assert line.size % ROW_MULTIPLE == 0
        local = line[line >= 0]
        assert len(set(local.tolist())) == local.size
        mine = (local + shard_of(device) * stack.num_rows).tolist()
        assert set(mine) == {row for row in expected if row // stack.num_rows == shard_of(device)}
        for row, value in zip(mine, values[line >= 0], strict=True):
            np.testing.assert_array_equal(value, expected[row])


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.quick(2)
def test_partial_sums_meet_at_the_owner_in_order(shards):
    stack, axes = make_stack([23, 5, 1], shards), make_axes(mesh(shards), None)
    rows = draw(stack, shards)
    gradients = np.random.default_rng(2).normal(size=(shards, N, D)).astype(np.float32)
    found = sums_by_row(stack, axes, rows, gradients, most(rows, stack))
    check_owners(stack, *found, expected_sums(rows, gradients), lambda device: device)


@pytest.mark.parametrize("batch_axes", [("p",), ("d",), ("p", "d")])
@pytest.mark.parametrize("names", [("p", "d"), ("d", "p")])
@pytest.mark.quick(2)
def test_rows_and_batch_on_different_axes(names, batch_axes):
    """Rows are split over "d" alone; ids over other axes meet there, once, in batch order."""
    devices = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), names)
    stack, axes = make_stack([23, 5], devices.shape["d"]), make_axes(devices, batch_axes)
    rows = draw(stack, axes.replicas)
    gradients = np.random.default_rng(2).normal(size=(*rows.shape, D)).astype(np.float32)
    found = sums_by_row(stack, axes, rows, gradients, most(rows, stack))
    places = np.arange(6).reshape(2, 3)

    def shard_of(device):
        return int(np.argwhere(places == device)[0][names.index("d")])

    check_owners(stack, *found, expected_sums(rows, gradients), shard_of)


@pytest.mark.parametrize(("n", "expected"), [(0, 64), (1, 64), (64, 64), (65, 128)])
def test_rounding_up(n, expected):
    assert round_up(n, 64) == expected
