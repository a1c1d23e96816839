"""Routes computed on the device: those of the host, and nothing that indexes single numbers."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh, PartitionSpec
from jaxlib.mlir import ir
from layout_cases import make_stack
from pairs import parametrize_pairs

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, optimizers
from tpu_embed._types import PADDING_ID
from tpu_embed.core.exchange import device_route, host_route
from tpu_embed.core.layout import make_axes
from tpu_embed.kernels import dispatch

N, BLOCKS = 40, 4
DRAWS = ("uniform", "skewed", "absent", "one shard", "one row")
KERNELS = {"native": contextlib.nullcontext, "reference": dispatch.reference_only}


def draw(kind, stack, seed=0):
    """Return physical rows [N], some absent."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, stack.physical_rows, N)
    if kind == "skewed":
        rows = np.where(rng.random(N) < 0.8, rows % 3, rows)
    if kind == "one shard":
        rows = rows % stack.num_rows + (stack.num_shards - 1) * stack.num_rows
    if kind == "one row":
        rows = np.full(N, stack.num_rows - 1)
    kept = rng.random(N) < (0 if kind == "absent" else 0.9)
    return np.where(kept, rows, PADDING_ID).astype(stack.index_dtype)


def blocks_of(rows):
    """Return the block of each id, as of two features that stand one after the other."""
    half = rows.size // 2
    return (np.arange(rows.size) % half * BLOCKS // half).astype(np.int32)


def sorted_on_host(rows, blocks=None):
    """Return the ids of one device as the host sorts them."""
    return dispatch.host_kernels().sort_ids([rows], None if blocks is None else [blocks])[0]


def per_shard(sum_rows, stack):
    """Return the sent rows of each shard, as local rows."""
    return [
        [int(row) % stack.num_rows for row in sum_rows if row // stack.num_rows == shard]
        for shard in range(stack.num_shards)
    ]


def most_of(sent):
    """Return the smallest capacity that suffices."""
    return max(1, *(len(rows) for rows in sent))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def find(rows, blocks, stack, capacity, kernels):
    del kernels  # programs traced with other kernels are other programs
    ids = device_route.sort_ids(rows, stack, (rows, blocks), blocks, BLOCKS)
    parts = None if blocks is None else ids.payload[1]
    return ids, device_route.find_destinations(ids.row_ids, stack, capacity, parts)


@parametrize_pairs(shards=[1, 3], in_blocks=[False, True], kernels=list(KERNELS))
@pytest.mark.quick(1)
def test_every_id_has_the_place_that_the_host_gives_it(shards, in_blocks, kernels):
    stack = make_stack([23, 5, 1], shards)
    for kind in DRAWS:
        rows = draw(kind, stack)
        blocks = blocks_of(rows) if in_blocks else None
        host = sorted_on_host(rows, blocks)
        sent = per_shard(host.sum_rows, stack)
        # Each capacity is a compilation: once no more room than must be, else the worst case.
        capacity = most_of(sent) if kind == "uniform" else N
        with KERNELS[kernels]():
            ids, found = find(rows, blocks, stack, capacity, kernels)
        n = host.order.size
        np.testing.assert_array_equal(ids.order[:n], host.order)
        np.testing.assert_array_equal(ids.payload[0][:n], rows[host.order])
        (at,) = host_route.bounds([host.sum_rows], stack)
        places = host_route.places(at, capacity)[host.sum]
        outside = shards * capacity
        np.testing.assert_array_equal(found.target, [*places, *[outside] * (N - n)])
        lines = [line + [PADDING_ID] * (capacity - len(line)) for line in sent]
        assert np.asarray(found.row_ids).tolist() == lines
        assert found.row_ids.dtype == stack.index_dtype
        assert not found.overflow


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rows_per_shard", [23, 2**30])
@pytest.mark.quick(2)
def test_ids_are_sorted_by_row_and_block(rows_per_shard, dtype):
    """In two sorts, where a number of 32 bits cannot hold both."""
    with jax.enable_x64(dtype == "int64"):
        stack = make_stack([rows_per_shard], 1)
        rows = np.where(np.arange(N) % 5, np.arange(N) % 3, PADDING_ID).astype(dtype)
        rows[rows == 2] = rows_per_shard - 1
        blocks = blocks_of(rows)
        given = rows, (blocks,), blocks
        found = jax.jit(
            lambda rows, payload, blocks: device_route.sort_ids(
                rows, stack, payload, blocks, BLOCKS
            )
        )(*given)
        host = sorted_on_host(rows, blocks)
        n = host.order.size
        np.testing.assert_array_equal(found.order[:n], host.order)
        np.testing.assert_array_equal(found.row_ids[:n], rows[host.order])
        np.testing.assert_array_equal(found.payload[0][:n], blocks[host.order])
        assert (found.row_ids[n:] == stack.physical_rows).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_place_too_few_is_told(kernels):
    stack = make_stack([23, 5], 3)
    rows = draw("uniform", stack)
    sent = per_shard(sorted_on_host(rows).rows, stack)
    with KERNELS[kernels]():
        _, found = find(rows, None, stack, most_of(sent) - 1, kernels)
    assert found.overflow
    assert int(found.target.max()) <= 3 * (most_of(sent) - 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_fetched_rows_are_found_in_batch_order(kernels):
    shards = 4
    stack, axes = make_stack([23, 5, 1], shards), make_axes(mesh(shards), None)
    kinds = ["uniform", "skewed", "absent", "one shard"]
    rows = np.stack([draw(kind, stack, seed) for seed, kind in enumerate(kinds)])
    host = [sorted_on_host(line) for line in rows]
    sent = [per_shard(one.rows, stack) for one in host]
    capacity = max(most_of(one) for one in sent)

    def device(rows):
        ids = device_route.sort_ids(rows[0], stack)
        found, overflow = device_route.route_rows(ids, stack, capacity)
        return jax.tree.map(lambda x: x[None], (found.asked, found.index, overflow))

    spec = PartitionSpec("d")
    mapped = jax.shard_map(device, mesh=axes.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with KERNELS[kernels]():
        asked, index, overflow = jax.jit(mapped)(rows)
    assert not overflow.any()
    for owner in range(shards):
        expected = [one[owner] + [PADDING_ID] * (capacity - len(one[owner])) for one in sent]
        assert asked[owner].tolist() == expected
    for line, one, found in zip(rows, host, np.asarray(index), strict=True):
        expected = np.full(N, shards * capacity)
        (at,) = host_route.bounds([one.rows], stack)
        expected[one.order] = host_route.places(at, capacity)[one.row]
        np.testing.assert_array_equal(found, expected)
        assert (line >= 0).sum() == one.order.size


MESHES = {
    "one sender": (mesh(1), None),
    "in order": (mesh(4), None),
    "out of order": (Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("d", "p")), ("d", "p")),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.quick(3)
def test_the_owner_adds_in_batch_order(case, kernels):
    devices, batch_axes = MESHES[case]
    stack, axes = make_stack([61], devices.shape["d"]), make_axes(devices, batch_axes)
    arrival, size = axes.batch_order(stack.shard_axes), 7
    assert (case == "out of order") == (arrival.tolist() != list(range(arrival.size)))
    rng = np.random.default_rng(0)
    received = np.full((arrival.size, size), PADDING_ID, np.int32)
    for parcel in received:
        rows = np.sort(rng.integers(0, stack.num_rows, rng.integers(0, size + 1)))
        parcel[: rows.size] = rows
    with KERNELS[kernels]():
        merge = jax.jit(lambda given: device_route.route_merge(given, stack, axes))(received)
    # By row, then by sender in batch order, then as sent; the place is where it arrived.
    terms = [
        (int(row), number, int(source) * size + i)
        for number, source in enumerate(arrival)
        for i, row in enumerate(received[source])
        if row >= 0
    ]
    terms.sort(key=lambda term: term[:2])
    distinct = sorted({row for row, _, _ in terms})
    n, most = len(terms), merge.row_ids.shape[0]
    index = np.arange(n) if merge.index is None else np.asarray(merge.index)[:n]
    assert index.tolist() == [place for _, _, place in terms]
    assert np.asarray(merge.segments)[:n].tolist() == [distinct.index(row) for row, _, _ in terms]
    assert (np.asarray(merge.segments)[n:] >= most).all()
    assert np.asarray(merge.row_ids).tolist() == distinct + [PADDING_ID] * (most - len(distinct))


def step_of(way):
    """Return a training step of traced ids on 4 devices, and the shapes of its arguments."""
    placement = "replicated" if way in ("psum", "copies") else "mod"
    table = TableConfig(
        20 if way == "psum" else 4000, 8, combiner="sum", name="t", placement=placement
    )
    features = {"a": FeatureConfig(table), "b": FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, optimizers.Adagrad(0.1), mesh=mesh(4))
    rng = np.random.default_rng(0)
    batch = 36 if way == "uneven blocks" else 32
    ids = {name: rng.integers(-1, table.vocabulary_size, (batch, 6)) for name in features}
    ids = {name: one.astype(np.int32) for name, one in ids.items()}
    weights = {name: rng.random(one.shape, np.float32) for name, one in ids.items()}
    spec = engine.place(ids, weights).spec if way == "spec" else None

    def step(state, ids, weights):
        activations = engine.lookup(state, ids, weights, spec=spec)
        return engine.update(state, ids, activations, weights, spec=spec)

    state = jax.eval_shape(engine.init, jax.random.key(0))
    return step, (state, ids, weights)


def indexed(module):
    """Return (operation, elements) of every gather from and scatter into one-dimensional arrays."""
    found = []

    def visit(operation):
        if operation.name in ("stablehlo.gather", "stablehlo.scatter"):
            shape = list(operation.operands[0].type.shape)
            if len(shape) == 1:
                found.append((operation.name, shape[0]))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


@pytest.mark.parametrize("way", ["worst case", "spec", "uneven blocks", "psum", "copies"])
@pytest.mark.quick(3)
def test_a_tpu_indexes_no_array_of_single_numbers(way):
    step, arguments = step_of(way)
    traced = jax.jit(step).trace(*arguments)
    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    assert [one for one in indexed(module) if one[1] > 4] == []
    assert "stablehlo.sort" in str(module)


def test_the_walk_finds_what_it_looks_for():
    numbers = jnp.arange(9)
    lowered = jax.jit(lambda x, i: (x[i], x.at[i].set(1))).lower(numbers, numbers)
    found = indexed(lowered.compiler_ir("stablehlo"))
    assert sorted(found) == [("stablehlo.gather", 9), ("stablehlo.scatter", 9)]
