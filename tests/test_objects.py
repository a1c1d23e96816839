"""What objects say of themselves, and what happens where they are copied, changed or pickled."""

import copy
import pickle
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from facade_cases import FEATURES, batch, make_embedding, mesh
from flax import nnx

import tpu_embed
from tpu_embed import nn
from tpu_embed import optimizers as o


def _schedule(step):
    return 0.1 / (1 + step)


def _engine(feature_config=FEATURES, optimizer=None):
    return tpu_embed.EmbeddingEngine(feature_config, optimizer or o.Adagrad(0.5), mesh=mesh(2))


def _check_lines(shown, lines):
    """Check the lines of a repr, which must have neither addresses nor rows."""
    assert not re.search(r"0x[0-9a-f]{4}|Array\(", shown)
    found = shown.splitlines()
    for line, pattern in zip(found, lines, strict=True):
        assert re.fullmatch(pattern, line)


STACKS = r"0: StackSpec\(features=\(0, 1\)", r"1: StackSpec\(features=\(2,\)"
ITEM = r"  item: \[6, 2\] float32, mod over 2 shards, Adagrad\(0\.5\)"
USER = r"  user: \[5, 2\] float32, div over 2 shards, Momentum\(0\.25\)"


def test_an_engine_shows_a_line_per_table():
    _check_lines(repr(_engine()), [r"EmbeddingEngine on 2 cpu devices \(d: 2\)", ITEM, USER])
    fixed = tpu_embed.TableConfig(2**30, 8, placement="replicated", trainable=False)
    table = tpu_embed.TableConfig(6, 2, optimizer=o.Adam(_schedule))
    for one, end in ((fixed, ".*, replicated, not trained"), (table, r".*, Adam\(_schedule\)")):
        _check_lines(repr(_engine(tpu_embed.FeatureConfig(one))), [".*", f"  table_0: {end}"])


def test_a_state_shows_a_line_per_stack():
    engine = _engine()
    state = engine.init(jax.random.key(0))
    rows = r"float32\[\d+, 2\]"
    lines = [rf"  item@mod2x\d+#\w+: {rows}, accumulators {rows}"]
    lines.append(rf"  user@div2x\d+#\w+: {rows}, momenta {rows}")
    _check_lines(repr(state), ["TableState at step 0", *lines])
    shapes, shown = jax.eval_shape(lambda: state), []
    jax.jit(lambda state: shown.append(repr(state)))(state)
    for text in (repr(shapes), shown[0]):
        _check_lines(text, [r"TableState at step int32\[\]", *lines])
    donated = jax.jit(lambda state: state, donate_argnums=0)
    donated(state)
    _check_lines(repr(state), [r"TableState at step \(donated\)"] + [r".*: \(donated\), .*"] * 2)
    # Trees that are mapped from a state hold other leaves, and fewer of them.
    assert "at step 7" in repr(jax.tree.map(lambda _: 7, shapes))
    assert "tables: 1" in repr(tpu_embed.TableState(1, 2, 3, 4))  # type: ignore[arg-type]


def test_a_batch_shows_its_size_and_a_line_per_stack():
    placed = _engine().place(batch(0, 4))
    lines = [rf"  stack {features}, ids=.*\)" for features in STACKS]
    _check_lines(repr(placed), ["Batch of 4 examples for 2 replicas", *lines])


def test_an_embedding_shows_how_far_it_is():
    embedding = make_embedding()
    first = r"TPUEmbedding on 2 cpu devices \(d: 2\): "
    _check_lines(repr(embedding), [f"{first}not built, 0 batches waiting", ITEM, USER])
    embedding.enqueue(batch(0))
    _check_lines(repr(embedding), [f"{first}step 0, 1 batches waiting", ITEM, USER])


def test_copies_and_pickles():
    engine, embedding = _engine(), make_embedding()
    model = nn.Embed(6, 2, optimizer=o.SGD(0.1), rngs=nnx.Rngs(0))
    for one, said in (
        (engine, r"EmbeddingEngine: .*pickle its configs and make it again; tpu_embed\.io\.save"),
        (embedding, r"TPUEmbedding: .*retrieve returned; tpu_embed\.io\.save"),
        (model, r"EmbeddingEngine: .*save_modules and restore_modules a flax model"),
    ):
        with pytest.raises(TypeError, match=f"^pickle of {said}"):
            pickle.dumps(one)
    assert copy.copy(engine) is copy.deepcopy(engine) is engine
    assert np.array_equal(copy.deepcopy(model).embedding, model.embedding)
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="give its load what retrieve returned"):
            copied(embedding)
    state = engine.init(jax.random.key(0))
    kept = pickle.loads(pickle.dumps(state))
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_features_may_be_changed_after_they_were_declared():
    item = tpu_embed.FeatureConfig(tpu_embed.TableConfig(6, 2, name="item"))
    inner, features = [item], {}
    features |= {"a": item, "b": inner}
    engine = _engine(features)
    features["c"] = item
    inner.append(item)
    ids = {"a": np.zeros(2, np.int32), "b": [np.ones(2, np.int32)]}
    activations = engine.lookup(engine.init(jax.random.key(0)), engine.place(ids))
    assert jax.tree.structure(activations) == jax.tree.structure(ids)


def test_embedding_tables_are_a_pytree_in_the_order_of_the_features():
    # Neither by name nor by the order in which the configs were made.
    last, first = (tpu_embed.TableConfig(5, 2, name=name) for name in ("last", "first"))
    features = {"a": tpu_embed.FeatureConfig(first), "b": tpu_embed.FeatureConfig(last)}
    for config in (features, [features["b"], features["a"]]):
        names = ["first", "last"] if config is features else ["last", "first"]
        embedding = tpu_embed.TPUEmbedding(config, o.SGD(0.1), mesh=mesh(2))
        tables, rows = embedding.embedding_tables, embedding.retrieve()[0]
        assert [table.name for table in tables] == names
        for leaf, name in zip(jax.tree.leaves(tables), names, strict=True):
            np.testing.assert_array_equal(leaf, rows[name])
    doubled = jax.jit(lambda tables: jax.tree.map(lambda x: 2 * x, tables))(tables)
    np.testing.assert_array_equal(doubled[first], 2 * rows["first"])


@pytest.mark.whole
def test_packages_are_imported_when_they_are_first_used():
    program = """
import sys, tpu_embed
late = {f"tpu_embed.{name}" for name in ("io", "metrics", "nn", "retrieval")} | {"flax", "orbax"}
assert not late & sys.modules.keys(), late & sys.modules.keys()
assert {"data", "io", "metrics", "nn", "planning", "TableConfig"} <= set(dir(tpu_embed))
assert "retrieval" in dir(tpu_embed)
tpu_embed.io.save, tpu_embed.metrics.counters, tpu_embed.nn.Embed, tpu_embed.planning.plan
tpu_embed.data.Prefetcher, tpu_embed.retrieval.top_k
assert late - {"orbax"} <= sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    with pytest.raises(AttributeError, match="module 'tpu_embed' has no attribute 'nothing'"):
        tpu_embed.nothing  # noqa: B018
