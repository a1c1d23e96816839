"""The functional API inside user programs: both kinds of mesh, dense parameters, scans."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tpu_embed
from tpu_embed import optimizers as o

TABLES = {
    "item": tpu_embed.TableConfig(11, 4, name="item", combiner="sum"),
    "user": tpu_embed.TableConfig(5, 4, name="user", placement="div", shard_axes="y"),
}
FEATURES = {name: tpu_embed.FeatureConfig(table) for name, table in TABLES.items()}

KINDS = {
    "explicit": lambda: jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2),
    "mixed": lambda: jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto)
    ),
    "auto": lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y")),
}


@functools.cache
def _engine(kind):
    return tpu_embed.EmbeddingEngine(FEATURES, o.Adagrad(0.25), mesh=KINDS[kind]())


def _features(step, size=8):
    rng = np.random.default_rng(step)
    limits = {"item": 11, "user": 5}
    return {
        name: rng.integers(-1, limit, (size, 3)).astype(np.int32) for name, limit in limits.items()
    }


def _loss(activations, weights, labels):
    outputs = jnp.concatenate(list(activations.values()), axis=1) @ weights
    return ((outputs[:, 0] - labels) ** 2).mean()


def _train(engine, place):
    """Train tables beside dense parameters in one program, 3 steps; return both on the host."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, weights, batch, labels):
        activations = engine.lookup(state, batch)
        loss, (to_weights, to_activations) = jax.value_and_grad(_loss, argnums=(1, 0))(
            activations, weights, labels
        )
        return engine.update(state, batch, to_activations), weights - 0.1 * to_weights, loss

    state = engine.init(jax.random.key(0))
    weights = place(np.ones((8, 2), np.float32))
    losses = []
    for number in range(3):  # the union of all specs
        engine.place(_features(number))
    for number in range(3):
        labels = place(np.arange(8, dtype=np.float32))
        state, weights, loss = step(state, weights, engine.place(_features(number)), labels)
        losses.append(float(loss))
    assert step._cache_size() == 1
    assert losses[2] < losses[0]
    return jax.tree.map(np.asarray, (engine.tables(state), engine.slots(state), weights))


@functools.cache
def _on_one_device():
    features = {
        name: tpu_embed.FeatureConfig(
            tpu_embed.TableConfig(t.vocabulary_size, t.dim, name=name, combiner=t.combiner)
        )
        for name, t in TABLES.items()
    }
    engine = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.25), mesh=mesh(1))
    return _train(engine, _replicated(mesh(1)))


def _replicated(devices):
    """Return what places arrays on all devices, as a program's outputs are."""
    explicit = AxisType.Explicit in devices.axis_types

    def place(array):
        spec = PartitionSpec(*(None,) * array.ndim) if explicit else PartitionSpec()
        return jax.device_put(array, NamedSharding(devices, spec))

    return place


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "ambient"),
    [
        ("explicit", True),
        ("mixed", False),
        pytest.param("auto", True, marks=pytest.mark.whole),  # also in test_mesh_in_use
        pytest.param("explicit", False, marks=pytest.mark.whole),
    ],
)
@pytest.mark.quick(1)
def test_dense_parameters_on_the_mesh(kind, ambient):
    engine = _engine(kind)
    devices = engine.layout.axes.mesh
    with jax.set_mesh(devices) if ambient else contextlib.nullcontext():
        found = _train(engine, _replicated(devices))
    # the dense part of the loss is summed in another order on another number of devices
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        _on_one_device(),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(1)
def test_rows_are_read_and_set_on_the_mesh(kind):
    engine = _engine(kind)
    state = engine.init(jax.random.key(0))
    expected = {name: np.array(table) for name, table in engine.tables(state).items()}
    for name, table in expected.items():
        state = engine.set_rows(state, name, [2, 0], np.ones((2, 4), np.float32))
        table[[2, 0]] = 1
    assert_same(engine.tables(state), expected)
    state = engine.load(state, "user", [expected["user"][:2] + 1, expected["user"][2:] + 1])
    assert_same(engine.tables(state)["user"], expected["user"] + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(1)
def test_a_scan_over_stacked_batches(kind):
    engine = _engine(kind)
    for number in range(4):  # the union of all specs
        engine.place(_features(number))
    batches = [engine.place(_features(number)) for number in range(4)]

    def step(state, batch):
        activations = engine.lookup(state, batch)
        return engine.update(state, batch, jax.tree.map(lambda a: 2 * a + 1, activations)), ()

    state = engine.init(jax.random.key(0))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, _ = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, stacked)
    single = jax.jit(step)
    for batch in batches:
        state, _ = single(state, batch)
    assert_same(engine.tables(scanned), engine.tables(state))
    assert_same(engine.slots(scanned), engine.slots(state))
    assert int(scanned.step) == 4


def test_rows_move_alike_to_one_device_of_either_kind():
    # A device takes rows from the host itself, but along an explicit axis they are split.
    table = tpu_embed.TableConfig(
        100,
        4,
        initializer=jax.nn.initializers.normal(),
        name="t",
        combiner="sum",
        storage=tpu_embed.HostStorage(device_rows=8),
    )
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        one = jax.make_mesh((1,), ("x",), axis_types=(kind,), devices=jax.devices()[:1])
        engine = tpu_embed.EmbeddingEngine(
            tpu_embed.FeatureConfig(table), o.Adagrad(0.25), mesh=one
        )
        state = engine.init(jax.random.key(0))
        for step in range(4):
            batch = engine.place(np.arange(6) + 5 * step)
            state, batch = engine.admit(state, batch)
            state = engine.update(state, batch, engine.lookup(state, batch))
        state = engine.set_rows(state, "t", np.array([21]), np.ones((1, 4)))
        shown = engine.place(np.arange(30), training=False)
        rows = engine.rows(state, "t", np.arange(30))
        found.append([np.asarray(engine.lookup(state, shown)), np.asarray(rows)])
    assert_same(*found)
