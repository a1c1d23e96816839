"""The functional API: learning rates, gradients, counters, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from facade_cases import assert_same, mesh
from jax.sharding import PartitionSpec

import tpu_embed
from tpu_embed import optimizers as o

IDS = np.array([[0, 1, 1], [2, -1, -1]], np.int32)


def _engine(optimizer, devices=1, size=5, **options):
    features = {"x": tpu_embed.FeatureConfig(tpu_embed.TableConfig(size, 2, name="t", **options))}
    return tpu_embed.EmbeddingEngine(features, optimizer, mesh=mesh(devices))


def _started(*given, ids=IDS, **options):
    """Return an engine, its first state and a batch."""
    engine = _engine(*given, **options)
    return engine, engine.init(jax.random.key(0)), engine.place({"x": ids})


def _ones(engine, state, batch):
    return jax.tree.map(jnp.ones_like, engine.lookup(state, batch))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_that_is_only_looked_up_has_the_same_activations_and_no_update(devices, refused):
    engine, state, whole = _started(o.SGD(0.1), devices)
    lookup = engine.place({"x": IDS}, training=False)
    activations = engine.lookup(state, lookup)
    assert_same(activations, engine.lookup(state, whole))
    said = "batch: expected a batch placed for an update"
    refused(said, engine.update, state, lookup, activations)
    # One device sends the same ids for either; several leave out the order of the sums.
    assert (lookup.packed.size < whole.packed.size) == (devices > 1)
    union = tpu_embed.BatchSpec.union
    refused(r"BatchSpec\.union: expected specs of one engine", union, whole.spec, lookup.spec)


def rates(*values):
    """Return a learning rate that has another one of these values at every call."""
    return iter(values).__next__


def test_a_rate_without_arguments_is_read_at_every_eager_update():
    options = {"initializer": jax.nn.initializers.zeros, "combiner": "sum"}
    engine, state, batch = _started(o.SGD(rates(0.5, 0.25, 2.0)), **options)
    gradients = _ones(engine, state, batch)
    for total in (0.5, 0.75, 2.75):
        state = engine.update(state, batch, gradients)
        expected = np.array([-1, -2, -1, 0, 0]) * total
        np.testing.assert_array_equal(engine.tables(state)["t"][:, 0], expected)
    assert engine.compilations == {"lookup": 1, "update": 1}


def test_every_table_has_the_rate_of_its_own():
    zeros = jax.nn.initializers.zeros
    config = {
        name: tpu_embed.FeatureConfig(
            tpu_embed.TableConfig(5, 2, zeros, name=name, optimizer=o.SGD(rate))
        )
        for name, rate in {"a": rates(0.5), "b": 2.0, "c": rates(0.25)}.items()
    }
    engine = tpu_embed.EmbeddingEngine(config, mesh=mesh(1))
    state, batch = engine.init(jax.random.key(0)), engine.place(dict.fromkeys(config, IDS[:, 0]))
    assert engine.compilations == {"lookup": 0, "update": 0}
    state = engine.update(state, batch, dict.fromkeys(config, np.ones((2, 2), np.float32)))
    moved = {name: float(table[0, 0]) for name, table in engine.tables(state).items()}
    assert moved == {"a": -0.5, "b": -2.0, "c": -0.25}


def test_inside_a_jit_its_value_is_an_operand():
    engine, state, batch = _started(o.SGD(rates(0.5, 0.25)), combiner="sum")
    before, gradients = np.asarray(engine.tables(state)["t"]), _ones(engine, state, batch)

    step = jax.jit(lambda s, rates: engine.update(s, batch, gradients, learning_rates=rates))
    for _ in range(2):
        state = step(state, engine.learning_rates())
    assert step._cache_size() == 1
    expected = before[2] - np.float32(0.5) - np.float32(0.25)
    assert_same(np.asarray(engine.tables(state)["t"])[2], expected)


def test_a_callable_that_returns_no_number_is_refused(refused):
    for value in (None, "a", [0.1, 0.2], np.ones((1,))):
        rates = _engine(o.SGD(lambda value=value: value)).learning_rates
        refused(r"learning_rate .*: expected a call that returns a num", rates)


def test_inside_a_jit_its_value_must_be_given(refused):
    engine, state, batch = _started(o.SGD(rates()))
    gradients = {"x": np.ones((2, 2), np.float32)}
    update, inside = engine.update, jax.jit(lambda given: engine.update(state, batch, given))
    said = r"learning_rates: expected 1 value\(s\), .*outside.*, got {}; .*engine.learning"
    refused(said.format(None), jax.jit(update), state, batch, gradients)
    refused(said.format(None), inside, gradients)
    for value, got in (((0.1, 0.2), "2"), (0.1, "0.1")):
        refused(said.format(got), update, state, batch, gradients, learning_rates=value)
    update, said = _engine(o.SGD(0.1)).update, r"learning_rates: expected 0 value\(s\)"
    refused(said, update, state, batch, gradients, learning_rates=(0.1,))


def test_a_gradient_that_is_none_moves_momentum():
    engine, state, batch = _started(
        o.Momentum(1.0, momentum=0.5), initializer=jax.nn.initializers.zeros, ids=IDS[:, 0]
    )
    state = engine.update(state, batch, {"x": np.ones((2, 2), np.float32)})
    said = "feature 'x': None is taken as zeros of shape \\(2, 2\\)"
    with pytest.warns(UserWarning, match=said) as found:
        state = engine.update(state, batch, {"x": None})
    assert [warning.filename for warning in found] == [__file__]
    with pytest.warns(UserWarning, match=said):
        state = jax.jit(engine.update)(state, batch, {"x": None})
    assert np.asarray(engine.tables(state)["t"])[:, 0].tolist() == [-1.75, 0, -1.75, 0, 0]
    assert np.asarray(engine.slots(state)["t"]["momenta"])[0].tolist() == [0.25, 0.25]


def test_gradients_of_another_shape_while_tracing(refused):
    engine, state, batch = _started(o.SGD(0.1))
    update, wide = jax.jit(engine.update), {"x": np.ones((2, 3), np.float32)}
    refused(r"feature 'x': expected shape \(2, 2\), got \(2, 3\)", update, state, batch, wide)
    more = {"x": None, "y": None}
    refused("activation_gradients: y is not among the features", update, state, batch, more)


def test_an_update_in_place_is_an_update():
    engine, state, batch = _started(o.Adagrad(0.5), devices=2, ids=np.tile(IDS, (4, 1)))
    gradients = _ones(engine, state, batch)
    expected = engine.update(state, batch, gradients)
    with pytest.raises(ValueError, match="feature 'x': expected shape"):
        engine.update_in_place(state, batch, {"x": gradients["x"][:4]})
    assert_same(engine.update_in_place(state, batch, gradients), expected)
    assert all(table.is_deleted() for table in state.tables.values())


def test_traced_ids_need_no_spec():
    engine = _engine(o.SGD(0.5), devices=2, size=40)
    state, features = engine.init(jax.random.key(0)), {"x": np.arange(8, dtype=np.int32)[:, None]}
    spec = engine.place(features).spec
    with pytest.warns(UserWarning, match="spec: ids traced inside a jit need no capacities"):
        found = jax.jit(lambda state, ids: engine.lookup(state, ids, spec=spec))(state, features)
    assert_same(found, engine.lookup(state, features))


def test_a_call_inside_shard_map_is_refused(refused):
    engine, state, batch = _started(o.SGD(0.5), devices=2)
    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d")}
    mapped = jax.shard_map(lambda _: engine.lookup(state, batch)["x"], mesh=mesh(2), **specs)
    refused("calls outside shard_map, got one inside, over the axes", mapped, jnp.zeros(2))


def test_a_batch_of_another_engine_is_refused(refused):
    engine, state, batch = _started(o.SGD(0.5))
    for other in (
        _engine(o.SGD(0.5), devices=2).place({"x": IDS}),
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch),
        dataclasses.replace(batch, packed=batch.packed[:, :-1]),
    ):
        refused("batch: expected a Batch of this engine's place", engine.lookup, state, other)
    weights = {"x": np.ones(IDS.shape, np.float32)}
    refused("weights and spec: expected None with a Batch", engine.lookup, state, batch, weights)


def test_placement_auto_must_be_resolved(refused):
    refused(r"table 't': placement: .* got 'auto'", _engine, o.SGD(0.5), placement="auto")


def test_quantized_lookups():
    quantization = tpu_embed.QuantizationConfig(5, -1.0, 1.0)
    values = np.linspace(-1.5, 1.6, 10).astype(np.float32).reshape(5, 2)
    ids = np.tile(np.concatenate([IDS, [[3, 4, 3], [-1, -1, -1]]]), (2, 1))
    trained = []
    for config in (quantization, None):
        engine = _engine(o.SGD(1.0), devices=2, quantization_config=config, combiner="sum")
        state = engine.load_arrays(engine.init(jax.random.key(0)), {"t": values})
        assert_same(engine.tables(state)["t"], values)
        batch = engine.place({"x": ids})
        if config:  # a grid of quarters: float32 is exact
            expected = oracle.lookup(values, engine.layout.features[0].config, ids)
            assert_same(engine.lookup(state, batch)["x"], expected.astype(np.float32))
        trained.append(engine.tables(engine.update(state, batch, _ones(engine, state, batch))))
    assert_same(*trained)


def test_float64_tables():
    with jax.enable_x64(True):
        engine = _engine(o.Momentum(0.25), devices=2, dtype="float64", combiner="sum")
        state, batch = engine.init(jax.random.key(0)), engine.place({"x": IDS})
        activations = engine.lookup(state, batch)
        rows = np.asarray(engine.tables(state)["t"])
        assert rows.dtype == activations["x"].dtype == np.float64
        assert np.any(rows != rows.astype(np.float32))
        assert_same(activations["x"], np.stack([rows[0] + rows[1] + rows[1], rows[2]]))
        state = engine.update(state, batch, {"x": np.full((2, 2), 1 / 3)})
        expected = rows - np.outer([0.25 / 3, 0.5 / 3, 0.25 / 3, 0, 0], [1, 1])
        assert_same(engine.tables(state)["t"], expected)
        assert engine.slots(state)["t"]["momenta"].dtype == np.float64


OTHER_STATES = {
    "none": (lambda state: None, "state: expected a TableState, got NoneType; give one that this"),
    "no table": (
        lambda state: dataclasses.replace(state, tables={}),
        r"state: expected stacks \['t@mod1x5#\w+'\], got \[\]; save and restore with tpu_embed.io",
    ),
    "another V": (
        lambda state: jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, state),
        r"state: table 't': expected float32 of shape \(5, 2\), got float32 of shape \(1, 2\)",
    ),
}


@pytest.mark.parametrize("case", OTHER_STATES)
def test_a_state_of_another_kind(case, refused):
    change, said = OTHER_STATES[case]
    engine, state, batch = _started(o.SGD(0.1))
    gradients = _ones(engine, state, batch)
    for call in (engine.update, engine.update_in_place):
        refused(said, call, change(state), batch, gradients)
    refused(said, engine.lookup, change(state), batch)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_what_was_donated_is_refused(devices, refused):
    engine = _engine(o.Adagrad(0.1), devices=devices)
    ids = np.zeros((8, 2), np.int32)
    batch, old = engine.place({"x": ids}), engine.init(jax.random.key(0))
    gradients = {"x": jax.numpy.ones((8, 2))}
    state = engine.update_in_place(old, batch, gradients)
    engine.lookup(state, batch)  # warm: compiled and called before
    engine.update(state, batch, gradients)
    for call, *given in (
        (engine.lookup, batch),
        (engine.update, batch, gradients),
        (engine.update_in_place, batch, gradients),
        (engine.tables,),
        (engine.slots,),
        (engine.set_rows, "t", [0], [[1.0, 2.0]]),
        (engine.load_arrays, {"t": np.zeros((5, 2))}),
    ):
        refused(r"stack 't@mod.*expected arrays that exist", call, old, *given)
    jax.jit(lambda batch, gradients: (batch, gradients), donate_argnums=(0, 1))(batch, gradients)
    refused(r"batch: expected arrays that exist", engine.lookup, state, batch)
    with pytest.raises(ValueError, match=r"gradient of feature 'x': expected arrays that exist"):
        engine.update(state, {"x": ids}, gradients)
