"""Counts of hits against an engine that moves the rows, and against a map in plain Python."""

import collections

import jax
import numpy as np
import pytest

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, metrics, planning
from tpu_embed import optimizers as o
from tpu_embed.planning import HitCount, count_hits

BATCHES = 12


def drawn():
    """Return ids [batches, 8, 3], some of them padding; some come again and again."""
    rng, shape = np.random.default_rng(0), (BATCHES, 8, 3)
    ids = np.where(rng.random(shape) < 0.5, rng.integers(0, 9, shape), rng.integers(0, 300, shape))
    return np.where(rng.random(shape) < 0.1, -1, ids)


IDS = drawn()


def on_host(evict="lru"):
    """Return a storage, and a feature of a table in it."""
    storage = HostStorage(device_rows=40, evict=evict)
    return storage, FeatureConfig(TableConfig(300, 4, name="items", storage=storage))


STORAGE, FEATURE = on_host()


@pytest.mark.parametrize(("evict", "lookahead"), [("lru", 0), ("lfu", 0), ("lru", 1), ("lfu", 1)])
def test_counts_are_those_of_an_engine(evict, lookahead):
    """Two features look the table up: their ids of an example stand next to each other."""
    storage, feature = on_host(evict)
    features = {"a": feature, "b": feature}
    engine = EmbeddingEngine(features, o.SGD(0.5), lookahead=lookahead)
    state, total = engine.init(jax.random.key(0)), collections.Counter()
    for one in IDS:
        given = {"a": one[:, :2], "b": one[:, 2:]}
        total.update(metrics.batch_statistics(engine, given)["items"])
        state, batch = engine.admit(state, engine.place(given))
        state = engine.update(state, batch, engine.lookup(state, batch))
    engine.storage.flush()
    found = count_hits(IDS, storage, lookahead=lookahead)
    counted = metrics.counters(engine, state)["storage"]["items"]
    assert (counted["sent"], counted["brought"]) == (found.sent, found.brought)
    assert counted["missed"] == total["misses"] == found.brought + found.drawn
    assert (total["hits"], total["unique"]) == (found.hits, found.rows)
    assert found.hit_rate == found.hits / found.rows
    assert min(found.hits, found.brought) > 10
    assert found.touched_rows == len(np.unique(IDS[IDS >= 0]))


def test_what_is_not_counted_fills_the_places():
    whole, rest = (count_hits(IDS, STORAGE, warm_up=n) for n in (0, 3))
    first = count_hits(IDS[:3], STORAGE)
    assert rest.batches == BATCHES - 3
    for name in ("rows", "hits", "brought", "drawn", "sent"):
        assert getattr(rest, name) == getattr(whole, name) - getattr(first, name)
    assert rest.touched_rows == whole.touched_rows
    with pytest.raises(ValueError, match=r"batches: expected more than 3 batches.*got 3"):
        count_hits(IDS[:3], STORAGE, warm_up=3)


def test_batches_may_come_from_a_file_or_an_iterator(tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    np.save(tmp_path / "line.npy", np.arange(3))
    np.savez(tmp_path / "many.npz", IDS)
    (tmp_path / "text.npy").write_text("1 2 3")
    expected = count_hits(IDS, STORAGE)
    assert count_hits(tmp_path / "ids.npy", STORAGE) == expected
    assert count_hits(iter(IDS.astype(np.int32)), STORAGE) == expected
    for name in ("line.npy", "many.npz", "text.npy", "none.npy"):
        with pytest.raises(ValueError, match=rf"{name}: expected a .npy file of ids"):
            count_hits(tmp_path / name, STORAGE)


def test_what_an_engine_refuses_is_refused():
    storage = HostStorage(device_rows=8)
    with pytest.raises(ValueError, match=r"at most 8 distinct ids in a batch, got 9; .*rows=9\)"):
        count_hits([np.arange(9)], storage)
    with pytest.raises(ValueError, match=r"at most 8 distinct ids in 2 batches, got 11; .*=11\)"):
        count_hits([np.arange(8), np.arange(4, 11)], storage, lookahead=1)
    for bad in (np.array([3, -2]), np.array([2**63], np.uint64)):
        with pytest.raises(ValueError, match="batches: expected ids from 0"):
            count_hits([bad], storage)
    with pytest.raises(TypeError, match="batches: expected ids of an integer dtype, got float64"):
        count_hits([np.array([0.5])], storage)
    far = count_hits([np.array([2**63 - 1, 5], np.uint64)], storage)
    assert (far.drawn, far.hit_rate) == (2, 0.0)
    assert count_hits([np.zeros((4, 0), int)], storage).hit_rate == 1.0


def test_a_plan_takes_what_was_counted():
    batch = {"x": jax.ShapeDtypeStruct((8, 3), np.int32)}
    given = HitCount(batches=4, rows=80, hits=60, brought=8, drawn=12, sent=20, touched_rows=99)
    found = planning.plan({"x": FEATURE}, o.Adagrad(), 1, batch, hit_rates=given)
    # Of 20 rows of a batch, 2 come from home and 5 go there, each with 4 values and 4 slots.
    assert found.missed == {"in": 2 * 32, "out": 5 * 32}
    host = found.tables[0].host
    assert host is not None
    assert (host.batch_rows, host.hit_rate) == (20, 0.75)
