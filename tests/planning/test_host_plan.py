"""Plans of tables on the host: what devices and hosts hold, what moves, and what would fit."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, planning
from tpu_embed import optimizers as o
from tpu_embed.kernels import host_native
from tpu_embed.planning.costs import readable

SHAPES = {
    "item": jax.ShapeDtypeStruct((64, 4), np.int32),
    "user": jax.ShapeDtypeStruct((64,), np.int32),
}


def declared(rows=1000, size=2**40, placement="mod", **options):
    """Return features of a table on the host and of one that is on the devices."""
    storage = HostStorage(device_rows=rows, **options)
    items = TableConfig(size, 8, name="items", storage=storage, placement=placement)
    return {"item": FeatureConfig(items), "user": FeatureConfig(TableConfig(90, 8, name="users"))}


def planned(features, target=8, batch=SHAPES, **options):
    return planning.plan(features, o.Adagrad(0.1), target, batch, **options)


def host_of(found):
    (host,) = [table.host for table in found.tables if table.host]
    return host


BATCH = {"item": np.arange(256).reshape(64, 4), "user": np.arange(64)}


def test_devices_hold_device_rows():
    found = planned(declared(), mesh(8))
    engine = tpu_embed.EmbeddingEngine(declared(), o.Adagrad(0.1), mesh=mesh(8))
    state = engine.init(jax.random.key(0))
    for what in ("tables", "slots"):
        leaves = jax.tree.leaves(getattr(state, what))
        assert found.held[what] == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert found.held == planned(declared(size=2000), mesh(8)).held
    assert (found.tables[0].vocabulary_size, found.tables[0].rows) == (2**40, 125)
    ids = {"item": np.random.default_rng(0).integers(0, 2**40, (64, 4)), "user": np.arange(64)}
    exact = planned(declared(), mesh(8), ids)
    assert host_of(exact).batch_rows == 256
    room, other = engine.place(ids).spec.stacks[0], exact.spec.stacks[0]
    # The first batch of an engine has its rows in turn on all shards, a later one anywhere.
    assert room.row_capacity <= other.row_capacity <= 2 * room.row_capacity


def test_rows_at_home_take_what_the_store_says():
    """Beside whole segments of up to 16 MiB; the store is the one in C++, whatever runs here."""
    store, n = host_native.RowStore([32, 32], None), 1_000_000
    for ids in np.arange(n, dtype=np.uint64).reshape(10, -1) * 7:
        store.write(ids, [np.zeros((ids.size, 32), np.uint8)] * 2, 1)
        # 8 bytes of id, 4 of mark, at most 4 / 0.5 in the index; and room of a segment to come.
        segment = (store.numbers.row_bytes / 64 - store.numbers.size) * 12
        assert store.numbers.index_bytes <= 20.5 * store.numbers.size + segment + 256 * 64
    host = host_of(planned(declared(), touched_rows={"items": n}))
    assert host.row_bytes == 64
    assert 0 <= store.numbers.row_bytes - host.row_store_bytes < 2**24
    assert 0.9 * host.index_bytes < store.numbers.index_bytes <= host.index_bytes


def test_hosts_share_rows_and_all_have_the_maps():
    one, two = (planned(declared(), name) for name in ("v5p:2x2x1", "v5p:2x2x2"))
    assert (one.hosts, two.hosts) == (1, 2)
    assert one.on_host == {"maps": 52_000, "rows at home": 2**40 * 64, "index": 2**40 * 20}
    assert two.on_host == {"maps": 52_000, "rows at home": 2**40 * 32, "index": 2**40 * 10}
    assert two.host_bytes == sum(two.on_host.values())
    filed = planned(declared(path="/fast"), "v5p:2x2x2", touched_rows={"items": 100})
    assert (filed.file_bytes, filed.on_host["rows at home"]) == (50 * 64, 0)
    assert "3.1 KiB in files of each host: rows at home" in filed.explain()
    assert planned(declared(size=2000), 8, touched_rows={"items": 10**9}).on_host["index"] == 40_000


def test_what_misses_is_moved():
    unknown = planned(declared(), batch=BATCH)
    assert unknown.missed is None
    assert "misses of items are not counted: give their hit_rates" in unknown.explain()
    assert "misses" not in unknown.passing
    for rates in (0.75, {"items": 0.75}):
        found = planned(declared(), batch=BATCH, hit_rates=rates)
        assert found.missed == {"in": 64 * 64, "out": 64 * 64}
        assert found.passing["misses"] == 2 * 64 * 64 // 8
    text = found.explain()
    assert "misses, each step and host: 4.0 KiB to its devices, 4.0 KiB home" in text
    (line,) = [line.split() for line in text.splitlines() if line.startswith("items (lru)")]
    assert line[2] == "1,000"
    assert line[-5:] == ["75.0%", "4.0", "KiB", "4.0", "KiB"]
    assert json.loads(found.to_json())["tables"][0]["host"]["rows_in"] == 64
    assert planned(declared(), batch=BATCH, hit_rates=1).missed == {"in": 0, "out": 0}
    tags = dataclasses.replace(declared()["item"].table, name="tag")
    more = {**declared(), "tag": FeatureConfig(tags)}
    found = planned(more, batch={**BATCH, "tag": np.arange(64)}, hit_rates={"tag": 0.5})
    assert "misses of items are not counted" in found.explain()


ERRORS = [
    ({"hit_rates": {"item": 0.5}}, "hit_rates: expected tables on the host.*mean items\\?"),
    ({"touched_rows": {"users": 5}}, "touched_rows: expected .*'items'.*got 'users'"),
    ({"touched_rows": {"items": -1}}, r"touched_rows\['items'\]: expected an integer >= 0"),
    ({"features": declared(200), "batch": BATCH}, r"at most 200 .*device_rows=256\)"),
]
NO_SHARE = r"hit_rates\['items'\]: expected a share from 0 to 1"
ERRORS += [({"hit_rates": rate}, NO_SHARE) for rate in (1.5, -0.1, float("nan"), "0.5", True)]


def test_errors():
    for options, said in ERRORS:
        with pytest.raises(ValueError, match=said):
            planned(**{"features": declared(), **options})


def test_uniform_ids_find_no_more_room_than_there_is():
    few, many = (planned(declared(rows=rows)) for rows in (16, 10_000))
    assert (host_of(few).batch_rows, host_of(many).batch_rows) == (16, 256)
    assert few.spec.stacks[0].row_capacity < many.spec.stacks[0].row_capacity
    assert host_of(planned(declared(rows=300, size=300))).batch_rows < 256


def test_automatic_placement_shards_what_is_on_the_host():
    features = declared(rows=8, size=9, placement="auto")
    found = planned(features)
    assert (found.tables[0].placement, found.tables[0].why) == ("mod", "at home on the host")
    assert planning.resolve(features, o.Adagrad(0.1))["item"].table.placement == "mod"
    with pytest.raises(ValueError, match="placement: expected mod, div or replicated, got 'auto'"):
        tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1))


@pytest.mark.parametrize("ids", ["real", "shapes"])
def test_the_rows_of_a_remedy_fit(ids):
    rows = {"a": 2**20, "b": 2**18, "c": 2**10}
    tables = {n: TableConfig(size, 64, name=n, placement="auto") for n, size in rows.items()}
    features = jax.tree.map(FeatureConfig, tables)
    batch = {name: np.arange(64).reshape(32, 2) for name in features}
    if ids == "shapes":
        batch = jax.eval_shape(lambda: batch)
    for memory, names in {2**27: ["a"], 2**25: ["a", "b"]}.items():
        remedy = planned(features, "v5e:2x2", batch, memory=memory).remedies[-1]
        rows = device_rows(remedy)
        assert sorted(rows) == names
        on_host = {name: HostStorage(device_rows=n) for name, n in rows.items()}
        changed = {
            name: FeatureConfig(dataclasses.replace(table, storage=on_host.get(name)))
            for name, table in tables.items()
        }
        found = planned(changed, "v5e:2x2", batch, memory=memory)
        assert remedy.endswith(f": {readable(found.bytes_per_device)}, would fit")
        assert 0.85 * memory < found.bytes_per_device <= memory
        # A table on the host of which the devices hold too much gets fewer rows there.
        less = planned(changed, "v5e:2x2", batch, memory=memory // 4).remedies[-1]
        assert device_rows(less)["a"] < rows["a"] / 2


def device_rows(remedy):
    """Return table -> rows of a remedy `storage=HostStorage(device_rows=1_000) for a, b, …: …`."""
    parts = re.findall(r"device_rows=([\d_]+)\) for ([a-c](?:, [a-c](?=[,:]))*)", remedy)
    return {name: int(n) for n, names in parts for name in names.split(", ")}


# -- Batches that wait for their update, beside engines that place them ----------------------------


IDS, AHEAD = 16, 2
RULE = o.Adagrad(0.1)


def on_host(rows, size=2**40):
    storage = HostStorage(device_rows=rows)
    return {"x": FeatureConfig(TableConfig(size, 4, name="items", storage=storage))}


def living(rows):
    table = TableConfig(rows, 4, name="items", vocabulary=DynamicVocabulary())
    return {"x": FeatureConfig(table)}


def batch(number):
    """Return a batch that shares no id with those of other numbers."""
    return {"x": IDS * number + np.arange(IDS).reshape(8, 2)}


def planned_ahead(features, ids=None, target=2, **options):
    ids = batch(0) if ids is None else ids
    return planning.plan(features, RULE, target, ids, lookahead=AHEAD, **options)


def engine(features, devices=2):
    return tpu_embed.EmbeddingEngine(features, RULE, mesh=mesh(devices), lookahead=AHEAD)


def place_some(made):
    """Place batches that share no row, each ahead of the ones before it."""
    for number in range(AHEAD + 3):
        made.place(batch(number))
    return made.vocabularies.counters["items"]["unseen"]


def test_rows_on_the_devices_are_those_that_place_needs():
    needed = planned_ahead(on_host(1000)).tables[0].lookahead_rows
    assert needed == (AHEAD + 1) * IDS
    place_some(engine(on_host(needed)))
    with pytest.raises(ValueError, match=rf"HostStorage\(device_rows={needed}\)"):
        place_some(engine(on_host(needed - 1)))
    assert "items: 3 batches" not in planned_ahead(on_host(needed)).explain()
    said = " ".join(planned_ahead(on_host(needed - 1)).explain().split())
    assert f"items: 3 batches may have {needed} rows, and {needed - 1} have room" in said
    assert f"HostStorage(device_rows={needed}) has room for all" in said


def test_rows_of_a_living_vocabulary_are_those_that_all_keys_get():
    needed = planned_ahead(living(1000)).tables[0].lookahead_rows
    assert place_some(engine(living(needed))) == 0
    assert place_some(engine(living(needed - 1))) > 0
    said = " ".join(planned_ahead(living(needed - 1)).explain().split())
    assert f"a capacity of {needed} has room for all" in said


def test_of_uniform_ids_some_are_in_several_batches():
    shapes, found = {"x": jax.ShapeDtypeStruct((8, 2), np.int32)}, {}
    for size in (2**40, 20):
        features = on_host(20, size)
        found[size] = planned_ahead(features, shapes).tables[0].lookahead_rows
    assert found[2**40] == (AHEAD + 1) * IDS
    assert IDS < found[20] < 20
    assert planned_ahead(features).tables[0].lookahead_rows == 20


@pytest.mark.parametrize("make", [on_host, living])
def test_batches_ahead_take_the_bytes_of_placed_ones(make):
    """Their ids, and their activations, which a pipelined loop has looked up."""
    found, made = planned_ahead(make(100), target=mesh(1)), engine(make(100), devices=1)
    state, placed = made.init(jax.random.key(0)), []
    for number in range(AHEAD + 1):
        one = made.place(batch(number), spec=found.spec)
        state, one = made.admit(state, one)
        placed.append((one.packed, made.lookup(state, one)["x"]))
    waiting = sum(array.nbytes for pair in placed[1:] for array in pair)  # the first is trained on
    assert found.passing["ahead"] == waiting > 0
    alone = planning.plan(make(100), RULE, mesh(1), batch(0))
    assert "ahead" not in alone.passing
    assert found.bytes_per_device == alone.bytes_per_device + waiting


def test_a_remedy_leaves_the_rows_of_batches_ahead_on_the_devices():
    table = TableConfig(2**22, 64, name="items")
    ids = {"x": np.arange(2**15).reshape(-1, 2)}
    for ahead in (0, 40):
        options = {"memory": 2**27, "lookahead": ahead}
        found = planning.plan({"x": FeatureConfig(table)}, RULE, "v5e:2x2", ids, **options)
        (remedy,) = [one for one in found.remedies if "HostStorage" in one]
        rows = int(remedy.split("device_rows=")[1].split(")")[0])
        assert rows >= (ahead + 2) * 2**15
        assert ("would fit" in remedy) == (ahead == 0)
