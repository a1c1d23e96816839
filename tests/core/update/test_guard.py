"""Gradients that are not finite: a step is applied completely or not at all, on all devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import assert_same, mesh
from jax.experimental import checkify
from optimizer_cases import CASES

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.layout import resolve
from tpu_embed.core.state import retrieve

BATCH, V, D = 16, 11, 2


def _table(name, optimizer=None, size=V, **options):
    ones = jax.nn.initializers.ones
    return TableConfig(size, D, ones, name=name, optimizer=optimizer, **options)


PATHS = {
    "kernel": _table("kernel", o.Adagrad(0.1)),
    "every_row": _table("every_row", o.Adam(0.1, lazy_adam=False), placement="div"),
    "psum": _table("psum", o.Momentum(0.1), 5, placement="replicated"),
    "copies": _table("copies", o.Adagrad(0.2), 90, placement="replicated"),
    "half": _table("half", o.RowWiseAdagrad(0.1), dtype="bfloat16"),
    "shared_scalar": _table("shared_scalar", optax.adam(0.1)),
    "each": _table("each", o.SGD(0.1, use_gradient_accumulation=False), combiner="sum"),
}
"""A table for every way that an update takes."""
OTHERS = {name: _table(name, cases[0]) for name, cases in CASES.items()}
for known in ("SGD", "Momentum", "Adagrad", "RowWiseAdagrad", "Adam"):
    del OTHERS[known]
FEATURES = {
    **{name: FeatureConfig(table) for name, table in (PATHS | OTHERS).items()},
    "again": FeatureConfig(PATHS["kernel"]),
    "sequence": FeatureConfig(PATHS["kernel"], max_sequence_length=2),
    "fixed": FeatureConfig(_table("fixed", trainable=False)),
}
SHARED = ("again", "sequence", "fixed")
MET = {
    1: ("kernel", "every_row", "each", *SHARED),
    2: ("kernel", "psum", *SHARED),
    8: (*PATHS, *SHARED),
}
DEVICES = [*(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2)), 8]
"""The features of the engines on so many devices."""
NAN, INFINITY = np.float32("nan"), np.float32("inf")


def _ids(names, step=0):
    rng, found = np.random.default_rng(step), {}
    for name, feature in FEATURES.items():
        ids = rng.integers(-9, 90, (BATCH, 3)).astype(np.int32)
        found[name] = np.where(ids < 0, np.int32(-1), ids % feature.table.vocabulary_size)
    return {name: found[name] for name in names}


def _gradients(names, step=0):
    rng, found = np.random.default_rng(step), {}
    for name, feature in FEATURES.items():
        length = feature.max_sequence_length
        shape = (BATCH, length, D) if length else (BATCH, D)
        found[name] = rng.normal(size=shape).astype(np.float32)
    return {name: found[name] for name in names}


def _spoilt(names, bad, value=NAN, example=BATCH - 1):
    """Return gradients of which those of `bad` have one bad number, in one example."""
    gradients = _gradients(names)
    for name in bad:
        gradients[name][example, ..., 1] = value
    return gradients


def _of(names, devices, policy="skip", grid=None):
    """Return an engine of some of the features, an initial state, a batch, finite gradients."""
    axes = {"mesh": mesh(devices)} if grid is None else {"mesh": grid, "batch_axes": "data"}
    features = {name: FEATURES[name] for name in names}
    engine = EmbeddingEngine(features, **axes, on_bad_gradient=policy)
    state = engine.init(jax.random.key(0))
    return engine, state, engine.place(_ids(names)), _gradients(names)


@functools.cache
def _trained(policy, devices, names):
    """Return an engine, and its state after two finite steps."""
    engine, state, _, _ = _of(names, devices, policy)
    for step in range(2):
        state = engine.update(state, engine.place(_ids(names, step)), _gradients(names, step))
    return engine, state


def _held(state):
    return jax.device_get((state.tables, state.slots, state.step))


def _logical(engine, state):
    return retrieve.host_arrays(state, engine.layout)


def _counts(state):
    return np.asarray(state.counters["bad_gradients"]).tolist()


def _by_feature(engine, state):
    paths = [feature.path for feature in engine.layout.features]
    return {path: n for path, n in zip(paths, _counts(state), strict=True) if n}


@pytest.mark.parametrize("devices", DEVICES)
def test_finite_steps_have_the_bits_of_allow(devices):
    """On any number of devices the bits are those of one."""
    engine, allowed = _trained("allow", 1, MET[8])
    other, guarded = _trained("skip", devices, MET[devices])
    for expected, found in zip(_logical(engine, allowed), _logical(other, guarded), strict=True):
        assert_same(found, {name: expected[name] for name in found})
    assert int(guarded.step) == int(allowed.step) == 2
    assert set(allowed.counters) == {"bad_ids", "overflows"}
    assert not any(_counts(guarded))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    ("bad", "value", "example"),
    [
        (["kernel"], NAN, 0),
        (["sequence", "again"], INFINITY, BATCH - 1),
        (["kernel"], -INFINITY, 5),
        (["kernel", "every_row", "psum", "each"], NAN, 9),
    ],
    ids=["first", "sequence", "minus infinity", "many"],
)
def test_a_bad_step_changes_nothing(devices, bad, value, example):
    names = MET[devices]
    bad = [name for name in bad if name in names]
    engine, before = _trained("skip", devices, names)
    spoilt = _spoilt(names, bad, value, example)
    after = engine.update(before, engine.place(_ids(names, 7)), spoilt)
    assert_same(_held(after), _held(before))
    assert _by_feature(engine, after) == dict.fromkeys(bad, 1)


@pytest.mark.parametrize("devices", DEVICES)
def test_training_goes_on_after_a_bad_step(devices):
    names = MET[devices]
    engine, expected = _trained("skip", devices, names)
    state = engine.init(jax.random.key(0))
    for step in range(2):
        state = engine.update(state, engine.place(_ids(names, 9)), _spoilt(names, ["again"]))
        state = engine.update(state, engine.place(_ids(names, step)), _gradients(names, step))
    assert_same(_held(state), _held(expected))
    assert _by_feature(engine, state) == {"again": 2}


def test_allow_applies_what_it_gets():
    engine, before = _trained("allow", 1, MET[8])
    after = engine.update(before, engine.place(_ids(MET[8])), _spoilt(MET[8], ["kernel"]))
    assert np.isnan(_logical(engine, after)[0]["kernel"]).any()
    assert int(after.step) == int(before.step) + 1


def test_allow_leaves_no_trace_in_the_program():
    programs = {}
    for policy in ("allow", "skip"):
        engine, state, batch, gradients = _of(["kernel"], 2, policy)
        programs[policy] = str(jax.make_jaxpr(engine.update)(state, batch, gradients))
    assert "is_finite" in programs["skip"]
    assert "is_finite" not in programs["allow"]


def test_a_feature_without_gradient_and_a_table_that_is_not_trained_do_not_count():
    engine, before, batch, gradients = _of(["kernel", "again", "fixed"], 8)
    gradients = {"kernel": None, "again": gradients["again"], "fixed": NAN * gradients["fixed"]}
    with pytest.warns(UserWarning, match="'kernel': None is taken as zeros"):
        after = engine.update(before, batch, gradients)
    assert int(after.step) == 1
    assert not any(_counts(after))
    with pytest.warns(UserWarning, match="None is taken as zeros"):
        after = engine.update(after, batch, dict.fromkeys(gradients))
    assert int(after.step) == 2


def test_a_gradient_counts_in_the_dtype_that_the_table_computes_in():
    engine, before, batch, gradients = _of(["kernel"], 1)
    half = jnp.asarray(gradients["kernel"], jnp.bfloat16).at[3, 0].set(jnp.inf)
    after = engine.update(before, batch, {"kernel": half})
    assert _by_feature(engine, after) == {"kernel": 1}
    assert_same(_held(after), _held(before))


# -- every family of rules, packed rows, other meshes --------------------------------------------


def test_every_other_optimizer_skips():
    names = list(OTHERS)
    engine, before, batch, gradients = _of(names, 1)
    moved = engine.update(before, batch, gradients)
    old, new = (_logical(engine, state)[0] for state in (before, moved))
    assert all(np.any(old[name] != new[name]) for name in names)
    again = engine.update(moved, batch, _spoilt(names, ["Lion"]))
    assert_same(_held(again), _held(moved))


@pytest.mark.parametrize(("packing", "name"), [("lanes", "kernel"), ("words", "half")])
def test_packed_rows_skip(monkeypatch, packing, name):
    monkeypatch.setattr(resolve, "packing_of", lambda device: packing)
    engine, before, batch, gradients = _of([name], 2)
    assert all(stack.packing == packing for stack in engine.layout.stacks)
    assert_same(_held(engine.update(before, batch, _spoilt([name], [name]))), _held(before))
    old, new = (
        _logical(engine, state)[0][name]
        for state in (before, engine.update(before, batch, gradients))
    )
    assert np.any(old != new)


def test_one_device_of_a_mesh_of_two_axes_decides_for_all():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)
    engine, before, batch, _ = _of(["kernel"], 8, grid=grid)
    after = engine.update(before, batch, _spoilt(["kernel"], ["kernel"]))
    assert_same(_held(after), _held(before))
    assert _by_feature(engine, after) == {"kernel": 1}


# -- inside a jit --------------------------------------------------------------------------------


def _loss(activations, factor):
    return sum((a * factor).sum() for a in activations.values())


def test_inside_a_jit_as_outside():
    """The state is donated, the ids are traced."""
    names = ["kernel", "sequence", "half"]
    engine, before, batch, gradients = _of(names, 8)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, factor):
        activations = engine.lookup(state, ids)
        return engine.update(state, ids, jax.grad(_loss)(activations, factor))

    held = jax.tree.map(np.copy, _held(before))
    expected = engine.update(before, batch, jax.tree.map(np.ones_like, gradients))
    after = step(before, _ids(names), INFINITY)
    assert_same(_held(after), held)
    assert _by_feature(engine, after) == dict.fromkeys(names, 1)
    after = step(after, _ids(names), np.float32(1))
    assert_same(_held(after), _held(expected))
    assert step._cache_size() == 1


def test_a_scan_skips_single_steps():
    engine, state, batch, gradients = _of(["kernel"], 2)
    factors = np.array([1, NAN, 1, INFINITY, 1], np.float32)

    @jax.jit
    def train(state, factors):
        def step(state, factor):
            spoilt = {"kernel": gradients["kernel"] * factor}
            return engine.update(state, batch, spoilt), state.step

        return jax.lax.scan(step, state, factors)

    found, steps = train(state, factors)
    assert steps.tolist() == [0, 1, 1, 2, 2]
    assert _counts(found) == [2]
    for _ in range(3):
        state = engine.update(state, batch, gradients)
    assert_same(_held(found), _held(state))


def test_capacities_that_do_not_suffice_skip_too():
    engine, before, batch, gradients = _of(["copies"], 2)
    stacks = [dataclasses.replace(g, row_capacity=1, partials=1) for g in batch.spec.stacks]
    small = dataclasses.replace(batch.spec, stacks=tuple(stacks))
    update = jax.jit(functools.partial(engine.update, spec=small))
    after = update(before, _ids(["copies"]), _spoilt(["copies"], ["copies"]))
    assert_same(_held(after), _held(before))
    assert int(after.counters["overflows"]) == 1
    after = update(before, _ids(["copies"]), gradients)
    assert_same(_held(after), _held(engine.update(before, batch, gradients)))


LARGE = 409_600


@pytest.mark.parametrize(
    ("optimizer", "dtype", "devices"),
    [(o.Adagrad(0.1), "float32", 8), (o.Adam(0.1), "bfloat16", 1)],
    ids=["8 devices", "one device"],
)
def test_nothing_of_a_tables_size_is_copied(optimizer, dtype, devices):
    features = {"x": FeatureConfig(TableConfig(LARGE, 16, dtype=dtype))}
    engine = EmbeddingEngine(features, optimizer, mesh=mesh(devices), on_bad_gradient="skip")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        return engine.update(state, ids, engine.lookup(state, ids))

    state = engine.init(jax.random.key(0))
    compiled = step.lower(state, {"x": np.zeros((BATCH, 4), np.int32)}).compile()
    table = next(iter(state.tables.values()))
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes // devices // 4
    shape = ",".join(map(str, table.sharding.shard_shape(table.shape)))
    hlo = compiled.as_text()
    assert not re.search(rf"= \w+\[{shape}\][^ ]* (copy|select|conditional)\(", hlo)
    assert re.search(r"is-finite", hlo)


# -- "error" -------------------------------------------------------------------------------------

SMALL = {"clicks": {"film": FeatureConfig(_table("films"))}, "user": FeatureConfig(_table("users"))}


@functools.cache
def _small(policy="error", devices=2):
    """Return an engine, features, and gradients of which one feature's is bad."""
    engine = EmbeddingEngine(SMALL, o.Adagrad(0.1), mesh=mesh(devices), on_bad_gradient=policy)
    ids = np.arange(BATCH, dtype=np.int32)[:, None] % V
    bad = np.ones((BATCH, D), np.float32)
    bad[3, 1] = NAN
    features = {"clicks": {"film": ids}, "user": ids}
    return engine, features, {"clicks": {"film": bad}, "user": np.ones_like(bad)}


def _named(error):
    return "feature 'clicks/film' of table 'films': expected finite numbers" in str(error.value)


@pytest.mark.parametrize("verb", ["update", "update_in_place"])
def test_error_raises_outside_a_jit_and_changes_nothing(verb):
    engine, features, bad = _small()
    state, batch = engine.init(jax.random.key(0)), engine.place(features)
    before = _held(state)
    with pytest.raises(ValueError) as error:
        getattr(engine, verb)(state, batch, bad)
    assert _named(error)
    assert "user" not in str(error.value)
    assert_same(_held(state), before)
    good = jax.tree.map(np.ones_like, bad)
    after = getattr(engine, verb)(state, batch, good)
    assert int(after.step) == 1
    assert _counts(after) == [0, 0]


def test_error_inside_a_jit_skips_and_counts():
    engine, features, bad = _small()
    state, batch = engine.init(jax.random.key(0)), engine.place(features)
    after = jax.jit(engine.update)(state, batch, bad)
    assert_same(_held(after), _held(state))
    assert _by_feature(engine, after) == {"clicks/film": 1}
    constant = jax.jit(lambda: engine.update(state, batch, bad))()
    assert_same(_held(constant), _held(state))


def test_error_under_checkify_is_reported():
    engine, features, bad = _small(devices=1)
    state = engine.init(jax.random.key(0))
    checked = checkify.checkify(jax.jit(engine.update), errors=checkify.user_checks)
    error, _ = checked(state, features, bad)
    assert "feature 'clicks/film' of table 'films'" in error.get()
    error, after = checked(state, features, jax.tree.map(np.ones_like, bad))
    assert error.get() is None
    assert int(after.step) == 1


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"on_bad_gradient: expected 'allow' \| 'skip' \| 'error'"):
        _small("ignore")


def test_a_state_of_an_engine_without_a_guard_begins_to_count():
    (allowed, features, bad), (guarded, _, _) = _small("allow"), _small("skip")
    after = guarded.update(allowed.init(jax.random.key(0)), guarded.place(features), bad)
    assert _by_feature(guarded, after) == {"clicks/film": 1}
    again = allowed.update(after, allowed.place(features), jax.tree.map(np.ones_like, bad))
    assert _by_feature(allowed, again) == {"clicks/film": 1}


# -- the stateful API ---------------------------------------------------------------------------


def _embedding(policy, **options):
    """Return an embedding whose programs are those of the engine of `_small`."""
    embedding = tpu_embed.TPUEmbedding(
        SMALL, o.Adagrad(0.1), mesh=mesh(2), on_bad_gradient=policy, **options
    )
    engine, features, bad = _small(policy)
    assert embedding.engine._guard.policy == policy
    embedding.engine = engine
    return embedding, features, bad


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_stateful_door_goes_on_after_a_skip(pipelined):
    embedding, features, bad = _embedding("skip", pipeline_execution_with_tensor_core=pipelined)
    good = jax.tree.map(np.ones_like, bad)
    for _ in range(4):
        embedding.enqueue(features)
    for gradients in (good, bad, bad, good):
        embedding.dequeue()
        embedding.apply_gradients(gradients)
    engine = embedding.engine
    expected, batch = engine.init(jax.random.key(0)), engine.place(features)
    for _ in range(2):
        expected = engine.update(expected, batch, good)
    assert_same(_held(embedding.state), _held(expected))
    assert _by_feature(engine, embedding.state) == {"clicks/film": 2}


def test_the_stateful_door_raises_and_waits_for_other_gradients():
    embedding, features, bad = _embedding("error")
    embedding.enqueue(features)
    embedding.dequeue()
    before = _held(embedding.state)
    with pytest.raises(ValueError) as error:
        embedding.apply_gradients(bad, name="first")
    assert _named(error)
    assert_same(_held(embedding.state), before)
    embedding.apply_gradients(jax.tree.map(np.ones_like, bad))
    assert int(embedding.state.step) == 1
