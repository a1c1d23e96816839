"""Ids of a batch, counted by hand; counters of a state; tables and slots, measured in NumPy."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.metrics import batch_statistics, counters, statistics, table_statistics


def test_ids_are_counted_by_table():
    films, users = TableConfig(10, 2, name="films"), TableConfig(5, 2, name="users")
    features = {
        "bag": FeatureConfig(films, on_bad_id="drop"),
        "ragged": FeatureConfig(films, on_bad_id="drop"),
        "sequence": FeatureConfig(films, max_sequence_length=2),
        "sparse": FeatureConfig(users, on_bad_id="clip"),
    }
    ids = {
        "bag": np.array([[7, -1], [7, 3], [12, 3], [-1, -1]]),
        "ragged": RaggedIds.from_lists([[7, 7], [-3], [1], []]),
        "sequence": np.array([[2, -1, 9], [-1, -1, 9], [9, 7, 9], [2, 1, 9]]),
        "sparse": SparseIds.from_lists([[9], [], [4, 1], []]),
    }
    statistics = batch_statistics(EmbeddingEngine(features, mesh=mesh(2)), ids, hottest=3)
    names = "ids", "unique", "unique_ratio", "bad", "hottest", "hottest_share"
    expected = {
        "films": (12, 5, 5 / 12, 2, [(7, 5), (1, 2), (2, 2)], 5 / 12),
        "users": (3, 2, 2 / 3, 1, [(4, 2), (1, 1)], 2 / 3),
    }
    assert statistics == {
        name: dict(zip(names, numbers, strict=True)) for name, numbers in expected.items()
    }
    assert json.loads(json.dumps(statistics))["films"]["hottest"][0] == [7, 5]


@pytest.fixture
def engine():
    return EmbeddingEngine([FeatureConfig(TableConfig(4, 2, name="t"))], mesh=mesh(1))


def test_a_batch_without_ids(engine):
    empty = {"ids": 0, "unique": 0, "unique_ratio": 0.0, "bad": 0, "hottest": []}
    assert batch_statistics(engine, [np.full((2, 3), -1)]) == {"t": {**empty, "hottest_share": 0.0}}


def test_what_place_refuses_is_refused(engine):
    for ids, hottest, said in (
        ([np.array([4])], 1, r"ids in \[0, 4\) of table 't', got id 4"),
        ([np.array([1])] * 2, 1, "features: "),
        ([np.array([1])], 0, "hottest: expected an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            batch_statistics(engine, ids, hottest=hottest)


# -- Counters of a state after a few steps ---------------------------------------------------------


def test_counters_are_plain_numbers():
    table = TableConfig(4, 2, name="t")
    features = {"a": FeatureConfig(table), "b": [FeatureConfig(table)]}
    engine = EmbeddingEngine(features, o.SGD(0.1), mesh=mesh(2), on_bad_gradient="skip")
    state = engine.init(jax.random.key(0))
    ids = {"a": np.array([0, 9, 9, 1]), "b": [np.array([0, 1, 2, 3])]}
    ones = np.ones((4, 2), np.float32)
    update = jax.jit(engine.update)
    for given in (ones, ones * np.float32("nan")):
        state = update(state, ids, {"a": ones, "b": [given]})
    found = counters(engine, state)
    expected = {"bad_ids": {"a": 4, "b/0": 0}, "bad_gradients": {"a": 0, "b/0": 1}}
    assert found == {"step": 1, "overflows": 0, **expected}
    assert json.loads(json.dumps(found)) == found


def test_without_a_guard_there_is_nothing_to_count():
    table = TableConfig(7, 5, name="t", trainable=False)
    engine = EmbeddingEngine([FeatureConfig(table)], mesh=mesh(1))
    assert set(counters(engine, engine.init(jax.random.key(0)))) == {"step", "overflows", "bad_ids"}
    with pytest.raises(ValueError, match="state: expected a TableState, got dict"):
        counters(engine, {})


# -- Tables and slots, measured in float64 NumPy ---------------------------------------------------


def _partly_bad(key, shape, dtype, shard_info):
    """Return numbers whose mean is not 0; rows 0 and 299 are not finite."""
    values = 0.3 + jax.random.normal(key, shape, dtype)
    values = values.at[:, 1].add(jnp.where(shard_info.rows == 299, -jnp.inf, 0))
    return values.at[:, 0].add(jnp.where(shard_info.rows == 0, jnp.nan, 0))


ALL_BAD = {"initializer": jax.nn.initializers.constant(jnp.inf), "trainable": False}
SIZES = {"mod": 300, "small": 3, "div": 13, "replicated": 7, "half": 40}
OPTIONS = {
    "mod": {"initializer": _partly_bad},
    "div": {"placement": "div", **ALL_BAD},
    "replicated": {"placement": "replicated", "trainable": False},
    "half": {"initializer": _partly_bad, "dtype": "bfloat16", "optimizer": optax.adam(0.1)},
}


def _engine(devices, names=tuple(SIZES)):
    tables = {n: TableConfig(SIZES[n], 5, name=n, **OPTIONS.get(n, {})) for n in names}
    features = jax.tree.map(FeatureConfig, tables)
    return EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(devices))


def _expected(values):
    """Return the statistics of `[V, …]`, in float64."""
    rows = np.asarray(values).astype(np.float64).reshape(len(values), -1)
    finite = np.isfinite(rows).all(axis=1)
    kept = rows[finite]
    return {
        "norm": math.sqrt((kept**2).sum()),
        "max_row_norm": math.sqrt((kept**2).sum(axis=1).max(initial=0)),
        "mean": kept.mean() if kept.size else 0.0,
        "non_finite_rows": int((~finite).sum()),
    }


def _assert_close(found, expected):
    for name, number in expected.items():
        assert type(found[name]) in (int, float)
        # sums of float32 numbers, in pairs
        assert found[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


def _check(engine):
    state = engine.init(jax.random.key(0))
    statistics = table_statistics(engine, state)
    assert list(statistics) == list(engine.table_configs)
    tables, slots = engine.tables(state), engine.slots(state)
    for name, found in statistics.items():
        _assert_close(found, _expected(tables[name]))
        by_row = {slot: x for slot, x in slots[name].items() if x.ndim}
        assert set(found["slots"]) == set(by_row)
        for slot, values in by_row.items():
            _assert_close(found["slots"][slot], _expected(values))
    return statistics


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.whole), 8])
def test_tables_and_slots_are_measured(devices, monkeypatch):
    monkeypatch.setattr("tpu_embed.metrics.statistics.BLOCK_ROWS", 16)
    statistics = _check(_engine(devices))
    assert statistics["mod"]["non_finite_rows"] == 2
    assert statistics["half"]["non_finite_rows"] == 1
    assert statistics["div"]["norm"] == 0
    assert set(statistics["half"]["slots"]) == {"mu", "nu"}


@pytest.mark.parametrize(("packing", "name"), [("lanes", "mod"), ("words", "half")])
@pytest.mark.quick(1)
def test_packed_rows_are_measured(packing, name, monkeypatch):
    monkeypatch.setattr("tpu_embed.metrics.statistics.BLOCK_ROWS", 128)
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    engine = _engine(2, (name,))
    assert all(stack.packing == packing for stack in engine.layout.stacks)
    _check(engine)


def test_a_mesh_of_two_axes():
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    table = TableConfig(30, 3, name="t", shard_axes="model")
    _check(EmbeddingEngine([FeatureConfig(table)], o.SGD(0.1), mesh=grid, batch_axes="data"))


def test_a_long_sum_keeps_its_digits():
    """Ones that float32 would stop to count one by one at 2^24."""
    ones = jax.nn.initializers.ones
    table = TableConfig(2**20 + 7, 17, initializer=ones, name="t", trainable=False)
    engine = EmbeddingEngine([FeatureConfig(table)], mesh=mesh(1))
    state = engine.init(jax.random.key(0))
    found = table_statistics(engine, state)["t"]
    assert found["norm"] == pytest.approx(math.sqrt((2**20 + 7) * 17), rel=1e-6)
    assert found["mean"] == pytest.approx(1, rel=1e-6)
    memory = statistics.of_state.lower(state, engine.layout).compile().memory_analysis()
    assert memory.temp_size_in_bytes < next(iter(state.tables.values())).nbytes // 8


def test_a_state_of_another_engine_is_refused():
    engine, other = _engine(1, ("small",)), _engine(1, ("replicated",))
    with pytest.raises(ValueError, match=r"state: expected stacks \['small@mod1x3#"):
        table_statistics(engine, other.init(jax.random.key(0)))
