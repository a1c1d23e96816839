"""Steps that update tables in place, whatever the loss; those that cannot are named."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from nn_models import bag_of

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.core.update import in_place
from tpu_embed.kernels import cpu, dispatch
from tpu_embed.planning.compiled import abstract_batch, abstract_state
from tpu_embed.vocabulary import DynamicVocabulary

V, D, B, H = 200_000, 8, 64, 4
IDS = np.zeros((B, H), np.int32)


BATCH = {"bag": IDS, "one": IDS[:, 0]}


@functools.cache
def engine_of(rule, devices, path=None, policy="allow"):
    """Return an engine; one of each path, since what it has traced stays with it."""
    tables = [TableConfig(V // (i + 1), D * (i + 1), name=f"t{i}") for i in range(2)]
    features = {"bag": FeatureConfig(tables[0]), "one": FeatureConfig(tables[1])}
    return EmbeddingEngine(features, rule, mesh=mesh(devices), on_bad_gradient=policy)


def operands(engine, ids=BATCH):
    """Return shapes of a state and of a batch: nothing of a table's size is allocated."""
    return abstract_state(engine), abstract_batch(engine, engine.place(ids).spec)


def jitted(step, engine):
    return jax.jit(functools.partial(step, engine), donate_argnums=0)


def linear(engine, state, batch, other):
    """A loss that is linear in the activations: its gradients do not depend on them."""
    activations = engine.lookup(state, batch)
    loss, gradients = jax.value_and_grad(lambda a: sum(x.sum() for x in a.values()))(activations)
    return engine.update(state, batch, gradients), loss


def metric(engine, state, batch, other):
    """A second batch is looked up for a metric, before the update."""
    activations = engine.lookup(state, batch)
    number = sum((x**3).sum() for x in engine.lookup(state, other).values())
    return engine.update(state, batch, activations), number


def constant(engine, state, batch, other):
    """The gradients were given; the activations are returned."""
    activations = engine.lookup(state, batch)
    return engine.update(state, batch, jax.tree.map(jnp.ones_like, activations)), activations


ADAGRAD = o.Adagrad(0.1)
CASES = [
    (linear, ADAGRAD, 1, "native"),
    (linear, o.LAMB(0.1), 8, "native"),
    (linear, o.SGD(0.1, use_gradient_accumulation=False), 1, "reference"),
    (metric, ADAGRAD, 8, "reference"),
    (metric, o.FTRL(0.1), 1, "native"),
    (constant, o.LAMB(0.1), 1, "reference"),
    (constant, ADAGRAD, 8, "native"),
]


@pytest.mark.parametrize(("step", "rule", "devices", "path"), CASES)
@pytest.mark.quick(1)
def test_tables_are_in_place_whatever_the_loss(step, rule, devices, path, monkeypatch):
    if path == "reference" or cpu.load().path is not None:
        monkeypatch.setenv(dispatch.VARIABLE, path)
    # Those whose gradients are not finite are skipped without a copy, too.
    engine = engine_of(rule, devices, path, "skip" if step is metric else "allow")
    state, batch = operands(engine)
    program = jitted(step, engine)
    engine.check_in_place(program, state, batch, batch)
    memory = program.lower(state, batch, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * V * D / devices / 4


@pytest.mark.whole
def test_so_are_those_of_ids_inside_the_jit():
    engine = engine_of(ADAGRAD, 8)
    engine.check_in_place(jitted(linear, engine), abstract_state(engine), BATCH, BATCH)


def test_so_are_living_tables_in_a_step_that_is_compiled_from_shapes():
    table = TableConfig(V, D, name="t", vocabulary=DynamicVocabulary())
    engine = EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.1), mesh=mesh(2))
    placed = engine.place(np.arange(B * H).reshape(B, H))
    shapes = abstract_state(engine), abstract_batch(engine, placed.spec)
    step = jitted(lambda engine, *given: engine.update(*given, jnp.ones((B, D))), engine)
    engine.check_in_place(step, *shapes)
    # It runs on a state and a batch of these shapes.
    state, batch = engine.admit(engine.init(jax.random.key(0)), placed)
    assert int(step.lower(*shapes).compile()(state, batch).step) == 1


def test_numbers_are_those_of_a_step_without_lookups():
    """The order between lookup and update changes no bit, with NaN among the activations too."""
    engine = EmbeddingEngine({"x": FeatureConfig(TableConfig(20, 2, name="t"))}, o.Adagrad(0.5))
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)
    rows[3], rows[4] = np.nan, -0.0
    state = engine.load_arrays(engine.init(jax.random.key(0)), {"t": rows})
    ids = {"x": (np.arange(32, dtype=np.int32) % 7).reshape(8, 4)}
    batch, ones = engine.place(ids), {"x": jnp.ones((8, 2))}
    new, _ = jax.jit(constant, static_argnums=0)(engine, state, batch, None)
    expected = engine.tables(engine.update(state, batch, ones))["t"]
    np.testing.assert_array_equal(engine.tables(new)["t"], expected)


# -- what cannot be in place -----------------------------------------------------------------------


def looked_up_after(engine, state, batch, other):
    new = engine.update(state, batch, engine.lookup(state, batch))
    return new, engine.lookup(state, other)


def updated_twice(engine, state, batch, other):
    activations = engine.lookup(state, batch)
    return [engine.update(state, batch, activations) for _ in range(2)]


def returned(engine, state, batch, other):
    return engine.update(state, batch, engine.lookup(state, batch)), state


def nested(engine, state, batch, other):
    number = jax.jit(lambda state: engine.lookup(state, other)["bag"].sum())(state)
    return engine.update(state, batch, {"bag": jnp.ones((B, D)), "one": None}), number


def used(engine, state, batch, other):
    norm = jnp.sum(engine.tables(state)["t0"] ** 2)
    return engine.update(state, batch, engine.lookup(state, batch)), norm


def scanned(engine, state, batch, other):
    step = lambda state, _: looked_up_after(engine, state, batch, other)  # noqa: E731
    return jax.lax.scan(step, state, None, length=2)


def looked_up_in_a_scan(engine, state, batch, other):
    new = engine.update(state, batch, engine.lookup(state, batch))
    look = lambda state, _: (state, engine.lookup(state, other))  # noqa: E731
    return new, jax.lax.scan(look, state, None, length=2)[1]


BOTH = [looked_up_after, updated_twice, returned]
"""Steps that copy both tables."""
COPIES = [*BOTH, nested, used, scanned, looked_up_in_a_scan]


@pytest.mark.filterwarnings("ignore:activation gradient of feature 'one'")
@pytest.mark.parametrize("step", COPIES)
@pytest.mark.quick(2)
def test_what_would_be_copied_is_named(step):
    engine = engine_of(ADAGRAD, 1)
    state, batch = operands(engine)
    with pytest.raises(ValueError, match="step: expected updates in place") as error:
        engine.check_in_place(jitted(step, engine), state, batch, batch)
    text = str(error.value)
    assert "a copy of table 't0'" in text
    assert "of table 't1'" in text or step not in BOTH
    assert "because its old rows are used beside its update, or after it; use the state" in text
    for remedy in ("look up before", "a second update", "return the new", "read its rows"):
        assert remedy in text


def test_copies_that_are_started_and_awaited_are_found():
    """Accelerators copy so: the result is a tuple, and the copy is its first part."""
    started = "%c = (f32[1000,64]{1,0}, f32[1000,64]{1,0}, u32[]) copy-start(%p)"
    assert in_place._copied_shapes(started) == {"f32[1000,64]"}
    assert in_place._copied_shapes("%c = f32[8,4]{1,0} copy(%p)") == {"f32[8,4]"}


def test_a_state_that_is_not_donated_is_named(refused):
    engine = engine_of(ADAGRAD, 8)
    state, batch = operands(engine)
    kept = jax.jit(functools.partial(linear, engine))
    says = r"slot 'accumulators'.* is not donated; .*donate_argnums"
    refused(says, engine.check_in_place, kept, state, batch, batch)


def test_what_cannot_be_checked_is_refused():
    engine = engine_of(ADAGRAD, 1)
    with pytest.raises(ValueError, match="step: expected a jitted function, got linear"):
        engine.check_in_place(linear, *operands(engine))
    with pytest.raises(ValueError, match="expected a state of this engine among the arguments"):
        engine.check_in_place(jax.jit(lambda x: x), 1.0)


def test_layers_are_checked_too(refused):
    bag = bag_of(o.Adagrad(0.1))

    def step(bag, ids):
        return nn.fused_value_and_grad(lambda bag: bag(ids).sum())(bag)[0]

    bag.engine.check_in_place(nnx.jit(step, donate_argnums=0), bag, IDS)
    refused("the state is not donated", bag.engine.check_in_place, nnx.jit(step), bag, IDS)
