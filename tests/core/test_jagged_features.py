"""Jagged features beside padded ones: the same rows, gradients and bits, without the padding."""

import functools
import math
import re

import jax
import numpy as np
import pytest

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, Jagged, RaggedIds, TableConfig
from tpu_embed.optimizers import SGD, Adagrad, Adam

LENGTHS = {"history": 6, "pages": 4, "clicks": 5}  # `max_sequence_length` of each sequence
SIZES = {"history": 24, "bag": 24, "pages": 8, "one": 16, "clicks": 24}
OPTIMIZERS = {
    "adagrad": Adagrad(0.1),
    "adam": Adam(0.1),
    "each occurrence": SGD(0.1, use_gradient_accumulation=False),
}


def engine_of(devices, optimizer, *, jagged, placement="mod", **options):
    """Return an engine of two stacks: bags and sequences together, and a sequence alone."""
    table = functools.partial(TableConfig, placement=placement)
    item, page = table(50, 8, name="item"), table(31, 8, name="page", combiner="sum")
    sequence = functools.partial(FeatureConfig, jagged=jagged, on_bad_id="drop")
    features = {
        "history": sequence(item, LENGTHS["history"]),
        "bag": FeatureConfig(item),
        "pages": sequence(page, LENGTHS["pages"]),
        "one": FeatureConfig(page),
        "clicks": sequence(table(40, 4, name="click"), LENGTHS["clicks"]),
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    return EmbeddingEngine(features, optimizer, mesh=mesh, **options)


def ragged(rng, examples, longest, size, *, weighted):
    lengths = rng.integers(0, longest + 1, examples)
    lengths[examples // 2 :: 3] = 0
    splits = np.concatenate([[0], np.cumsum(lengths)])
    weights = rng.normal(size=splits[-1]).astype(np.float32) if weighted else None
    return RaggedIds(rng.integers(0, size, splits[-1]).astype(np.int32), splits, weights)


def batch_of(rng, *, weighted=False):
    # Ids of "pages" may be bad, and rows are longer than what is kept of them.
    return {
        "history": ragged(rng, SIZES["history"], 8, 50, weighted=weighted),
        "bag": rng.integers(-1, 50, (SIZES["bag"], 3)).astype(np.int32),
        "pages": ragged(rng, SIZES["pages"], 6, 35, weighted=False),
        "one": rng.integers(0, 31, SIZES["one"]).astype(np.int32),
        "clicks": ragged(rng, SIZES["clicks"], 9, 40, weighted=weighted),
    }


def padded_gradients(rng):
    shapes = {name: (SIZES[name], length) for name, length in LENGTHS.items()}
    shapes |= {"bag": (SIZES["bag"],), "one": (SIZES["one"],)}
    dims = {"clicks": 4}
    return {
        name: rng.normal(size=(*shape, dims.get(name, 8))).astype(np.float32)
        for name, shape in shapes.items()
    }


@jax.jit
def padded(activations):
    """Return activations with every `Jagged` as `[B, L, D]`."""
    return {
        name: one.to_padded(LENGTHS[name])[0] if name in LENGTHS else one
        for name, one in activations.items()
    }


def in_places(gradients, activations, beyond=np.nan):
    """Return padded gradients as the activations have them, with `beyond` past the last row."""
    given = dict(gradients)
    for name in LENGTHS:
        like = activations[name]
        splits = np.asarray(like.row_splits)
        given[name] = np.full(like.values.shape, beyond, np.float32)
        for s, e in np.ndindex(len(splits), splits.shape[1] - 1):
            begin, end = splits[s, e : e + 2]
            rows = gradients[name][s * (splits.shape[1] - 1) + e]
            given[name][s, begin:end] = rows[: end - begin]
    return placed_like(given, activations)


def placed_like(gradients, activations):
    """Return gradients on the devices of the activations, so that no program moves them there."""
    return {
        name: jax.device_put(one, jax.tree.leaves(activations[name])[0].sharding)
        for name, one in gradients.items()
    }


def assert_states_equal(states, engines):
    pairs = [*zip(engines, states, strict=True)]
    for held in ([e.tables(s) for e, s in pairs], [e.slots(s) for e, s in pairs]):
        jax.tree.map(np.testing.assert_array_equal, *held)


@pytest.mark.parametrize(
    ("name", "devices", "placement"),
    [
        ("adagrad", 8, "mod"),
        ("adagrad", 8, "replicated"),
        ("adam", 1, "div"),
        ("each occurrence", 2, "mod"),
    ],
)
@pytest.mark.whole
def test_jagged_has_the_bits_of_padded(name, devices, placement):
    weighted = name != "adam"
    make = functools.partial(engine_of, devices, OPTIMIZERS[name], placement=placement)
    engines = [make(jagged=jagged) for jagged in (False, True)]
    states = [engine.init(jax.random.key(0)) for engine in engines]
    for step in range(2):
        rng = np.random.default_rng(step)
        features, gradients = batch_of(rng, weighted=weighted), padded_gradients(rng)
        batches = [engine.place(features) for engine in engines]
        found = [e.lookup(*pair) for e, *pair in zip(engines, states, batches, strict=True)]
        for key, values in padded(found[1]).items():
            np.testing.assert_array_equal(values, found[0][key], err_msg=key)
        given = placed_like(gradients, found[0]), in_places(gradients, found[1])
        states = [e.update(*args) for e, *args in zip(engines, states, batches, given, strict=True)]
    assert_states_equal(states, engines)


@pytest.mark.whole
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.whole), 8])
def test_ids_inside_a_jit_are_jagged_too(devices):
    rng = np.random.default_rng(0)
    engine = engine_of(devices, Adagrad(0.1), jagged=True)
    ragged_ids = batch_of(rng)
    dense = {name: ragged_ids[name] for name in ("bag", "one")}
    for name in LENGTHS:
        ids = ragged_ids[name]
        lengths = np.diff(ids.row_splits)
        there = np.arange(lengths.max() + 1) < lengths[:, None]
        dense[name] = np.full(there.shape, -1, np.int32)
        dense[name][there] = ids.values
    gradients = padded_gradients(rng)
    state, batch = engine.init(jax.random.key(0)), engine.place(dense)
    placed = engine.lookup(state, batch)
    traced = jax.jit(engine.lookup)(state, dense)
    expected = padded(placed)
    for name, values in padded(traced).items():
        # Shards add up their parts of a traced bag.
        near = 1e-6 if name == "bag" else 0
        np.testing.assert_allclose(values, expected[name], rtol=near, atol=near, err_msg=name)
    updated = [
        engine.update(state, batch, in_places(gradients, placed)),
        jax.jit(engine.update)(state, dense, in_places(gradients, traced)),
    ]
    assert_states_equal(updated, (engine, engine))


@pytest.mark.whole
def test_the_guard_reads_rows_alone():
    engine = engine_of(8, SGD(0.1), jagged=True, on_bad_gradient="error")
    rng = np.random.default_rng(0)
    state, batch = engine.init(jax.random.key(0)), engine.place(batch_of(rng))
    found, gradients = engine.lookup(state, batch), padded_gradients(rng)
    engine.update(state, batch, in_places(gradients, found))
    gradients["clicks"][:] = np.inf
    with pytest.raises(ValueError, match="activation gradient of feature 'clicks'"):
        engine.update(state, batch, in_places(gradients, found))


def test_gradients_may_be_jagged_or_none():
    engine = engine_of(8, SGD(1.0), jagged=True)
    state, batch = engine.init(jax.random.key(0)), engine.place(batch_of(np.random.default_rng(0)))
    found = engine.lookup(state, batch)
    values, _ = tpu_embed.split_activations(found)
    nothing = {
        name: Jagged(one.values, None) if name in LENGTHS else one for name, one in found.items()
    }
    states = [engine.update(state, batch, given) for given in (values, found, nothing)]
    for other in states[1:]:
        assert_states_equal((states[0], other), (engine, engine))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_no_padded_array_in_a_program(devices):
    # 16 examples of up to 128 ids, all but one of them short.
    lengths = np.full(16, 2)
    lengths[3] = 128
    ids = RaggedIds(np.arange(lengths.sum()) % 99, np.concatenate([[0], np.cumsum(lengths)]))
    mesh, largest = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",)), []
    for jagged in (False, True):
        feature = FeatureConfig(TableConfig(99, 7, name="t"), 128, jagged=jagged)
        engine = EmbeddingEngine({"x": feature}, SGD(0.1), mesh=mesh)
        state, batch = engine.init(jax.random.key(0)), engine.place({"x": ids})
        step = jax.jit(lambda s, b, e=engine: e.update(s, b, e.lookup(s, b)), donate_argnums=0)
        text = step.lower(state, batch).compile().as_text()
        shapes = [shape.split(",") for shape in re.findall(r"f32\[(\d[\d,]*)\]", text)]
        largest.append(max(math.prod(map(int, shape)) for shape in shapes))
    examples = 16 // devices
    assert largest[0] == examples * 128 * 7
    assert largest[1] < max(2 * lengths.sum(), 99 + devices) * 7


def test_what_is_refused():
    table = TableConfig(10, 4, name="t")
    output_shape = r"output_shape: expected None for a sequence, got \(8, 3\) with jagged=True; .*"
    with pytest.raises(ValueError, match=output_shape + "activation is a Jagged"):
        FeatureConfig(table, output_shape=(8, 3), jagged=True)
    engine = EmbeddingEngine({"user": [FeatureConfig(table, jagged=True)]}, SGD(0.1))
    rank = r"feature 'user/0': expected .*\[B, H\], got rank 1; give each example one row"
    with pytest.raises(ValueError, match=rank):
        engine.place({"user": [np.zeros(8, np.int32)]})
    state = engine.init(jax.random.key(0))
    size = (
        r"feature 'user/0': batch size: expected a positive multiple of 8.*got 3; use .*pad_batch"
    )
    with pytest.raises(ValueError, match=size):
        engine.place({"user": [RaggedIds(np.zeros(3, np.int32), np.array([0, 1, 2, 3]))]})
    with pytest.raises(ValueError, match=size):
        jax.jit(engine.lookup)(state, {"user": [np.zeros((3, 2), np.int32)]})


def test_gradients_of_another_batch_are_refused_and_change_nothing():
    engine = EmbeddingEngine(
        {"x": FeatureConfig(TableConfig(10, 4, name="t"), jagged=True)}, SGD(1)
    )
    state = engine.init(jax.random.key(0))
    few, many = (
        engine.place({"x": RaggedIds.from_lists([[1] * length] * 8)}) for length in (2, 50)
    )
    others = engine.lookup(state, many)["x"]
    assert others.values.shape != engine.lookup(state, few)["x"].values.shape
    before = np.array(engine.tables(state)["t"])
    wanted = r"gradient of feature 'x': expected shape \(8, 8, 4\), got .*values that the lookup"
    for gradient in (others, others.values, others.to_padded(2)[0], others.sums()):
        with pytest.raises(ValueError, match=wanted):
            engine.update(state, few, {"x": gradient})
        with pytest.raises(ValueError, match=wanted):
            engine.update_in_place(state, few, {"x": gradient})
    np.testing.assert_array_equal(engine.tables(state)["t"], before)
