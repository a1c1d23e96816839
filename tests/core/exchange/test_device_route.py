"""What the device sorts: as the host does, and without indexing single numbers."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jaxlib.mlir import ir

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, optimizers
from tpu_embed.core.exchange import route
from tpu_embed.kernels import dispatch

N, BLOCKS = 40, 4
KERNELS = {"native": contextlib.nullcontext, "reference": dispatch.reference_only}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("num_rows", "dtype"), [(23, "int32"), (2**30, "int32"), (2**30, "int64")])
@pytest.mark.quick(2)
def test_ids_are_sorted_as_on_the_host(num_rows, dtype, kernels):
    """In two sorts, where a number of 32 bits cannot hold row and block."""
    with jax.enable_x64(dtype == "int64"), KERNELS[kernels]():
        rows = np.where(np.arange(N) % 5, np.arange(N) % 3, -1).astype(dtype)
        rows[rows == 2] = num_rows - 1
        # The block of each id, as of two features that stand one after the other.
        blocks = (np.arange(N) % (N // 2) * BLOCKS // (N // 2)).astype(np.int32)
        bags, gains = np.arange(N, dtype=np.int32) // 2, np.arange(N, dtype=np.float32)
        found = jax.jit(
            lambda rows, *others: route.sort_ids(rows, num_rows, others[0], BLOCKS, *others[1:])
        )(rows, blocks, bags, gains)
        order = np.lexsort((blocks, rows))[np.count_nonzero(rows < 0) :]
        for sorted_too, one in zip(found, (rows, bags, gains, blocks), strict=True):
            np.testing.assert_array_equal(sorted_too[: order.size], one[order])
        assert (found[0][order.size :] == num_rows).all()


WAYS = {
    "shards": (4000, "mod"),
    "uneven blocks": (4000, "mod"),
    "psum": (20, "replicated"),
    "copies": (4000, "replicated"),
}


def step_of(way):
    """Return a training step of traced ids on 4 devices, and the shapes of its arguments."""
    size, placement = WAYS[way]
    table = TableConfig(size, 8, combiner="sum", name="t", placement=placement)
    features = {"a": FeatureConfig(table), "b": FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, optimizers.Adagrad(0.1), mesh=mesh(4))
    rng = np.random.default_rng(0)
    batch = 36 if way == "uneven blocks" else 32
    ids = {name: rng.integers(-1, size, (batch, 6)).astype(np.int32) for name in features}
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


@pytest.mark.parametrize("way", WAYS)
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
