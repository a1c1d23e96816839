"""`jax.set_mesh`: what is made without a mesh takes it; others are refused, abstract ones too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import tpu_embed
from tpu_embed import metrics, nn, planning
from tpu_embed import optimizers as o
from tpu_embed.core.state import blank_arrays

TABLES = {
    "item": tpu_embed.TableConfig(11, 4, name="item", combiner="sum"),
    "user": tpu_embed.TableConfig(5, 4, name="user", placement="div", shard_axes="y"),
}
FEATURES = {name: tpu_embed.FeatureConfig(table) for name, table in TABLES.items()}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
WHOLE = pytest.mark.whole


@functools.cache
def _mesh(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("x", "y"), axis_types=(KINDS[kind],) * 2)


@functools.cache
def _engine(kind):
    with jax.set_mesh(_mesh(kind)):
        return tpu_embed.EmbeddingEngine(FEATURES, o.Adagrad(0.25))


def _features():
    rng = np.random.default_rng(0)
    return {name: rng.integers(-1, 5, (8, 3)).astype(np.int32) for name in FEATURES}


def _loss(activations, labels):
    # Linear in the activations, so that their gradients are the same on every mesh.
    return sum((a * labels).sum() for a in activations.values())


def _labels():
    """Return the gradients of the loss by the activations of each feature."""
    return np.arange(32, dtype=np.float32).reshape(8, 4)


def _eager(engine):
    state, batch = engine.init(jax.random.key(0)), engine.place(_features())
    activations = engine.lookup(state, batch)
    state = engine.update(state, batch, dict.fromkeys(FEATURES, _labels()))
    return activations, engine.tables(state), engine.slots(state)


def _jitted(engine):
    @jax.jit
    def step(state, batch, labels):
        activations = engine.lookup(state, batch)
        return activations, engine.update(state, batch, jax.grad(_loss)(activations, labels))

    # Ids traced in the jit, and ids that were placed.
    state, features = engine.init(jax.random.key(0)), jax.tree.map(jnp.asarray, _features())
    step(state, features, _labels())
    activations, state = step(state, engine.place(_features()), _labels())
    return activations, engine.tables(state), engine.slots(state)


def _stateful(embedding):
    embedding.enqueue(_features())
    activations = embedding.dequeue()
    embedding.apply_gradients(jax.grad(_loss)(activations, _labels()))
    tables, slots = embedding.retrieve()
    assert_same(list(embedding.embedding_tables.values()), list(tables.values()))
    return activations, tables, slots


@functools.cache
def _on_one_device():
    return jax.device_get(
        _eager(tpu_embed.EmbeddingEngine(_unsplit(), o.Adagrad(0.25), mesh=mesh(1)))
    )


def _unsplit():
    tables = {
        name: tpu_embed.TableConfig(t.vocabulary_size, t.dim, name=name, combiner=t.combiner)
        for name, t in TABLES.items()
    }
    return {name: tpu_embed.FeatureConfig(table) for name, table in tables.items()}


@pytest.mark.parametrize(
    ("kind", "api"),
    [
        pytest.param(kind, api, marks=() if (kind == "auto") == (api != "jitted") else WHOLE)
        for kind in KINDS
        for api in ("eager", "jitted", "stateful")
    ],
)
@pytest.mark.quick(1)
def test_a_step_under_the_mesh_in_use_has_the_bits_of_one_device(kind, api):
    with jax.set_mesh(_mesh(kind)):
        if api == "stateful":
            embedding = tpu_embed.TPUEmbedding(FEATURES, o.Adagrad(0.25))
            assert embedding.engine.layout.axes.mesh == _mesh(kind)
            found = _stateful(embedding)
        else:
            found = {"eager": _eager, "jitted": _jitted}[api](_engine(kind))
    assert_same(found, _on_one_device())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(1)
def test_an_engine_made_under_a_mesh_is_used_without_it(kind):
    engine = _engine(kind)
    assert engine.layout.axes.mesh == _mesh(kind)
    assert_same(_eager(engine), _on_one_device())


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


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=WHOLE), "explicit"])
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
        rows = jax.device_get((embed.embedding, bag.embedding))
        given = jax.device_put(ids, jax.NamedSharding(_mesh("explicit"), PartitionSpec(*split)))
        found = jax.device_get((embed(given), bag(given), bag(given[..., None])))
    expected = rows[0][ids], rows[1][ids].astype(np.float64).sum(1), rows[1][ids]
    assert_same((found[0], found[2]), (expected[0], expected[2]))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)  # a float32 sum of 2 or 4 rows


def test_the_placement_is_chosen_for_the_mesh_in_use():
    table = tpu_embed.TableConfig(7, 4, placement="auto")
    with jax.set_mesh(mesh(1)):
        assert planning.resolve(tpu_embed.FeatureConfig(table)).table.placement == "mod"
    assert planning.resolve(tpu_embed.FeatureConfig(table)).table.placement == "replicated"


GRADIENTS = dict.fromkeys(FEATURES, np.ones((8, 4), np.float32))
CALLS = {
    "init": lambda engine, state, batch: engine.init(jax.random.key(0)),
    "lookup": lambda engine, state, batch: engine.lookup(state, batch),
    "update": lambda engine, state, batch: engine.update(state, batch, GRADIENTS),
    "in place": lambda engine, state, batch: engine.update_in_place(state, batch, GRADIENTS),
    "tables": lambda engine, state, batch: engine.tables(state),
    "slots": lambda engine, state, batch: engine.slots(state),
    "rows": lambda engine, state, batch: engine.set_rows(
        state, "item", [0], np.ones((1, 4), np.float32)
    ),
    "load": lambda engine, state, batch: engine.load(state, "item", [np.ones((11, 4))]),
    "restore": lambda engine, state, batch: blank_arrays(engine.layout.stacks, engine.layout.axes),
    "statistics": lambda engine, state, batch: metrics.table_statistics(engine, state),
    "jit": lambda engine, state, batch: jax.jit(engine.lookup)(state, batch),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_mesh_in_use_is_refused(kind):
    engine = _engine("auto")
    state, batch = engine.init(jax.random.key(0)), engine.place(_features())
    said = (
        r"EmbeddingEngine: expected calls without jax.set_mesh or under the engine's mesh "
        rf"\('x': 2 Auto, 'y': 4 Auto\), got one under \('x': 4 {KINDS[kind].name}, .*mesh="
    )
    with jax.set_mesh(_mesh(kind, (4, 2))):
        for call in CALLS.values():
            with pytest.raises(ValueError, match=said):
                call(engine, state, batch)
        engine.place(_features())  # the batch's own sharding names the mesh
    engine.update_in_place(state, batch, GRADIENTS)  # nothing was donated


def test_kinds_of_axes_tell_meshes_apart():
    engine = _engine("auto")
    with (
        jax.set_mesh(_mesh("explicit")),
        pytest.raises(ValueError, match=r"mesh \('x': 2 Auto.*, got one under \('x': 2 Explicit"),
    ):
        engine.init(jax.random.key(0))


def test_an_abstract_mesh_is_refused():
    make = functools.partial(tpu_embed.EmbeddingEngine, FEATURES, o.SGD(0.1))
    abstract = _mesh("auto", (4, 2)).abstract_mesh
    said = r"mesh: expected the devices of a mesh, got the abstract mesh \('x': 4 Auto, .*; give a"
    with jax.sharding.use_abstract_mesh(abstract), pytest.raises(ValueError, match=said):
        make()

    def inside(x):
        with pytest.raises(ValueError, match=r"inside a shard_map over \('x', 'y'\)"):
            make()
        assert make(mesh=_mesh("auto")).layout.axes.mesh == _mesh("auto")
        return x

    with jax.set_mesh(_mesh("auto")):
        spec = PartitionSpec()
        jax.shard_map(inside, in_specs=spec, out_specs=spec, check_vma=False)(jnp.ones(2))
