"""The order in which gradients of a row are summed: within blocks of the batch, then over them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.kernels import dispatch

V, D = 5, 2


@pytest.fixture(autouse=True)
def spoiled(monkeypatch):
    """Make every sum NaN that a kernel need not write; return how many sums these were, by call."""
    calls, gather_sum = [], dispatch.gather_sum

    def spoil(rows, layout):
        sums = gather_sum(rows, layout)
        if layout.filled:
            return sums
        numbers = jnp.arange(sums[0].shape[0])[:, None]
        read = (numbers == rows.segments).any(axis=1, keepdims=True)
        calls.append(sum(layout.bags))
        return (jnp.where(read, sums[0], jnp.nan),)

    monkeypatch.setattr(dispatch, "gather_sum", spoil)
    return calls


def magnitudes(shape, seed=0):
    """Return numbers whose sums have other bits in another order."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(np.float32)


def in_blocks(ids, gradients, blocks):
    """Return [V, D] float32 sums of the features' gradients in the promised order."""
    sizes = {name: len(rows) for name, rows in ids.items()}
    examples = [(e * blocks // n, name, e) for name, n in sizes.items() for e in range(n)]
    total = np.zeros((V, D), np.float32)
    for b in range(blocks):
        block = np.zeros((V, D), np.float32)
        for number, name, example in sorted(examples):
            if number == b:
                for row in ids[name][example]:
                    if row >= 0:
                        block[row] = block[row] + gradients[name][example]
        total = total + block
    return total


def make_engine(rule, devices, placement, initializer=None, **options):
    table = TableConfig(V, D, initializer, combiner="sum", placement=placement)
    features = {"a": FeatureConfig(table), "b": FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(features, rule, mesh=mesh(devices), **options)


kept_engine = functools.cache(make_engine)


def train(ids, gradients, devices, placement="mod", **options):
    zeros = jax.nn.initializers.zeros
    engine = kept_engine(o.SGD(1.0), devices, placement, zeros, **options)
    state = engine.update(engine.init(jax.random.key(0)), engine.place(ids), gradients)
    return -np.asarray(engine.tables(state)["table_0"])


def draw(batch, other=None):
    rng, other = np.random.default_rng(batch), other or batch
    ids = {"a": rng.integers(-1, V, (batch, 3)), "b": rng.integers(-1, V, (other, 2))}
    return ids, {name: magnitudes((len(ids[name]), D), seed) for seed, name in enumerate(ids)}


@pytest.mark.parametrize(("blocks", "devices"), [(1, 1), (4, 2), (4, 4), (16, 8)])
@pytest.mark.quick(1)
def test_the_number_of_blocks_is_an_option(blocks, devices):
    ids, gradients = draw(16)
    found = train(ids, gradients, devices, sum_blocks=blocks)
    np.testing.assert_array_equal(found, in_blocks(ids, gradients, blocks))


BLOCKS = {8: [(24, 24), (8, 24)], 4: [(12, 12), (28, 28), (24, 16), (4, 20), (12, 28)]}
BLOCKS |= {2: [(10, 10), *BLOCKS[4]], 1: [(5, 5), (9, 9), *BLOCKS[4]]}
"""Examples of two features by number of devices: no device boundary is inside a block."""


@pytest.mark.parametrize("placement", ["mod", "replicated"])
@pytest.mark.parametrize(("devices", "sizes"), [(n, two) for n in BLOCKS for two in BLOCKS[n]])
@pytest.mark.quick(8)
def test_sums_are_taken_in_eight_blocks(sizes, devices, placement):
    """Example e of B is in block e · 8 // B, also where blocks differ in size or are empty."""
    ids, gradients = draw(*sizes)
    expected = in_blocks(ids, gradients, 8)
    np.testing.assert_array_equal(train(ids, gradients, devices, placement), expected)
    lists = {n: [[i for i in row if i >= 0] for row in rows.tolist()] for n, rows in ids.items()}
    ragged = {name: RaggedIds.from_lists(bags) for name, bags in lists.items()}
    np.testing.assert_array_equal(train(ragged, gradients, devices, placement), expected)
    alone = [in_blocks({name: rows}, gradients, 8) for name, rows in ids.items()]
    others = in_blocks(ids, gradients, 1), in_blocks(ids, gradients, 4), alone[0] + alone[1]
    # Of five examples few sums have terms enough to tell orders apart.
    assert sizes == (5, 5) or not any(np.array_equal(other, expected) for other in others)


def test_more_devices_than_blocks_are_the_blocks():
    ids, gradients = draw(16)
    found = train(ids, gradients, 8, sum_blocks=2)
    np.testing.assert_array_equal(found, in_blocks(ids, gradients, 8))


def test_a_block_on_two_devices_is_summed_in_two_parts():
    """Device boundaries inside blocks: the same sum within rounding."""
    ids, gradients = draw(24)  # blocks of 3, devices of 8
    found = train(ids, gradients, 3)
    size = in_blocks(ids, {n: np.abs(g) for n, g in gradients.items()}, 8)
    # 120 additions, each rounded by at most 2^-24 of a partial sum below Σ|g|.
    assert (np.abs(found - in_blocks(ids, gradients, 8)) <= 120 * 2.0**-24 * size).all()


@pytest.mark.parametrize("kernels", [dispatch.reference_only, contextlib.nullcontext])
@pytest.mark.parametrize("placement", ["replicated", "mod"])
@pytest.mark.quick(1)
def test_ids_inside_a_jit_are_summed_like_placed_ones(placement, kernels, spoiled):
    """FTRL moves every row that it is given, so rows without ids must not be among them."""
    ids, gradients = draw(28)  # blocks of 3 and of 4 examples
    ids = {name: np.where(one == 3, -1, one) for name, one in ids.items()}
    weights = {name: magnitudes(one.shape, 7) for name, one in ids.items()}
    with kernels():
        engine = make_engine(o.FTRL(0.1), 4, placement)
        state = engine.init(jax.random.key(0))
        placed = engine.update(state, engine.place(ids, weights), gradients)
        traced = jax.jit(engine.update)(state, ids, gradients, weights)
        before, after, expected = (
            np.asarray(engine.tables(s)["table_0"]) for s in (state, traced, placed)
        )
    np.testing.assert_array_equal(after, expected)
    assert np.isfinite(after).all()
    assert bool(spoiled) == (placement == "mod")
    assert (after[3] == before[3]).all()
    assert (np.delete(after, 3, 0) != np.delete(before, 3, 0)).any()
