"""Bad gradients inside a jit, as errors, and through the stateful API."""

import functools

import guard_cases as cases
import jax
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from jax.experimental import checkify

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig
from tpu_embed import optimizers as o

# -- inside a jit --------------------------------------------------------------------------------


def test_inside_a_jit_as_outside():
    """The state is donated, the ids are traced."""
    names = ["kernel", "sequence", "half", "copies"]
    engine, before, batch, gradients = cases.engine_of(names, 8)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, factor):
        gradients = jax.grad(lambda found: sum((factor * a).sum() for a in found.values()))
        return engine.update(state, ids, gradients(engine.lookup(state, ids)))

    held = jax.tree.map(np.copy, cases.held_by(before))
    expected = engine.update(before, batch, jax.tree.map(np.ones_like, gradients))
    after = step(before, cases.draw_ids(names), cases.INFINITY)
    assert_same(cases.held_by(after), held)
    assert cases.by_feature(engine, after) == dict.fromkeys(names, 1)
    after = step(after, cases.draw_ids(names), np.float32(1))
    assert_same(cases.held_by(after), cases.held_by(expected))
    assert step._cache_size() == 1


def test_a_scan_skips_single_steps():
    engine, state, batch, gradients = cases.engine_of(["kernel"], 2)
    factors = np.array([1, cases.NAN, 1, cases.INFINITY, 1], np.float32)

    def step(state, factor):
        return engine.update(state, batch, {"kernel": gradients["kernel"] * factor}), state.step

    found, steps = jax.lax.scan(step, state, factors)
    assert steps.tolist() == [0, 1, 1, 2, 2]
    assert cases.counts(found) == [2]
    for _ in range(3):
        state = engine.update(state, batch, gradients)
    assert_same(cases.held_by(found), cases.held_by(state))


# -- "error" -------------------------------------------------------------------------------------

FILMS, USERS = (FeatureConfig(cases.make_table(name)) for name in ("films", "users"))
SMALL = {"clicks": {"film": FILMS}, "user": USERS}
NAMED = "feature 'clicks/film' of table 'films': expected finite numbers"


@functools.cache
def _small(policy="error", devices=2):
    """Return an engine, features, and gradients of which one feature's is bad."""
    engine = EmbeddingEngine(SMALL, o.Adagrad(0.1), mesh=mesh(devices), on_bad_gradient=policy)
    ids = np.arange(cases.BATCH, dtype=np.int32)[:, None] % cases.V
    ones = np.ones((cases.BATCH, cases.D), np.float32)
    bad = np.where(np.arange(ones.size).reshape(ones.shape) == 7, cases.NAN, ones)
    return engine, {"clicks": {"film": ids}, "user": ids}, {"clicks": {"film": bad}, "user": ones}


@pytest.mark.parametrize("verb", ["update", "update_in_place"])
def test_error_raises_outside_a_jit_and_changes_nothing(verb):
    engine, features, bad = _small()
    state, batch = engine.init(jax.random.key(0)), engine.place(features)
    before, update = cases.held_by(state), getattr(engine, verb)
    with pytest.raises(ValueError, match=NAMED) as error:
        update(state, batch, bad)
    assert "user" not in str(error.value)
    assert_same(cases.held_by(state), before)
    after = update(state, batch, jax.tree.map(np.ones_like, bad))
    assert (int(after.step), cases.counts(after)) == (1, [0, 0])


def test_error_inside_a_jit_skips_and_counts():
    engine, features, bad = _small()
    state, batch = engine.init(jax.random.key(0)), engine.place(features)
    after = jax.jit(engine.update)(state, batch, bad)
    assert_same(cases.held_by(after), cases.held_by(state))
    assert cases.by_feature(engine, after) == {"clicks/film": 1}
    constant = jax.jit(lambda: engine.update(state, batch, bad))()
    assert_same(cases.held_by(constant), cases.held_by(state))


def test_error_under_checkify_is_reported():
    engine, features, bad = _small(devices=1)
    state = engine.init(jax.random.key(0))
    checked = checkify.checkify(jax.jit(engine.update), errors=checkify.user_checks)
    error, _ = checked(state, features, bad)
    assert "feature 'clicks/film' of table 'films'" in error.get()
    error, after = checked(state, features, jax.tree.map(np.ones_like, bad))
    assert (error.get(), int(after.step)) == (None, 1)


def test_another_policy_is_refused(refused):
    refused(r"on_bad_gradient: expected 'allow' \| 'skip' \| 'error'", _small, "ignore")


def test_a_state_of_an_engine_without_a_guard_begins_to_count():
    (allowed, features, bad), (guarded, _, _) = _small("allow"), _small("skip")
    after = guarded.update(allowed.init(jax.random.key(0)), guarded.place(features), bad)
    assert cases.by_feature(guarded, after) == {"clicks/film": 1}
    again = allowed.update(after, allowed.place(features), jax.tree.map(np.ones_like, bad))
    assert cases.by_feature(allowed, again) == {"clicks/film": 1}


# -- the stateful API ---------------------------------------------------------------------------


def _embedding(policy, **options):
    """Return an embedding whose programs are those of the engine of `_small`."""
    options |= {"mesh": mesh(2), "on_bad_gradient": policy}
    embedding = tpu_embed.TPUEmbedding(SMALL, o.Adagrad(0.1), **options)
    engine, features, bad = _small(policy)
    embedding.engine._programs = engine._programs
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
    assert_same(cases.held_by(embedding.state), cases.held_by(expected))
    assert cases.by_feature(engine, embedding.state) == {"clicks/film": 2}


def test_the_stateful_door_raises_and_waits_for_other_gradients(refused):
    embedding, features, bad = _embedding("error")
    embedding.enqueue(features)
    embedding.dequeue()
    before = cases.held_by(embedding.state)
    refused(NAMED, embedding.apply_gradients, bad, name="first")
    assert_same(cases.held_by(embedding.state), before)
    embedding.apply_gradients(jax.tree.map(np.ones_like, bad))
    assert int(embedding.state.step) == 1
