"""Keys of dynamic vocabularies while serving; what serves by row number refuses them."""

import pickle

import jax
import numpy as np
import pytest
from living_cases import KEY, configs, draw, engine, keys_in_order, oracles, train

from tpu_embed import FeatureConfig, FixedVocabulary, RaggedIds, TableConfig, io, metrics, planning
from tpu_embed import optimizers as o


@pytest.fixture(scope="module")
def served():
    """Return an engine, its tables on the host, and activations that it looks up."""
    made = engine()
    state, _ = train(made, made.init(jax.random.key(KEY)), 5)
    made.place(draw(6))  # what is placed ahead is served to nobody
    batch = {**draw(7), "one": draw(3)["one"]}
    looked = made.lookup(state, made.place(batch, training=False))
    tables = {name: np.asarray(table) for name, table in made.tables(state).items()}
    return made, state, tables, batch, looked


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.quick(1)
def test_keys_are_served_with_the_rows_that_they_have(served, fixed):
    made, _, tables, batch, looked = served
    features, maps = configs(), made.vocabularies
    if fixed:
        maps = {name: FixedVocabulary(*maps.keys(name)) for name in ("items", "tags")}
        maps = pickle.loads(pickle.dumps(maps))
        maps[features["one"].table] = maps.pop("tags")
    found = io.serving_lookup(tables, batch, features, vocabularies=maps)
    jax.tree.map(np.testing.assert_array_equal, found, looked)
    assert not np.asarray(found["bags"]).all(axis=1).all()  # some keys are unseen


def test_fixed_vocabularies_find_every_kind_of_key():
    keys = FixedVocabulary(np.array([-1, 5], np.int64), [3, 0])
    odd = np.array([2**64 - 1, 5, 0], np.uint64)
    assert keys.find(odd).tolist() == [3, 0, -1]
    assert FixedVocabulary([], []).find(odd).tolist() == [-1] * 3
    assert len(keys) == 2
    for given, rows, text in (
        ([1, 1], [0, 1], "key 1 twice"),
        ([9, 3, 7, 7], [0, 1, 2, 3], "key 7 twice"),
        ([1, 2], [0], "expected 2 rows, got 1"),
        ([1.5], [0], "integers of shape"),
        ([1, 2], [0, -1], r"FixedVocabulary\.rows: expected at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=text):
            FixedVocabulary(given, rows)


def test_serving_without_the_vocabularies_is_refused(served):
    _, _, tables, batch, _ = served
    empty = FixedVocabulary([], [])
    for given, error, said in (
        (None, ValueError, r"give vocabularies=engine\.vocabularies"),
        ({"items": empty}, ValueError, r"none of \['tags'\]"),
        ({"users": empty}, ValueError, "tables with a dynamic vocabulary, got users"),
        (3, TypeError, "vocabularies"),
        ({"items": [1]}, TypeError, "vocabularies"),
    ):
        with pytest.raises(error, match=said):
            io.serving_lookup(tables, batch, configs(), vocabularies=given)
    with pytest.raises(ValueError, match="look up outside the jit"):
        jax.jit(lambda one: io.serving_lookup(tables, {"one": one}, configs()))(np.arange(4))


@pytest.mark.parametrize("on_host", [True, False])
def test_a_vocabulary_of_other_tables_is_refused(served, on_host):
    made, _, tables, batch, _ = served
    arrays = tables if on_host else jax.tree.map(jax.numpy.asarray, tables)
    keys = FixedVocabulary(*made.vocabularies.keys("items"))
    for feature, table, rows, given, text in (
        ("bags", "items", 20, made.vocabularies, "vocabularies: items: expected 20 rows, got 34"),
        ("bags", "items", 20, {"items": keys}, r"items: expected rows below 20, got row \d+"),
        # The last row of this table is no key's: unseen keys share it.
        ("one", "tags", 6, {"tags": FixedVocabulary([3], [5])}, "rows below 5, got row 5"),
    ):
        some, features = {table: arrays[table][:rows]}, {feature: configs(20)[feature]}
        with pytest.raises(ValueError, match=text):
            io.serving_lookup(some, {feature: batch[feature]}, features, vocabularies=given)


def test_metrics_tell_of_keys(served):
    made, state, _, batch, _ = served
    items = metrics.counters(made, state)["vocabularies"]["items"]
    oracle = oracles()["items"]
    for step in range(5):  # a sixth batch is placed
        oracle.take(keys_in_order(draw(step))["items"])
    assert made.vocabularies.counters["items"]["admitted"] > items["admitted"]
    assert items.items() >= oracle.counters.items()
    found = metrics.batch_statistics(made, {**batch, "one": np.array([2**40, -1] * 4)})
    assert found["tags"]["hottest"] == [(2**40, 4)]
    assert found["items"]["bad"] == 0
    bags = RaggedIds([2**64 - 1, 5], [0, 1] + [2] * 15)
    found = metrics.batch_statistics(made, {**batch, "bags": bags, "seen": np.full((8, 1), 5)})
    assert found["items"]["hottest"] == [(5, 9), (2**64 - 1, 1)]


def test_plans_tell_of_keys(served):
    made, _, _, batch, _ = served
    assert "keys (lfu)" in repr(made)
    plan = planning.plan(configs(), o.Adam(0.1), 4, batch)
    assert plan.host_bytes == (34 + 6) * (52 + 4 * 20)
    assert "maps of dynamic vocabularies" in plan.explain()
    fixed = {"user": FeatureConfig(TableConfig(9, 4, name="users"))}
    assert planning.plan(fixed, o.SGD(0.1), 4, {"user": np.arange(8)}).host_bytes == 0
