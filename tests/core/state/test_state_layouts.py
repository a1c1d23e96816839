"""A state knows its layout: one of another layout is refused, however it was stored.

The layout is in the keys of the state's dictionaries, which survive pickle, orbax and `jax.tree`.
Each way is tried from every device count to every other one where the arrays have the same shapes.
"""

import functools
import pickle
import re

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
IDS, GRADIENTS = np.arange(8, dtype=np.int32), {"x": np.ones((8, 2), np.float32)}
V = 24  # the same physical shape on 1, 2, 4 and 8 devices


@functools.cache
def engine_on(devices, name="items", size=V):
    features = {"x": FeatureConfig(TableConfig(size, 2, name=name))}
    return EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(devices))


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
    batch = engine.place({"x": IDS})
    refused(said, engine.lookup, kept, batch)
    refused(said, jax.jit(engine.lookup), kept, batch)
    refused(said, engine.update, kept, batch, GRADIENTS)
    refused(said, engine.tables, kept)
    refused(said, engine.slots, kept)
    refused(said, engine.set_rows, kept, "items", [0], [[1.0, 2.0]])


@pytest.mark.parametrize("way", [by_pickle, by_tree, by_orbax])
def test_a_state_of_this_layout_is_what_it_was(way, tmp_path):
    engine, state = engine_on(8), state_on(8)
    kept = jax.device_put(way(state, tmp_path), jax.tree.map(lambda leaf: leaf.sharding, state))
    batch = engine.place({"x": IDS})
    updated = [engine.tables(engine.update(s, batch, GRADIENTS))["items"] for s in (state, kept)]
    np.testing.assert_array_equal(*updated)


def test_tpu_embedding_refuses_it(refused):
    features = FeatureConfig(TableConfig(V, 2, name="items"))
    old, new = (tpu_embed.TPUEmbedding(features, o.Adagrad(0.1), mesh=mesh(n)) for n in (8, 1))
    mine = new.state
    refused("the same tables in 8 shard", setattr, new, "state", old.state)
    assert new.state is mine


def test_a_layer_refuses_it(refused):
    old, new = (bag_of(o.Adagrad(0.1), devices=n) for n in (8, 1))
    kept = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, nnx.state(old))))
    (theirs,), (ours,) = old.tables, new.tables
    refused(theirs, nnx.update, new, kept)  # in flax's words
    # A merge goes by position: the variables still say what they are.
    merged = nnx.merge(nnx.split(new)[0], kept)
    with pytest.raises(ValueError, match=r"restore with tpu_embed\.io") as error:
        merged(np.array([[0, 1]]))
    assert ours in str(error.value)
    assert theirs in str(error.value)


@pytest.mark.parametrize("other", [{"name": "users"}, {"size": V - 1}], ids=str)
def test_engines_of_like_shapes_refuse_each_others_states(other, refused):
    """A vocabulary of one row less is padded to the same physical rows."""
    state = engine_on(8, **other).init(jax.random.key(0))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (state, state_on(8))]
    assert shapes[0] == shapes[1]
    says = "other tables, or tables of another vocabulary size"
    refused(says, engine_on(8).lookup, state, {"x": IDS})


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
    assert re.fullmatch(r"[ -.0-~]{,60}@mod8x250#\w+", name)  # ASCII without a slash
    assert stack_name([("a", 1), ("b", 2)], **numbers).startswith("a+1@mod8x250#")
    assert "not the name of a stack" in differences("items@mod8x250#0f3a", "stack_0")


def test_slots_of_another_optimizer_are_named(refused):
    table = TableConfig(10, 2, name="items")
    one, other = (EmbeddingEngine(FeatureConfig(table), r) for r in (o.Adagrad(0.1), o.SGD(0.1)))
    assert [s.name for s in one.layout.stacks] == [s.name for s in other.layout.stacks]
    state, batch = one.init(jax.random.key(0)), other.place(IDS)
    more = r"state: stack 'items@.*': expected slots \[\], got also \['accumulators'\]; save"
    refused(more, other.update, state, batch, GRADIENTS["x"])
    refused(more, other.slots, state)
    state = other.init(jax.random.key(0))
    refused(r"table 'items', slot 'accumulators': .* got none", one.slots, state)
