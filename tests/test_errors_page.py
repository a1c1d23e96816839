"""What docs/errors.md quotes is what happens, and its remedies help."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, optimizers, planning

PAGE = (Path(__file__).resolve().parents[1] / "docs/errors.md").read_text()
QUOTES = " ".join(re.findall(r"^> (.*)$", PAGE, re.MULTILINE)).replace("\\", "")


def raises(said, function, *args):
    """Check that a call raises an error that has these words, and that the page quotes them."""
    assert said.lower() in QUOTES.lower()
    with pytest.raises(Exception, match=re.escape(said)):
        function(*args)


def make_engine(**options):
    features = {"film": FeatureConfig(TableConfig(1_000, 8, name="films"))}
    return EmbeddingEngine(features, optimizers.Adagrad(0.1), **options)


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # a reader's
        yield


@pytest.fixture
def run():
    """Return an engine, its state, a batch, labels and a jitted step."""
    engine = make_engine()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, liked):
        found = engine.lookup(state, batch)["film"]
        return engine.update(state, batch, {"film": found * liked[:, None]})

    batch = engine.place({"film": np.arange(8)})
    return engine, engine.init(jax.random.key(0)), batch, np.ones(8, np.float32), step


def test_a_donated_state(run):
    engine, state, batch, liked, step = run
    kept = jax.tree.map(jnp.copy, state)
    step(state, batch, liked)
    raises("Array has been deleted", np.asarray, state.step)
    raises("donated to an earlier call, or deleted", engine.lookup, state, batch)
    step(kept, batch, liked)


def test_devices_that_are_asked_for_too_late():
    raises("before backends are initialized", jax.config.update, "jax_num_cpu_devices", 3)


def test_ids_of_64_bits(run):
    engine = run[0]
    large = np.full(8, 2**40 + 3)
    assert jax.jit(lambda ids: ids)(large).tolist() == [3] * 8
    raises("out of bounds for int32", jnp.array, [2**40])
    with pytest.raises(ValueError, match="got id 1099511627779 at example 0"):
        engine.place({"film": large})
    engine.place({"film": tpu_embed.hash_ids(large, 1_000)})


def test_devices_of_another_argument_or_engine(run):
    _, state, batch, liked, step = run
    alone = make_engine(mesh=mesh(1))
    there = jax.device_put(liked, jax.devices()[-1])
    raises("incompatible devices for jitted computation", step, state, batch, there)
    step(state, batch, jax.device_put(liked, state.step.sharding))
    with pytest.raises(ValueError, match="expected a Batch of this engine's place, got one placed"):
        alone.lookup(alone.init(jax.random.key(0)), batch)


def test_a_batch_that_the_devices_do_not_divide(run):
    engine, features = run[0], {"film": np.arange(13)}
    raises("use tpu_embed.pad_batch", engine.place, features)
    engine.place(tpu_embed.pad_batch(features, jax.device_count()))


def test_out_of_memory(run):
    engine, state, batch, liked, step = run
    enormous = FeatureConfig(TableConfig(2_000_000_000, 65_536, name="enormous"))
    too_large = EmbeddingEngine(enormous, optimizers.SGD(0.1), mesh=mesh(1))
    init = too_large.init
    raises("RESOURCE_EXHAUSTED", lambda: jax.block_until_ready(init(jax.random.key(0))))
    wanted = jax.ShapeDtypeStruct((1_024,), np.int32)
    declared = FeatureConfig(TableConfig(200_000_000, 128, name="films"))
    assert not planning.plan(declared, optimizers.SGD(0.1), "v5e:2x2", wanted).fits
    engine.check_in_place(step, state, batch, liked)
    copying = jax.jit(lambda s, b: engine.update(s, b, engine.lookup(s, b)))  # not donated
    with pytest.raises(ValueError, match="donate"):
        engine.check_in_place(copying, state, batch)


def test_padded_batches_share_a_program(run):
    engine, state, *_, step = run
    for size in (16, 24, 32):
        ids, ones = np.arange(size), np.ones(size, np.float32)
        padded, ones = tpu_embed.pad_batch(({"film": ids}, ones), 32)
        state = step(state, engine.place(padded), ones)
    assert step._cache_size() == 1


def test_gradients_by_integers_and_by_the_state(run):
    engine, state, batch, *_ = run
    history = {"history": FeatureConfig(TableConfig(100, 4, name="items"), jagged=True)}
    jagged = EmbeddingEngine(history, optimizers.SGD(0.1))
    placed = jagged.place({"history": RaggedIds.from_lists([[1]] * 8)})
    found = jagged.lookup(jagged.init(jax.random.key(0)), placed)

    def mean(activations):
        return activations["history"].means().sum()

    raises("grad requires real- or complex-valued inputs", jax.grad(mean), found)
    values, rebuild = tpu_embed.split_activations(found)
    jax.grad(lambda values: mean(rebuild(values)))(values)
    with pytest.raises(TypeError, match="expected activations or weights"):
        jax.grad(lambda state: engine.lookup(state, batch)["film"].sum())(state)


def test_tracers(run):
    engine, state, batch, *_ = run
    kept = []
    jax.jit(lambda state: kept.append(engine.lookup(state, batch)["film"]))(state)
    raises("unexpected tracer", lambda: kept[0] + 1)

    raises("boolean conversion", jax.jit(lambda state: bool(state.step)), state)
    raises("__array__()", jax.jit(lambda state: np.asarray(state.step)), state)
    with pytest.raises(ValueError, match="place outside the jitted function"):
        jax.jit(lambda ids: engine.place({"film": ids}))(np.arange(8))


@jax.numpy_dtype_promotion("strict")
def test_dtype_promotion():
    half, whole = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32)
    raises("no available implicit dtype promotion path", lambda: half + whole)
