"""Tables at home on the host: every bit is that of the same tables on the devices."""

import gc
import threading

import host_table_cases as cases
import jax
import numpy as np
import pytest
from facade_cases import mesh
from host_table_cases import BATCH, TwoEngines, engines

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io, planning
from tpu_embed import optimizers as o
from tpu_embed.storage import HostRows

STOCHASTIC = {"dtype": "bfloat16", "rounding": "stochastic"}
CASES = {
    "one device": (1, "FTRL", {"lookahead": 2, "rows": 110}),
    "bfloat16": (2, "RowWiseAdagrad", {"dtype": "bfloat16", "dim": 5}),
    "room for all": (1, "Adam", {"rows": cases.ITEMS}),
    "rounded at random": (2, "SGD", {"dim": 3, **STOCHASTIC}),
    "rounded exchange": (4, "Adagrad", {"exchange": "bfloat16"}),
    "eight devices": (8, "Adagrad", {"evict": "lfu", "lookahead": 0, "rows": 80, "groups": 2}),
}

EXPIRING = DynamicVocabulary(ttl=2), 80, 50
WAITING = DynamicVocabulary(admit_after=2, evict="lfu", unseen="shared"), 30, 26
LIVING = {
    "expiring keys": (1, "Adagrad", EXPIRING, {"rows": 80}),
    "rounded at random": (2, "Adagrad", EXPIRING, {"rows": 80, **STOCHASTIC}),
    "keys that wait": (8, "RowWiseAdagrad", WAITING, {"rows": 72, "lookahead": 0}),
}


@pytest.mark.parametrize("case", LIVING)
@pytest.mark.whole
def test_living_vocabularies_on_the_host_have_the_keys_and_bits_of_those_on_the_devices(case):
    devices, rule, living, options = LIVING[case]
    counts = TwoEngines(*engines(devices, rule, living=living, **options), seed=2).run(120)
    wanted = "late rows", "updates", "visits", "refused", "keys set"
    assert min(counts[name] for name in wanted) > 0, counts
    assert counts["evicted" if living[0].ttl is None else "expired"] > 5, counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(1)
def test_random_runs_equal_those_of_tables_on_the_devices(case):
    devices, rule, options = CASES[case]
    counts = TwoEngines(*engines(devices, rule, **options), seed=1).run(120)
    assert bool(counts["late rows"]) == (case != "room for all")
    assert counts["updates"] > 12
    assert counts["visits"] > 2


def test_the_stateful_api_has_the_same_bits():
    def run(storage):
        features, pipelined = cases.declared(cases.RULES["Adagrad"], storage), True
        embedding, rng = tpu_embed.TPUEmbedding(features, None, pipelined), np.random.default_rng(1)
        for step in range(4):
            kinds, found = (True, False, True), []
            for training in kinds:
                embedding.enqueue(*cases.draw_batch(rng), training=training)
            for training in kinds:
                found.append(embedding.dequeue())
                if training:
                    embedding.apply_gradients(cases.gradients_of(found[-1], step))
            yield from (cases.rows_of(one) for each in found for one in each.values())

    for one, other in zip(run(HostStorage(device_rows=100)), run(None), strict=True):
        np.testing.assert_array_equal(one, other)


def make(rows=16, size=200, lookahead=None, vocabulary=None, devices=8, **options):
    """Return an engine with one table on the host, and a first state."""
    storage = HostStorage(device_rows=rows, **options)
    table = TableConfig(size, 4, name="items", storage=storage, vocabulary=vocabulary)
    options = {"mesh": mesh(devices), "lookahead": lookahead}
    engine = tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), **options)
    return engine, engine.init(jax.random.key(3))


def train(engine, state, *batches):
    for ids in batches:
        batch = engine.place(np.asarray(ids).reshape(BATCH, -1))
        state, batch = engine.admit(state, batch)
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
    return state


def test_a_batch_that_does_not_fit_is_refused_with_the_rows_that_it_needs():
    engine, state = make(rows=24, lookahead=1)
    state = train(engine, state, np.arange(16))
    with pytest.raises(ValueError, match=r"at most 24 distinct ids in 2 batches, got 32; .*=32\)"):
        engine.place(np.arange(50, 66).reshape(BATCH, 2))
    assert engine.vocabularies.placed == engine.vocabularies.admitted == 1
    state = train(engine, state, np.arange(8, 24))


def test_ids_whose_rows_are_on_their_way_home_are_touched(monkeypatch):
    (engine, state), go, write = make(rows=16), threading.Event(), HostRows.write

    def late(*args):
        assert go.wait(60)
        return write(*args)

    monkeypatch.setattr(HostRows, "write", late)
    state = train(engine, state, np.arange(16), np.arange(16, 32))
    assert not engine.storage["items"].ids().size
    assert engine.touched("items").tolist() == [*range(32)]
    assert io.host_table(engine, state, "items").ids.tolist() == [*range(32)]
    go.set()
    engine.storage.flush()
    assert engine.touched("items").tolist() == [*range(32)]


def test_the_devices_hold_device_rows_and_ids_may_be_huge():
    engine, state = make(rows=16, size=2**63)
    assert [table.shape for table in state.tables.values()] == [(16, 4)]
    far = 2**32 * np.arange(1, 9) + 5
    first = engine.rows(state, "items", [5, *far])
    assert len(np.unique(first[:, 0])) == 9
    state = train(engine, state, far, np.arange(16), np.arange(16, 32))
    np.testing.assert_array_equal(far, engine.touched("items")[-8:])
    assert not np.array_equal(first[1:], engine.rows(state, "items", far))
    small, state = make(rows=8)
    np.testing.assert_array_equal(first[:1], small.rows(state, "items", [5]))


def test_a_lost_row_stops_the_training(monkeypatch, refused):
    engine, state = make()
    state = train(engine, state, np.arange(16))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "write", full)
        state = train(engine, state, np.arange(16, 32))
        refused(r"HostStorage: .* No space left", engine.storage.flush, error=RuntimeError)
    batch = engine.place(np.arange(32, 48).reshape(BATCH, 2))
    refused(r"rows of \['items'\] written at home", engine.admit, state, batch, error=RuntimeError)
    assert engine.vocabularies.admitted == 2


def test_rows_in_a_file_are_those_in_memory(tmp_path):
    batches = [np.random.default_rng(i).integers(0, 200, 16) for i in range(6)]
    rows, sent = [], []
    for engine, state in (make(), make(path=tmp_path)):
        rows.append(engine.rows(train(engine, state, *batches), "items", np.arange(200)))
        sent.append(engine.storage.counters["items"]["sent"])
    np.testing.assert_array_equal(*rows)
    assert sent[0] == sent[1] > 0
    assert not list(tmp_path.iterdir())  # it has no name


def test_descriptions_tell_of_the_storage(tmp_path):
    engine, _ = make(rows=24, evict="lfu", path=tmp_path)
    assert "Adagrad(0.5), at home in a file, 24 rows on the devices (lfu)" in repr(engine)
    described = engine.describe()["tables"]["items"]
    assert (described["vocabulary_size"], described["vocabulary"]) == (200, None)
    storage = {"device_rows": 24, "evict": "lfu", "path": str(tmp_path)}
    assert storage.items() <= described["storage"].items()
    keyed, _ = make(20, 9, vocabulary=DynamicVocabulary(), devices=1)
    assert "Adagrad(0.5), keys (lru), at home in memory, 20 rows on the devices" in repr(keyed)


def test_a_new_beginning_forgets_what_is_at_home():
    engine, state = make()
    train(engine, state, np.arange(16), np.arange(16, 32))
    state = engine.init(jax.random.key(4))
    engine.vocabularies.rewind(state)
    assert engine.touched("items").size == engine.storage.counters["items"]["rows"] == 0
    train(engine, state, np.arange(16))


def test_no_thread_outlives_its_engine():
    of_others = {*threading.enumerate()}
    engine, state = make()
    train(engine, state, np.arange(16), np.arange(16, 32))
    engine.storage.flush()
    del engine, state
    gc.collect()
    for thread in {*threading.enumerate()} - of_others:
        if "write-back" in thread.name:
            thread.join(60)
            assert not thread.is_alive(), thread.name


def test_a_lookup_batch_is_refused_once_a_row_on_the_devices_has_another_key(refused):
    engine, state = make(20, 9, vocabulary=DynamicVocabulary(), devices=1)
    state = train(engine, state, [*range(8), 8, *range(1, 8)])  # 9 keys: all rows are taken
    kept = engine.place(np.arange(8), training=False)
    batch = engine.place(np.array([50] * 8))
    engine.lookup(state, kept)
    state, batch = engine.admit(state, batch)
    state = engine.update_in_place(state, batch, engine.lookup(state, batch))
    assert engine.storage.counters["items"]["missed"] == 9  # it has the row of key 0, or of 8
    refused("place it again", engine.lookup, state, kept)
    assert np.isnan(jax.jit(engine.lookup)(state, kept)).all()


def test_the_row_at_home_of_a_forgotten_key_is_not_brought():
    engine, state = make(8, 16, vocabulary=DynamicVocabulary(), devices=1)
    state = train(engine, state, np.arange(8), np.arange(8, 16))
    assert engine.storage.counters["items"]["sent"] == 8
    state = train(engine, state, np.arange(100, 108))  # they get the ids of the first 8 keys
    counts = engine.storage.counters["items"]
    assert (counts["missed"], counts["brought"], counts["late"]) == (24, 0, 0)


def test_what_needs_the_whole_table_is_refused(refused):
    engine, state = make()
    instead = ": .*engine.touched.* and engine.rows"
    refused("tables" + instead, engine.tables, state)
    refused("slots" + instead, engine.slots, state)
    refused("load" + instead, engine.load, state, "items", [np.zeros((200, 4))])
    refused("table_statistics" + instead, tpu_embed.metrics.table_statistics, engine, state)


def test_engines_that_differ_in_initializers_draw_their_own_rows():
    def drawn(scale, storage):
        normal = jax.nn.initializers.normal(scale)
        table = TableConfig(20, 4, normal, name="same", storage=storage)
        engine = tpu_embed.EmbeddingEngine(FeatureConfig(table), o.SGD(0.1))
        return engine.rows(engine.init(jax.random.key(0)), "same", np.arange(20))

    for scale in (1.0, 100.0):
        np.testing.assert_array_equal(drawn(scale, ON_HOST), drawn(scale, None))
    assert abs(drawn(100.0, ON_HOST)).max() > 10 * abs(drawn(1.0, ON_HOST)).max()


def test_rows_are_set_where_they_are_while_nothing_is_placed_ahead(refused):
    engine, state = make()
    state = train(engine, state, np.arange(16), np.arange(8, 24))
    ids, values = [3, 20, 150], np.arange(12.0).reshape(3, 4)  # at home, on the devices, not drawn
    state = engine.set_rows(state, "items", ids, values)
    np.testing.assert_array_equal(engine.rows(state, "items", ids), values)
    batch = engine.place(np.array(ids * 8).reshape(BATCH, 3))
    with pytest.raises(ValueError, match=r"set_rows: expected no batch placed ahead.*rewind"):
        engine.set_rows(state, "items", ids, values)
    state, batch = engine.admit(state, batch)
    np.testing.assert_allclose(engine.lookup(state, batch)[0], values.mean(0), rtol=1e-6)
    state = engine.set_rows(state, "items", ids, np.full((3, 4), 2**40))  # no int32
    np.testing.assert_array_equal(engine.rows(state, "items", ids), 2.0**40)
    with pytest.raises(TypeError, match=r"table 'items': .*masked"):
        engine.set_rows(state, "items", [3], np.ma.masked_array(np.ones((1, 4)), mask=True))
    outside = "a call outside a jit, for a table on the host"
    refused(outside, jax.jit(lambda s: engine.set_rows(s, "items", ids, values)), state)
    refused(outside, jax.jit(lambda s: engine.rows(s, "items", ids)), state)
    for bad in ([3, 3], [200, 1], [-1, 1]):
        refused(r"table 'items': rows", engine.set_rows, state, "items", bad, np.zeros((2, 4)))


ON_HOST = HostStorage(device_rows=8)
FEATURE = {"x": FeatureConfig(TableConfig(9, 4, name="items", storage=ON_HOST))}
EVERY_ROW, ZEROS = o.Adam(0.1, lazy_adam=False), np.zeros((9, 4), np.float32)
IDS, NUMBERS = {"x": np.zeros((8, 2), int)}, tpu_embed.RowIdInitializer()
UNSUITED = [
    (lambda: TableConfig(9, 4, storage=ON_HOST, placement="replicated"), "TableConfig.placement"),
    (lambda: TableConfig(2**63 + 1, 4, storage=ON_HOST), "TableConfig.vocabulary_size"),
    (lambda: TableConfig(9, 4, NUMBERS, storage=ON_HOST), "TableConfig.initializer"),
    (lambda: HostStorage(device_rows=0), "HostStorage.device_rows"),
    (lambda: HostStorage(device_rows=8, evict="none"), "HostStorage.evict"),
    (lambda: tpu_embed.EmbeddingEngine(FEATURE, EVERY_ROW), "'items' .*optimizer.*lazy_adam=True"),
    (lambda: planning.plan(FEATURE, EVERY_ROW, "v5e:2x2", IDS), "'items' .*lazy_adam=True"),
    (lambda: io.serving_lookup({"items": ZEROS}, IDS, FEATURE), "'items': expected a function"),
    (lambda: io.serving_lookup({"items": lambda _: ZEROS}, IDS, FEATURE), r"'items': .*\(9, 4\)"),
]


@pytest.mark.parametrize(("call", "says"), UNSUITED)
def test_what_does_not_suit_a_table_on_the_host_is_refused(call, says, refused):
    refused(says, call)
