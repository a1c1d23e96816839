"""What the device sorts: as the host does, and without indexing single numbers."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh
from jaxlib.mlir import ir
from layout_cases import make_stack

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, optimizers
from tpu_embed._types import PADDING_ID
from tpu_embed.core.exchange import route
from tpu_embed.core.layout import make_axes
from tpu_embed.kernels import dispatch

N, BLOCKS = 40, 4
KERNELS = {"native": contextlib.nullcontext, "reference": dispatch.reference_only}


def blocks_of(rows):
    """Return the block of each id, as of two features that stand one after the other."""
    half = rows.size // 2
    return (np.arange(rows.size) % half * BLOCKS // half).astype(np.int32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_rows", [23, 2**30])
@pytest.mark.quick(2)
def test_ids_are_sorted_as_on_the_host(num_rows, dtype, kernels, weighted):
    """In two sorts, where a number of 32 bits cannot hold row and block."""
    with jax.enable_x64(dtype == "int64"), KERNELS[kernels]():
        rows = np.where(np.arange(N) % 5, np.arange(N) % 3, PADDING_ID).astype(dtype)
        rows[rows == 2] = num_rows - 1
        blocks, bags = blocks_of(rows), np.arange(N, dtype=np.int32) // 2
        gains = np.arange(N, dtype=np.float32) if weighted else None
        found = jax.jit(
            lambda rows, blocks, bags, gains: route.sort_ids(
                rows, num_rows, blocks, BLOCKS, bags, gains
            )
        )(rows, blocks, bags, gains)
        host = dispatch.host_kernels().sort_ids([rows], [blocks])[0]
        n = host.order.size
        np.testing.assert_array_equal(found[0][:n], rows[host.order])
        for sorted_too, one in zip(found[1:], (bags, gains, blocks), strict=True):
            if one is not None:
                np.testing.assert_array_equal(sorted_too[:n], one[host.order])
        assert (found[0][n:] == num_rows).all()


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
        sums = np.zeros((received.size, 1), np.float32)
        merge = jax.jit(lambda given: route.route_merge(sums, None, given, stack, axes))(received)
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

    def step(state, ids, weights):
        activations = engine.lookup(state, ids, weights)
        return engine.update(state, ids, activations, weights)

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


@pytest.mark.parametrize("way", ["shards", "uneven blocks", "psum", "copies"])
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
