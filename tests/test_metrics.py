"""Statistics and counters against float64 NumPy; TensorBoard files are read back."""

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
from tpu_embed.core.layout import resolve
from tpu_embed.core.state import norms, retrieve
from tpu_embed.metrics import batch_statistics, counters, table_statistics, write_scalars

# -- batches -------------------------------------------------------------------------------------


def test_ids_are_counted_by_table():
    films, users = TableConfig(10, 2, name="films"), TableConfig(5, 2, name="users")
    engine = EmbeddingEngine(
        {
            "bag": FeatureConfig(films, on_bad_id="drop"),
            "ragged": FeatureConfig(films, on_bad_id="drop"),
            "sequence": FeatureConfig(films, max_sequence_length=2),
            "sparse": FeatureConfig(users, on_bad_id="clip"),
        },
        mesh=mesh(2),
    )
    statistics = batch_statistics(
        engine,
        {
            "bag": np.array([[7, -1], [7, 3], [12, 3], [-1, -1]]),
            "ragged": RaggedIds.from_lists([[7, 7], [-3], [1], []]),
            "sequence": np.array([[2, -1, 9], [-1, -1, 9], [9, 7, 9], [2, 1, 9]]),
            "sparse": SparseIds.from_lists([[9], [], [4, 1], []]),
        },
        hottest=3,
    )
    assert statistics == {
        "films": {
            "ids": 12,
            "unique": 5,
            "unique_ratio": 5 / 12,
            "bad": 2,
            "hottest": [(7, 5), (1, 2), (2, 2)],
            "hottest_share": 5 / 12,
        },
        "users": {
            "ids": 3,
            "unique": 2,
            "unique_ratio": 2 / 3,
            "bad": 1,
            "hottest": [(4, 2), (1, 1)],
            "hottest_share": 2 / 3,
        },
    }
    assert json.loads(json.dumps(statistics))["films"]["hottest"][0] == [7, 5]


def test_a_batch_without_ids():
    engine = EmbeddingEngine([FeatureConfig(TableConfig(4, 2, name="t"))], mesh=mesh(1))
    empty = {"ids": 0, "unique": 0, "unique_ratio": 0.0, "bad": 0, "hottest": []}
    assert batch_statistics(engine, [np.full((2, 3), -1)]) == {"t": {**empty, "hottest_share": 0.0}}


def test_what_place_refuses_is_refused():
    engine = EmbeddingEngine([FeatureConfig(TableConfig(4, 2, name="t"))], mesh=mesh(1))
    with pytest.raises(ValueError, match=r"ids in \[0, 4\) of table 't', got id 4"):
        batch_statistics(engine, [np.array([4])])
    with pytest.raises(ValueError, match="features: "):
        batch_statistics(engine, [np.array([1])] * 2)
    with pytest.raises(ValueError, match="hottest: expected an integer >= 1, got 0"):
        batch_statistics(engine, [np.array([1])], hottest=0)


# -- tables --------------------------------------------------------------------------------------

SIZES = {"mod": 300, "small": 3, "div": 13, "replicated": 7, "half": 40}
OPTIONS = {
    "div": {"placement": "div", "trainable": False},
    "replicated": {"placement": "replicated", "trainable": False},
    "half": {"dtype": "bfloat16", "optimizer": optax.adam(0.1)},
}


def _partly_bad(key, shape, dtype, shard_info):
    """Return numbers whose mean is not 0; rows 0 and 299 are not finite."""
    values = 0.3 + jax.random.normal(key, shape, dtype)
    values = values.at[:, 1].add(jnp.where(shard_info.rows == 299, -jnp.inf, 0))
    return values.at[:, 0].add(jnp.where(shard_info.rows == 0, jnp.nan, 0))


def _all_bad(key, shape, dtype):
    return jnp.full(shape, jnp.inf, dtype)


def _engine(devices, names=tuple(SIZES)):
    initializers = {"mod": _partly_bad, "half": _partly_bad, "div": _all_bad}
    tables = {
        name: TableConfig(
            SIZES[name], 5, initializers.get(name), name=name, **OPTIONS.get(name, {})
        )
        for name in names
    }
    features = {name: FeatureConfig(table) for name, table in tables.items()}
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
    tables, slots = retrieve.host_arrays(state, engine.layout)
    for name, found in statistics.items():
        _assert_close(found, _expected(tables[name]))
        by_row = {slot: x for slot, x in slots[name].items() if x.ndim}
        assert set(found["slots"]) == set(by_row)
        for slot, values in by_row.items():
            _assert_close(found["slots"][slot], _expected(values))
    return statistics


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.whole), 8])
def test_tables_and_slots_are_measured(devices, monkeypatch):
    monkeypatch.setattr(norms, "BLOCK_ROWS", 16)
    statistics = _check(_engine(devices))
    assert statistics["mod"]["non_finite_rows"] == 2
    assert statistics["half"]["non_finite_rows"] == 1
    assert statistics["div"]["norm"] == 0
    assert set(statistics["half"]["slots"]) == {"mu", "nu"}


@pytest.mark.parametrize(("packing", "name"), [("lanes", "mod"), ("words", "half")])
def test_packed_rows_are_measured(packing, name, monkeypatch):
    monkeypatch.setattr(norms, "BLOCK_ROWS", 128)
    monkeypatch.setattr(resolve, "packing_of", lambda device: packing)
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
    memory = norms.of_state.lower(state, engine.layout).compile().memory_analysis()
    assert memory.temp_size_in_bytes < next(iter(state.tables.values())).nbytes // 8


def test_a_state_of_another_engine_is_refused():
    engine, other = _engine(1, ("small",)), _engine(1, ("replicated",))
    with pytest.raises(ValueError, match=r"state: expected stacks \['small@mod1x3#"):
        table_statistics(engine, other.init(jax.random.key(0)))
    with pytest.raises(ValueError, match="state: expected a TableState, got dict"):
        counters(engine, {})


# -- counters ------------------------------------------------------------------------------------


def test_counters_are_plain_numbers():
    table = TableConfig(4, 2, name="t")
    features = {"a": FeatureConfig(table), "b": [FeatureConfig(table)]}
    engine = EmbeddingEngine(features, o.SGD(0.1), mesh=mesh(2), on_bad_gradient="skip")
    state = engine.init(jax.random.key(0))
    ids = {"a": np.array([0, 9, 9, 1]), "b": [np.array([0, 1, 2, 3])]}
    ones = np.ones((4, 2), np.float32)
    update = jax.jit(engine.update)
    state = update(state, ids, {"a": ones, "b": [ones]})
    state = update(state, ids, {"a": ones, "b": [ones * np.float32("nan")]})
    found = counters(engine, state)
    assert found == {
        "step": 1,
        "overflows": 0,
        "bad_ids": {"a": 4, "b/0": 0},
        "bad_gradients": {"a": 0, "b/0": 1},
    }
    assert json.loads(json.dumps(found)) == found


def test_without_a_guard_there_is_nothing_to_count():
    engine = _engine(1, ("replicated",))
    assert set(counters(engine, engine.init(jax.random.key(0)))) == {"step", "overflows", "bad_ids"}


# -- writing -------------------------------------------------------------------------------------


class Recorder:
    """Keeps what it is given."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


STATISTICS = {
    "tables": {"films": {"norm": 2.5, "slots": {"accumulators": {"mean": 0.1}}}},
    "batch": {"films": {"ids": 3, "hottest": [(7, 3)]}},
    "bad_ids": {"user/history": np.int64(2)},
    "step": 4,
}
TAGS = {
    "tables/films/norm": 2.5,
    "tables/films/slots/accumulators/mean": 0.1,
    "batch/films/ids": 3,
    "bad_ids/user/history": 2,
    "step": 4,
}


def test_every_number_is_written_under_its_names():
    recorder = Recorder()
    write_scalars(recorder, 9, STATISTICS)
    assert recorder.scalars == [(tag, value, 9) for tag, value in TAGS.items()]


def test_tensorboard_reads_what_was_written(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX", reason="tpu-embed[tensorboard] is not there")
    from tensorboardX.proto.event_pb2 import Event

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        write_scalars(writer, 9, STATISTICS)
    found = {}
    for record in _records(next(tmp_path.iterdir()).read_bytes()):
        event = Event.FromString(record)
        for value in event.summary.value:
            found[value.tag] = value.simple_value
            assert event.step == 9
    assert found == pytest.approx(TAGS)


def _records(data):
    """Yield the records of an event file: length, checksum, bytes, checksum."""
    while data:
        size = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + size]
        data = data[16 + size :]
