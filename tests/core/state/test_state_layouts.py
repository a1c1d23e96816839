"""A state knows its layout: one of another layout is refused, however it was stored.

The layout is in the keys of the state's dictionaries, which survive pickle, orbax and `jax.tree`.
Each way is tried from every device count to every other one where the arrays have the same shapes.
"""

import functools
import pickle

import flax.nnx as nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from facade_cases import mesh
from nn_models import bag_of

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, TableState
from tpu_embed import optimizers as o
from tpu_embed.core.layout import differences
from tpu_embed.core.layout.stacks import stack_name

DEVICES = (1, 2, 4, 8)
PAIRS = [(a, b) for a in DEVICES for b in DEVICES if a != b]
IDS = np.arange(8, dtype=np.int32)
V = 24  # the same physical shape on 1, 2, 4 and 8 devices


@functools.cache
def engine_on(devices, name="items", size=V, **options):
    table = TableConfig(size, 2, name=name)
    return EmbeddingEngine(
        {"x": FeatureConfig(table)}, o.Adagrad(0.1), mesh=mesh(devices), **options
    )


@functools.cache
def state_on(devices):
    return engine_on(devices).init(jax.random.key(0))


def by_pickle(state, tmp_path):
    return pickle.loads(pickle.dumps(state))


def by_tree(state, tmp_path):
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), state)


def by_orbax(state, tmp_path):
    """Return a state made of what orbax restores without a template."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", state)
        checkpointer.wait_until_finished()
        # Without a template orbax puts arrays on the devices that they were on.
        return TableState(**checkpointer.restore(tmp_path / "raw"))


@pytest.mark.parametrize("way", [by_pickle, by_tree, by_orbax])
@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.quick(5)
def test_a_state_of_another_device_count_is_refused(old, new, way, tmp_path, refused):
    kept, engine = way(state_on(old), tmp_path), engine_on(new)
    said = rf"the same tables in {old} shards? of {V // old} rows \(mod\), not in {new} shard"
    batch, gradients = engine.place({"x": IDS}), {"x": np.ones((8, 2), np.float32)}
    calls = [
        lambda: engine.lookup(kept, batch),
        lambda: engine.update(kept, batch, gradients),
        lambda: engine.tables(kept),
        lambda: engine.slots(kept),
        lambda: engine.set_rows(kept, "items", [0], [[1.0, 2.0]]),
        lambda: jax.jit(engine.lookup)(kept, batch),
    ]
    for call in calls:
        refused(said, call)


@pytest.mark.parametrize("way", [by_pickle, by_tree, by_orbax])
def test_a_state_of_this_layout_is_what_it_was(way, tmp_path):
    engine, state = engine_on(8), state_on(8)
    kept = jax.device_put(way(state, tmp_path), jax.tree.map(lambda leaf: leaf.sharding, state))
    batch, gradients = engine.place({"x": IDS}), {"x": np.ones((8, 2), np.float32)}
    expected = engine.tables(engine.update(state, batch, gradients))["items"]
    np.testing.assert_array_equal(
        engine.tables(engine.update(kept, batch, gradients))["items"], expected
    )


@pytest.mark.parametrize(("old", "new"), [(8, 1), (1, 8)])
def test_orbax_refuses_a_template_of_another_layout(old, new, tmp_path):
    names = [next(iter(state_on(n).tables)) for n in (old, new)]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", state_on(old))
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError) as error:
            checkpointer.restore(tmp_path / "raw", state_on(new))
    assert all(name in str(error.value) for name in names)


def test_tpu_embedding_refuses_it():
    features = FeatureConfig(TableConfig(V, 2, name="items"))
    old, new = (tpu_embed.TPUEmbedding(features, o.Adagrad(0.1), mesh=mesh(n)) for n in (8, 1))
    mine = new.state
    with pytest.raises(ValueError, match="the same tables in 8 shard"):
        new.state = old.state
    assert new.state is mine


def test_a_layer_refuses_it():
    old, new = (bag_of(o.Adagrad(0.1), devices=n) for n in (8, 1))
    kept = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, nnx.state(old))))
    (theirs,), (ours,) = old.tables, new.tables
    with pytest.raises(ValueError, match=theirs):  # in flax's words
        nnx.update(new, kept)
    # A merge goes by position: the variables still say what they are.
    merged = nnx.merge(nnx.split(new)[0], kept)
    with pytest.raises(ValueError, match=r"restore with tpu_embed\.io") as error:
        merged(np.array([[0, 1]]))
    assert ours in str(error.value)
    assert theirs in str(error.value)


@pytest.mark.parametrize("other", [{"name": "users"}, {"size": V - 1}], ids=str)
def test_engines_of_like_shapes_refuse_each_others_states(other):
    """A vocabulary of one row less is padded to the same physical rows."""
    state = engine_on(8, **other).init(jax.random.key(0))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (state, state_on(8))]
    assert shapes[0] == shapes[1]
    with pytest.raises(ValueError, match="other tables, or tables of another vocabulary size"):
        engine_on(8).lookup(state, {"x": IDS})


def test_another_stacking_is_refused_by_both():
    tables = [TableConfig(V, 2, name=name) for name in ("a", "b")]
    features = {table.name: FeatureConfig(table) for table in tables}
    engines = [EmbeddingEngine(features, stack_tables=stacked) for stacked in (True, False)]
    for engine, other in (engines, engines[::-1]):
        with pytest.raises(ValueError, match=r"state: expected stacks .* tpu_embed\.io"):
            engine.lookup(other.init(jax.random.key(0)), {"a": IDS, "b": IDS})


def test_names_show_the_layout_and_no_optimizer():
    numbers = {"placement": "mod", "shards": 8, "rows": 250, "kind": (64, "float32")}
    name = stack_name([("shop/items é" * 30, 2000)], **numbers)
    assert name.isascii()
    assert len(name) < 80
    assert "/" not in name
    assert "@mod8x250#" in name
    assert stack_name([("a", 1), ("b", 2)], **numbers).startswith("a+1@mod8x250#")
    one, other = (
        EmbeddingEngine(FeatureConfig(TableConfig(V, 2, name="t")), optimizer)
        for optimizer in (o.Adagrad(0.1), o.Adam(0.3))
    )
    assert [g.name for g in one.layout.stacks] == [g.name for g in other.layout.stacks]


def test_a_foreign_key_is_named_too():
    assert "not the name of a stack" in differences("items@mod8x250#0f3a", "stack_0")


def test_slots_of_another_optimizer_are_named(refused):
    table = TableConfig(10, 2, name="items")
    engines = [EmbeddingEngine(FeatureConfig(table), rule) for rule in (o.Adagrad(0.1), o.SGD(0.1))]
    state, ids = engines[0].init(jax.random.key(0)), np.zeros(8, np.int32)
    more = r"state: stack 'items@.*': expected slots \[\], got also \['accumulators'\]; save"
    refused(more, engines[1].update, state, engines[1].place(ids), np.zeros((8, 2), np.float32))
    refused(more, engines[1].slots, state)
    state = engines[1].init(jax.random.key(0))
    refused(r"table 'items', slot 'accumulators': .* got none", engines[0].slots, state)
