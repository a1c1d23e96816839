"""Checkpoints in buckets: whole or not there, whatever the network does; nothing on the disk."""

import contextlib
import functools
import threading
import time

import bucket_fixtures
import jax
import numpy as np
import pytest
from facade_cases import mesh
from flax import nnx

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io import files, store
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.commits import committer

bucket, upstream = bucket_fixtures.bucket, bucket_fixtures.upstream


def engine(devices=2, placement="mod", size=50):
    living = DynamicVocabulary(admit_after=1)
    tables = {
        "static": TableConfig(size, 6, name="static", placement=placement),
        "keys": TableConfig(20, 4, name="keys", vocabulary=living),
        "home": TableConfig(40, 4, name="home", storage=HostStorage(device_rows=16)),
    }
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(devices))


@functools.cache
def plain(devices=2, placement="mod"):
    """Return an engine of one static table."""
    table = TableConfig(50, 6, name="static", placement=placement)
    return tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(devices))


@functools.cache
def plain_state():
    return plain().init(jax.random.key(0))


def trained(made, state, steps):
    for step in range(steps):
        rng = np.random.default_rng(step)
        ids = {
            "static": rng.integers(0, 50, (8, 2)),
            "keys": rng.integers(0, 30, (8, 1)),
            "home": rng.integers(0, 40, (8, 1)),
        }
        state, batch = made.admit(state, made.place(ids))
        ones = jax.tree.map(np.ones_like, made.lookup(state, batch))
        state = made.update(state, batch, ones)
    return state


def rows(made, state):
    keys = made.vocabularies.keys("keys")[0]
    found = [made.rows(state, "static", np.arange(50)), made.rows(state, "home", np.arange(40))]
    return [*found, keys, made.rows(state, "keys", keys=keys), int(state.step)]


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


MODEL = {
    "kernel": jax.device_put(
        np.arange(24, dtype=np.float32).reshape(8, 3),
        jax.sharding.NamedSharding(mesh(4), jax.sharding.PartitionSpec("d")),
    ),
    "layers": [{"bias": np.arange(3, dtype=np.int8)}, {"scale": 2.5, "n": 7}],
    "none": np.zeros((0, 2), np.float32),
}


@pytest.mark.quick(1)
def test_a_run_is_restored_on_other_devices(bucket):
    url, server = bucket
    made = engine()
    state = trained(made, made.init(jax.random.key(0)), 2)
    touched = io.TouchedRows(made, step=2)
    io.save(f"{url}/20", made, state, model=MODEL, position={"epoch": 1}, touched=touched)
    other = engine(8, "div")
    again = io.TouchedRows(other)
    server.seen.clear()
    found = io.restore(f"{url}/20", other, model=MODEL, touched=again)
    assert not [path for _, path, _ in server.seen if "list-type" in path or path.endswith("/o")]
    assert same(rows(other, found.state), rows(made, state))
    assert found.position == {"epoch": 1}
    for leaf, wanted in zip(*map(jax.tree.leaves, (found.model, MODEL)), strict=True):
        assert type(leaf) is type(wanted)
        np.testing.assert_array_equal(leaf, wanted)
    assert found.model["kernel"].sharding == MODEL["kernel"].sharding
    with pytest.raises(ValueError, match="expected no file"):
        io.save(f"{url}/20", made, state)
    with pytest.raises(FileNotFoundError, match=f"give one of {url}/20"):
        io.restore(url, made)
    with pytest.raises(FileNotFoundError, match="expected a directory with tables, position"):
        io.restore(f"{url}/30", made)
    # It goes on as the one that was not interrupted.
    assert same(rows(other, trained(other, found.state, 1)), rows(made, trained(made, state, 1)))


@pytest.mark.parametrize(("placement", "block", "chunks"), [("div", 2**22, 8), ("mod", 2**18, 40)])
def test_no_chunk_is_read_twice(bucket, monkeypatch, placement, block, chunks):
    url, server = bucket
    monkeypatch.setattr(row_files, "BLOCK", block)
    features = FeatureConfig(TableConfig(40_000, 64, name="t", placement=placement))
    made = tpu_embed.EmbeddingEngine(features, mesh=mesh(8))
    io.save(f"{url}/1", made, made.init(jax.random.key(0)))
    server.seen.clear()
    io.restore(f"{url}/1", made)
    seen = [path.partition("?")[0].replace("%2F", "/") for _, path, _ in server.seen]
    reads = [seen.count(path) for path in {*seen} if "/table/c." in path]
    assert reads == [1] * chunks


def hosted_engine():
    table = TableConfig(40, 4, name="home", storage=HostStorage(device_rows=16))
    return tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(2))


def hosted_step(made, state, first):
    state, batch = made.admit(state, made.place(np.arange(first, first + 10)))
    return made.update(state, batch, np.ones((10, 4), np.float32))


def test_unchanged_rows_at_home_are_named_by_later_commits(bucket):
    url, _ = bucket
    place = store.place_of(url)

    def roots():
        found = {one.partition("~")[0] for one in place.names() if not one.startswith("commits/")}
        return sorted(found)

    def restored(number):
        other = hosted_engine()
        return other, io.restore(f"{url}/{number}", other).state

    one = hosted_engine()
    state = one.init(jax.random.key(0))
    for first in (0, 10, 20, 30):
        state = hosted_step(one, state, first)
    before = {}
    with io.CheckpointManager(url, one, keep=2) as manager:
        for number in (1, 2, 3):
            manager.save(number, state)
            before[number] = one.rows(state, "home", np.arange(40))
            state = hosted_step(one, state, 0)  # the others have not changed
            manager.wait()
        assert manager.all_steps() == [2, 3]
        assert all("/rows/" in name for name in place.names() if name.startswith("1~"))
        assert roots() == ["1", "2", "3"]
        # A damaged commit may name anything, so nothing of what is shared goes meanwhile.
        commit = place / "commits" / "2.json"
        data = commit.read_bytes()
        commit.put(b"{}")
        manager.remove(3)
        assert [name for name in place.names() if name.startswith(("1~", "2~"))]
        commit.put(data)
    two, again = restored(2)  # and a run that goes on from there names them, too
    np.testing.assert_array_equal(two.rows(again, "home", np.arange(40)), before[2])
    with io.CheckpointManager(url, two, keep=None) as manager:
        written = sum("/home/rows/" in name for name in place.names())
        manager.save(5, again)
        manager.wait()
        assert sum("/home/rows/" in name for name in place.names()) <= written
        assert roots() == ["1", "2", "5"]
        manager.remove(2)
        assert roots() == ["1", "2", "5"]
        three, last = restored(5)
        np.testing.assert_array_equal(three.rows(last, "home", np.arange(40)), before[2])
        manager.remove(5)
    assert not place.names()


def test_a_commit_names_nothing_that_is_being_removed(bucket):
    url, _ = bucket
    old = committer(store.place_of(f"{url}/1"))
    how = committer(store.place_of(f"{url}/2"))
    shared, root = old.root("one"), how.root("two")
    for begun in (shared, root):
        how.begin(begun)
    (store.place_of(url) / "begun" / shared.name).put(b"sweeping")
    with pytest.raises(OSError, match="one writer per directory"):
        how.finish(root, [{f"{shared.key}/rows": []}])
    assert how.find() is None


def test_a_commit_names_nothing_that_was_removed_meanwhile(bucket):
    url, server = bucket
    made = hosted_engine()
    state = made.init(jax.random.key(0))
    for first in (0, 10, 20, 30):
        state = hosted_step(made, state, first)
    io.save(f"{url}/1", made, state)
    state = hosted_step(made, state, 0)

    def rule(method, path, _body):
        if method in ("PUT", "POST") and "commits" in path and "2.json" in path:
            server.rule = lambda *_: None
            committer(store.place_of(f"{url}/1")).remove()

    server.rule = rule
    with pytest.raises(OSError, match="one writer per directory"):
        io.save(f"{url}/2", made, state)
    assert committer(store.place_of(url)).names() == []


def test_nothing_is_under_way_when_a_file_is_given_up(bucket, monkeypatch):
    url, server = bucket
    monkeypatch.setattr(store, "_BLOCK", 2**12)
    begun = threading.Event()

    def rule(_method, path, _body):
        if "@" in path or "%40" in path:
            begun.set()
            time.sleep(0.3)

    how = committer(store.place_of(f"{url}/model"))
    root = how.root("one")
    how.begin(root)
    server.rule = rule

    def produce():
        with files.create(root / "big") as file:
            file.write(b"x" * 10_000)
            assert begun.wait(10)
            raise RuntimeError("the producer")

    with pytest.raises(RuntimeError, match="the producer"):
        produce()
    how.abandon(root)
    assert store.place_of(url).names() == []
    time.sleep(0.5)  # a piece would be there now
    assert store.place_of(url).names() == []


@pytest.mark.quick(1)
def test_a_manager_keeps_the_last_ones(bucket):
    url, _ = bucket
    made = engine()
    state = made.init(jax.random.key(0))
    with io.CheckpointManager(url, made, keep=2) as manager:
        for step in (1, 2, 3):
            state = trained(made, state, 1)
            assert manager.save(step, state, model=MODEL, position=step)
            manager.wait()
        assert manager.all_steps() == [2, 3]
        with pytest.raises(FileNotFoundError, match="one of"):
            manager.restore(1)
        assert manager.restore(2, model=MODEL).position == 2
        manager.remove(3)
    # Rows at home that did not change since are of step 1.
    left = [name for name in store.place_of(url).names() if "/home/rows/" not in name]
    assert [name.partition("/")[0].partition("~")[0] for name in left].count("2") > 3
    assert {name.partition("/")[0].partition("~")[0] for name in left} == {"2", "commits"}


def test_modules_are_restored(bucket):
    url, _ = bucket
    make = lambda seed: nnx.Dict(  # noqa: E731
        rows=tpu_embed.nn.Embed(20, 3, optimizer=o.Adagrad(0.5), rngs=nnx.Rngs(seed)),
        head=nnx.Linear(3, 2, rngs=nnx.Rngs(seed)),
        drop=nnx.Dropout(0.5, rngs=nnx.Rngs(seed)),
    )
    one, two = make(0), make(1)
    io.save_modules(f"{url}/m", {"model": one}, position=[1])
    assert io.restore_modules(f"{url}/m", {"model": two}) == [1]
    np.testing.assert_array_equal(one.rows.embedding, two.rows.embedding)
    np.testing.assert_array_equal(one.head.kernel[...], two.head.kernel[...])
    assert one.drop.rngs.key[...] == two.drop.rngs.key[...]


def test_fit_goes_on_from_a_bucket(bucket):
    url, _ = bucket
    table = TableConfig(30, 2, name="t")
    source = [{"features": np.arange(8) % 30, "labels": np.ones(8, np.float32)}] * 8
    loss = lambda rows, labels: ((rows.sum(-1) - labels) ** 2).mean()  # noqa: E731

    def run(steps, directory):
        made = tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(2))
        options = {"steps": steps, "directory": directory, "save_every": 2, "progress": False}
        items = [(one["features"], one["labels"]) for one in source]
        result = tpu_embed.fit(made, loss, items, **options)
        return made.rows(result.state, "t", np.arange(30))

    run(4, url)
    with io.CheckpointManager(
        url, tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(2))
    ) as manager:
        assert manager.latest_step() == 4
    np.testing.assert_array_equal(run(8, url), run(8, None))


def test_a_bucket_that_fails_hides_no_error_of_fit(bucket):
    url, server = bucket
    made = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(9, 2, name="t")), o.SGD(0.5))

    def source():
        yield np.arange(8), np.ones(8, np.float32)
        server.rule = lambda *_: 403
        raise KeyError("a file of the source")

    loss = lambda rows, labels: ((rows.sum(-1) - labels) ** 2).mean()  # noqa: E731
    with pytest.raises(KeyError, match="a file of the source") as error:
        tpu_embed.fit(made, loss, source(), steps=5, directory=url, progress=False)
    assert "does not tell its checkpoints" in "".join(error.value.__notes__)
    server.rule = lambda *_: None


FAULTS = ["reset", "delay", "cut", "lose", 429, 503]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.quick(3)
def test_faults_are_healed(bucket, fault):
    url, server = bucket
    made = engine()
    state = trained(made, made.init(jax.random.key(0)), 1)
    server.rule = lambda method, path, body: fault if len(server.seen) % 7 == 3 else None
    io.save(f"{url}/1", made, state, model=MODEL)
    other = engine(4, "div")
    found = io.restore(f"{url}/1", other, model=MODEL)
    assert sum(1 for *_, one in server.seen if one == fault) > 3
    assert same(rows(other, found.state), rows(made, state))


@pytest.mark.parametrize("stage", ["save", "restore"])
def test_what_is_forbidden_is_refused_by_name(bucket, stage):
    url, server = bucket
    made = plain()
    state = plain_state()
    if stage == "restore":
        io.save(f"{url}/1", made, state)
    server.rule = lambda method, path, body: 403
    with pytest.raises((OSError, ValueError), match=r"://bucket/.*(403|PERMISSION|denied)"):
        io.save(f"{url}/2", made, state) if stage == "save" else io.restore(f"{url}/1", made)
    server.rule = lambda *_: None
    with io.CheckpointManager(url, made) as manager:
        assert manager.all_steps() == ([1] if stage == "restore" else [])


@pytest.mark.quick(1)
def test_a_save_that_fails_at_any_request_is_not_there(bucket):
    url, server = bucket
    made = plain()
    state = plain_state()
    io.save(f"{url}/0", made, state, model=MODEL)
    requests, failed = len(server.seen), 0
    for first in range(0, requests, max(1, requests // 8)):
        server.seen.clear()
        server.rule = lambda *_, first=first: 403 if len(server.seen) >= first else None
        with contextlib.suppress(OSError, ValueError):
            io.save(f"{url}/1", made, state, model=MODEL)
            failed -= 1
        failed += 1
        server.rule = lambda *_: None
        with io.CheckpointManager(url, plain()) as manager:
            for step in manager.all_steps():
                manager.restore(step, model=MODEL)
                if step:
                    manager.remove(step)
    assert failed > 4
    with io.CheckpointManager(url, made, every=1) as manager:
        assert manager.save(2, state)  # sweeps what was left
    place = store.place_of(url)
    assert {name.partition("/")[0].partition("~")[0] for name in place.names()} == {
        "0",
        "2",
        "commits",
    }


@pytest.mark.parametrize("stage", ["mark", "commit"])
def test_what_a_commit_names_is_never_removed(bucket, stage):
    url, server = bucket
    made = plain()
    state = plain_state()
    asked = []

    def rule(method, path, body):
        if stage == "mark":  # it cannot be removed
            return 403 if "begun" in path and method == "DELETE" else None
        if "commits" in path and method in ("PUT", "POST"):
            asked.append(path)
            return "lose"
        return 503 if "commits" in path and asked else None

    server.rule = rule
    if stage == "mark":
        io.save(f"{url}/1", made, state)
    else:  # no answer arrives, so nobody knows whether it is there
        with pytest.raises(OSError, match=r"commits/1\.json"):
            io.save(f"{url}/1", made, state)
    server.rule = lambda *_: None
    for step in (2, 3):  # sweeps what is left
        io.restore(f"{url}/1", plain())
        with io.CheckpointManager(url, made, keep=None) as manager:
            manager.save(step, state)


def test_a_sweep_and_a_commit_at_one_time_leave_none_without_parts(bucket):
    url, server = bucket
    made = plain()
    state = plain_state()

    def rule(method, path, body):
        if "commits" in path and method in ("PUT", "POST"):
            server.rule = lambda *_: None
            committer(store.place_of(url)).sweep()
        return

    server.rule = rule
    with pytest.raises(OSError, match="one writer per directory"):
        io.save(f"{url}/1", made, state)
    assert not store.place_of(url).names()


def test_others_may_write_beside_a_manager(bucket):
    url, _ = bucket
    made = plain()
    how = committer(store.place_of(f"{url}/model"))
    root = how.root("one")
    how.begin(root)
    with io.CheckpointManager(url, made) as manager:
        manager.save(1, plain_state())
    how.finish(root, [{}])
    assert how.find() == root
    how.begin(root)
    committer(store.place_of(url)).sweep("model")
    with pytest.raises(FileExistsError, match="expected none, got a commit"):
        how.finish(root, [{}])


def test_a_damaged_commit_can_be_removed(bucket):
    url, _ = bucket
    made = plain()
    with io.CheckpointManager(url, made) as manager:
        manager.save(1, plain_state())
        manager.wait()
        store.place_of(f"{url}/commits/1.json").put(b"{}")
        with pytest.raises(ValueError, match=r"commits/1\.json"):
            manager.restore()
        manager.remove(1)
        assert manager.all_steps() == []
    assert not store.place_of(url).names()


def test_names_may_be_of_any_alphabet(bucket):
    url, _ = bucket
    made = plain()
    for _ in range(2):
        with io.CheckpointManager(f"{url}/ü", made) as manager:
            manager.save(1, plain_state())
            manager.wait()
            assert manager.all_steps() == [1]


@pytest.mark.parametrize("what", ["commits/1.json", "tables.json", "c.0", "leaves.json", "@"])
@pytest.mark.quick(3)
def test_a_flipped_byte_is_refused(bucket, what):
    url, server = bucket
    made = plain()
    state = plain_state()
    io.save(f"{url}/1", made, state, model=MODEL)
    quoted = what.replace("/", "%2F").replace("@", "%40")
    matches = lambda path: what in path or quoted in path  # noqa: E731
    server.rule = lambda method, path, body: "flip" if matches(path) else None
    with pytest.raises((OSError, ValueError)) as error:
        io.restore(f"{url}/1", plain(), model=MODEL)
    assert "://bucket/" in str(error.value)
    assert any(fault == "flip" for *_, fault in server.seen)


def test_one_of_two_writers_is_told(bucket):
    url, server = bucket
    made = plain()
    state = plain_state()
    begun = []

    def rule(method, path, body):
        if not begun and "commits" in path and method in ("PUT", "POST"):
            begun.append(path)
            with io.CheckpointManager(url, made, in_background=False) as manager:
                manager.save(1, state, position="first")
        return

    server.rule = rule
    with pytest.raises(FileExistsError, match="one of another writer"):
        io.save(f"{url}/1", made, state, position="second")
    server.rule = lambda *_: None
    assert io.restore(f"{url}/1", plain()).position == "first"


def test_other_schemes_are_refused():
    for url in ("az://bucket/run", "gs://bucket", "gs:/bucket/run", "http://a/b"):
        with pytest.raises(ValueError, match="path: expected a path, or a URL such as"):
            store.place_of(url)
