"""`jax.set_mesh`: what is made without a mesh takes it; others are refused, abstract ones too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import tpu_embed
from tpu_embed import io, metrics, nn, planning
from tpu_embed import optimizers as o

TABLES = {
    "item": tpu_embed.TableConfig(11, 4, name="item", combiner="sum"),
    "user": tpu_embed.TableConfig(5, 4, name="user", placement="div", shard_axes="y"),
}
FEATURES = {name: tpu_embed.FeatureConfig(table) for name, table in TABLES.items()}
KINDS = {"auto": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}
MIXED = KINDS | {"mixed": (AxisType.Explicit, AxisType.Auto)}


@functools.cache
def _mesh(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("x", "y"), axis_types=MIXED[kind])


@functools.cache
def _engine(kind):
    with jax.set_mesh(_mesh(kind)):
        return tpu_embed.EmbeddingEngine(FEATURES, o.Adagrad(0.25))


def _features(step=0):
    rng = np.random.default_rng(step)
    return {name: rng.integers(-1, 5, (8, 3)).astype(np.int32) for name in FEATURES}


@jax.grad
def _gradients(activations):
    # Of a loss that is linear in the activations: they are the same on every mesh.
    return sum((a * LABELS).sum() for a in activations.values())


LABELS = np.arange(32, dtype=np.float32).reshape(8, 4)
"""The gradients of the loss by the activations of each feature."""


def _eager(engine):
    state, batch = engine.init(jax.random.key(0)), engine.place(_features())
    activations = engine.lookup(state, batch)
    state = engine.update(state, batch, dict.fromkeys(FEATURES, LABELS))
    return activations, engine.tables(state), engine.slots(state)


def _jitted(engine):
    @jax.jit
    def step(state, batch):
        activations = engine.lookup(state, batch)
        return activations, engine.update(state, batch, _gradients(activations))

    # Ids traced in the jit, and ids that were placed.
    state = engine.init(jax.random.key(0))
    step(state, jax.tree.map(jnp.asarray, _features()))
    activations, state = step(state, engine.place(_features()))
    return activations, engine.tables(state), engine.slots(state)


def _stateful(_):
    embedding = tpu_embed.TPUEmbedding(FEATURES, o.Adagrad(0.25))
    embedding.enqueue(_features())
    activations = embedding.dequeue()
    embedding.apply_gradients(_gradients(activations))
    tables, slots = embedding.retrieve()
    assert_same(list(embedding.embedding_tables.values()), list(tables.values()))
    return activations, tables, slots


@functools.cache
def _on_one_device():
    features = {
        name: tpu_embed.FeatureConfig(dataclasses.replace(t, placement="mod", shard_axes=None))
        for name, t in TABLES.items()
    }
    engine = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.25), mesh=mesh(1))
    return jax.device_get(_eager(engine))


@pytest.mark.parametrize("api", [_eager, _stateful, _jitted])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(1)
def test_a_step_under_the_mesh_in_use_has_the_bits_of_one_device(kind, api):
    with jax.set_mesh(_mesh(kind)):
        found = api(_engine(kind))
    assert_same(found, _on_one_device())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(1)
def test_an_engine_made_under_a_mesh_is_used_without_it(kind):
    assert _engine(kind).layout.axes.mesh == _mesh(kind)
    assert_same(_eager(_engine(kind)), _on_one_device())


@pytest.mark.parametrize("kind", MIXED)
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


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.quick(1)
def test_a_scan_over_stacked_batches(kind):
    engine = _engine(kind)
    for _ in range(2):  # the second time with the union of all specs
        batches = [engine.place(_features(number)) for number in range(4)]

    @jax.jit
    def step(state, batch):
        activations = engine.lookup(state, batch)
        return engine.update(state, batch, jax.tree.map(lambda a: 2 * a + 1, activations)), ()

    state = engine.init(jax.random.key(0))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, _ = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, stacked)
    for batch in batches:
        state, _ = step(state, batch)
    assert_same(scanned, state)
    assert int(scanned.step) == 4


def test_rows_move_alike_to_one_device_of_either_kind():
    # A device takes rows from the host itself, but along an explicit axis they are split.
    options = {"storage": tpu_embed.HostStorage(device_rows=8), "combiner": "sum"}
    table = tpu_embed.TableConfig(100, 4, jax.nn.initializers.normal(), name="t", **options)
    feature, found = tpu_embed.FeatureConfig(table), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        one = jax.make_mesh((1,), ("x",), axis_types=(kind,), devices=jax.devices()[:1])
        engine = tpu_embed.EmbeddingEngine(feature, o.Adagrad(0.25), mesh=one)
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


class Model(nnx.Module):
    def __init__(self, rngs, **options):
        self.rows = nn.Embed(11, 4, optimizer=o.SGD(0.5), rngs=rngs, **options)
        bags = tpu_embed.TableConfig(11, 4, name="bags", optimizer=o.SGD(0.5))
        self.bags = nn.EmbeddingBag(bags, rngs=rngs, **options)

    def __call__(self, ids):
        return self.rows(ids).sum(-2) + self.bags(ids)


@nnx.jit
def _step(model, ids):
    return nn.fused_value_and_grad(lambda model: model(ids).sum())(model)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.whole
def test_layers_take_the_mesh_in_use(kind):
    ids = np.random.default_rng(0).integers(0, 11, (8, 3)).astype(np.int32)
    expected = Model(nnx.Rngs(0), mesh=mesh(1))
    before = jax.device_get(expected(ids))
    for _ in range(2):
        _step(expected, ids)
    with jax.set_mesh(_mesh(kind)):
        model = nnx.jit(lambda: Model(nnx.Rngs(0)))()  # made inside a jit, under the same mesh
        assert model.bags.engine.layout.axes.mesh == _mesh(kind)
        assert_same(model(ids), before)
        split = jax.NamedSharding(_mesh(kind), PartitionSpec(("x", "y")))
        for given in (ids, jax.device_put(ids, split)):
            _step(model, given)
        found = jax.device_get((model.bags.embedding, model.rows.embedding))
    assert_same(found, (expected.bags.embedding, expected.rows.embedding))


@pytest.mark.parametrize(("shape", "split"), [((5, 4), (None, "y")), ((2, 4), ("x", "y"))])
@pytest.mark.quick(1)
def test_layers_take_ids_that_are_split_in_any_way(shape, split):
    ids = np.random.default_rng(0).integers(0, 11, shape).astype(np.int32)
    with jax.set_mesh(_mesh("explicit")):
        embed = nn.Embed(11, 4, rngs=nnx.Rngs(0))
        bag = nn.EmbeddingBag(tpu_embed.TableConfig(11, 4, combiner="sum"), rngs=nnx.Rngs(0))
        rows, bags = jax.device_get((embed.embedding, bag.embedding))
        given = jax.device_put(ids, jax.NamedSharding(_mesh("explicit"), PartitionSpec(*split)))
        found, sums, alone = jax.device_get((embed(given), bag(given), bag(given[..., None])))
    assert_same((found, alone), (rows[ids], bags[ids]))
    # A float32 sum of 2 or 4 rows.
    np.testing.assert_allclose(sums, bags[ids].astype(np.float64).sum(1), rtol=1e-6)


def test_the_placement_is_chosen_for_the_mesh_in_use():
    table = tpu_embed.TableConfig(7, 4, placement="auto")
    with jax.set_mesh(mesh(1)):
        assert planning.resolve(tpu_embed.FeatureConfig(table)).table.placement == "mod"
    assert planning.resolve(tpu_embed.FeatureConfig(table)).table.placement == "replicated"


@pytest.mark.parametrize("kind", KINDS)
def test_another_mesh_in_use_is_refused(kind, tmp_path, refused):
    engine, key = _engine("auto"), jax.random.key(0)
    state, batch = engine.init(key), engine.place(_features())
    step = state, batch, dict.fromkeys(FEATURES, LABELS)
    io.save(tmp_path / "saved", engine, state)
    said = (
        r"EmbeddingEngine: expected calls without jax.set_mesh or under the engine's mesh "
        rf"\('x': 2 Auto, 'y': 4 Auto\), got one under \('x': 4 {KINDS[kind][0].name}, .*mesh="
    )
    with jax.set_mesh(_mesh(kind, (4, 2))):
        for call, *given in (
            (engine.init, key),
            (engine.lookup, state, batch),
            (jax.jit(engine.lookup), state, batch),
            (engine.update, *step),
            (engine.update_in_place, *step),
            (engine.tables, state),
            (engine.slots, state),
            (engine.set_rows, state, "item", [0], np.ones((1, 4))),
            (engine.load, state, "item", [np.ones((11, 4))]),
            (metrics.table_statistics, engine, state),
            (io.restore, tmp_path / "saved", engine),
        ):
            refused(said, call, *given)
        engine.place(_features())  # the batch's own sharding names the mesh
    if kind == "explicit":  # kinds of axes tell meshes apart
        with jax.set_mesh(_mesh(kind)):
            refused(r"mesh \('x': 2 Auto.*, got one under \('x': 2 Explicit", engine.init, key)
    engine.update_in_place(*step)  # nothing was donated


def test_an_abstract_mesh_is_refused(refused):
    make = functools.partial(tpu_embed.EmbeddingEngine, FEATURES, o.SGD(0.1))
    abstract = _mesh("auto", (4, 2)).abstract_mesh
    said = r"mesh: expected the devices of a mesh, got the abstract mesh \('x': 4 Auto, .*; give a"
    with jax.sharding.use_abstract_mesh(abstract):
        refused(said, make)

    def inside(x):
        refused(r"inside a shard_map over \('x', 'y'\)", make)
        assert make(mesh=_mesh("auto")).layout.axes.mesh == _mesh("auto")
        return x

    with jax.set_mesh(_mesh("auto")):
        spec = PartitionSpec()
        jax.shard_map(inside, in_specs=spec, out_specs=spec, check_vma=False)(jnp.ones(2))
