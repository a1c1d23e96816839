"""Checkpoints in buckets: whole or not there, whatever the network does; nothing on the disk."""

import contextlib
import functools
import threading
import time
from urllib.parse import unquote

import bucket_fixtures
import jax
import numpy as np
import pytest
from bucket_fixtures import begun, roots
from facade_cases import mesh
from flax import nnx

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.io import files, store
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.commits import committer

bucket, upstream = bucket_fixtures.bucket, bucket_fixtures.upstream


def engine(devices=2, placement="mod"):
    tables = {
        "static": TableConfig(50, 6, name="static", placement=placement),
        "keys": TableConfig(20, 4, name="keys", vocabulary=DynamicVocabulary(admit_after=1)),
        "home": TableConfig(40, 4, name="home", storage=HostStorage(device_rows=16)),
    }
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(devices))


def engine_of(size, dim, devices=2, **options):
    table = TableConfig(size, dim, name="t", **options)
    return tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.5), mesh=mesh(devices))


@functools.cache
def plain():
    """Return an engine of one static table, and its first state."""
    engine = engine_of(50, 6)
    return engine, engine.init(jax.random.key(0))


def save(url, **options):
    io.save(url, *plain(), **options)


def restore(url, **options):
    return io.restore(url, plain()[0], **options)


def manager_of(url, *steps, **options):
    """Return a manager that has saved these steps."""
    manager = io.CheckpointManager(url, plain()[0], **options)
    for step in steps:
        manager.save(step, plain()[1])
        manager.wait()
    return manager


def nothing(*_):
    """Let every request pass."""


def at_commit(server, act):
    """Do something once, when a commit is about to be written."""

    def rule(method, path, _body):
        if "commits" in path and method in ("PUT", "POST"):
            server.rule = nothing
            act()

    server.rule = rule


def trained(made, state, steps):
    for step in range(steps):
        rng = np.random.default_rng(step)
        sizes = {"static": (50, 2), "keys": (30, 1), "home": (40, 1)}
        ids = {name: rng.integers(0, size, (8, n)) for name, (size, n) in sizes.items()}
        state, batch = made.admit(state, made.place(ids))
        state = made.update(state, batch, jax.tree.map(np.ones_like, made.lookup(state, batch)))
    return state


def rows(made, state):
    keys = made.vocabularies.keys("keys")[0]
    found = [made.rows(state, "static", np.arange(50)), made.rows(state, "home", np.arange(40))]
    return [*found, keys, made.rows(state, "keys", keys=keys), int(state.step)]


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


PLACED = jax.sharding.NamedSharding(mesh(4), jax.sharding.PartitionSpec("d"))
MODEL = {
    "kernel": jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3), PLACED),
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


@pytest.mark.parametrize(("placement", "block", "chunks"), [("div", 2**22, 8), ("mod", 2**16, 40)])
def test_no_chunk_is_read_twice(bucket, monkeypatch, placement, block, chunks):
    url, server = bucket
    monkeypatch.setattr(row_files, "BLOCK", block)
    made = engine_of(10_000, 64, 8, placement=placement)
    io.save(f"{url}/1", made, made.init(jax.random.key(0)))
    server.seen.clear()
    io.restore(f"{url}/1", made)
    seen = [path.partition("?")[0].replace("%2F", "/") for _, path, _ in server.seen]
    reads = [seen.count(path) for path in {*seen} if "/table/c." in path]
    assert reads == [1] * chunks


HOSTED = {"storage": HostStorage(device_rows=16)}


def hosted_step(made, state, first):
    state, batch = made.admit(state, made.place(np.arange(first, first + 10)))
    return made.update(state, batch, np.ones((10, 4), np.float32))


def hosted_run():
    """Return an engine, and its state after every row was trained once."""
    made = engine_of(40, 4, **HOSTED)
    state = made.init(jax.random.key(0))
    for first in (0, 10, 20, 30):
        state = hosted_step(made, state, first)
    return made, state


def test_unchanged_rows_at_home_are_named_by_later_commits(bucket):
    url, _ = bucket
    place, ids, before = store.place_of(url), np.arange(40), {}

    def restored(number):
        other = engine_of(40, 4, **HOSTED)
        state = io.restore(f"{url}/{number}", other).state
        np.testing.assert_array_equal(other.rows(state, "t", ids), before[2])
        return other, state

    one, state = hosted_run()
    with io.CheckpointManager(url, one, keep=2) as manager:
        for number in (1, 2, 3):
            manager.save(number, state)
            before[number] = one.rows(state, "t", ids)
            state = hosted_step(one, state, 0)  # the others have not changed
            manager.wait()
        assert manager.all_steps() == [2, 3]
        assert all("/rows/" in name for name in place.names() if name.startswith("1~"))
        assert roots(url) == {"1", "2", "3", "commits"}
        # A damaged commit may name anything, so nothing of what is shared goes meanwhile.
        commit = place / "commits" / "2.json"
        data = commit.read_bytes()
        commit.put(b"{}")
        manager.remove(3)
        assert [name for name in place.names() if name.startswith(("1~", "2~"))]
        commit.put(data)
    two, again = restored(2)  # and a run that goes on from there names them, too
    with io.CheckpointManager(url, two, keep=None) as manager:
        written = sum("/t/rows/" in name for name in place.names())
        manager.save(5, again)
        manager.wait()
        assert sum("/t/rows/" in name for name in place.names()) <= written
        assert roots(url) == {"1", "2", "5", "commits"}
        manager.remove(2)
        assert roots(url) == {"1", "2", "5", "commits"}
        restored(5)
        manager.remove(5)
    assert not place.names()


def test_a_commit_names_nothing_that_is_being_removed(bucket):
    url, _ = bucket
    _, shared = begun(f"{url}/1")
    how, root = begun(f"{url}/2", "two")
    (store.place_of(url) / "begun" / shared.name).put(b"sweeping")
    with pytest.raises(OSError, match="one writer per directory"):
        how.finish(root, [{f"{shared.key}/rows": []}])
    assert how.find() is None


def test_a_commit_names_nothing_that_was_removed_meanwhile(bucket):
    url, server = bucket
    made, state = hosted_run()
    io.save(f"{url}/1", made, state)
    state = hosted_step(made, state, 0)
    at_commit(server, committer(store.place_of(f"{url}/1")).remove)
    with pytest.raises(OSError, match="one writer per directory"):
        io.save(f"{url}/2", made, state)
    assert committer(store.place_of(url)).names() == []


def test_nothing_is_under_way_when_a_file_is_given_up(bucket, monkeypatch):
    url, server = bucket
    monkeypatch.setattr(store, "_BLOCK", 2**12)
    asked = threading.Event()

    def rule(_method, path, _body):
        if "@" in path or "%40" in path:
            asked.set()
            time.sleep(0.3)

    how, root = begun(f"{url}/model")
    server.rule = rule

    def produce():
        with files.create(root / "big") as file:
            file.write(b"x" * 10_000)
            assert asked.wait(10)
            raise RuntimeError("the producer")

    with pytest.raises(RuntimeError, match="the producer"):
        produce()
    how.abandon(root)
    assert store.place_of(url).names() == []
    time.sleep(0.5)  # a piece would be there now
    assert store.place_of(url).names() == []


def test_modules_are_restored(bucket):
    url, _ = bucket
    one, two = (
        nnx.Dict(
            rows=tpu_embed.nn.Embed(20, 3, optimizer=o.Adagrad(0.5), rngs=nnx.Rngs(seed)),
            drop=nnx.Dropout(0.5, rngs=nnx.Rngs(seed)),
        )
        for seed in range(2)
    )
    io.save_modules(f"{url}/m", {"model": one}, position=[1])
    assert io.restore_modules(f"{url}/m", {"model": two}) == [1]
    np.testing.assert_array_equal(one.rows.embedding, two.rows.embedding)
    assert one.drop.rngs.key[...] == two.drop.rngs.key[...]


def fit(made, source, **options):
    def loss(rows, labels):
        return ((rows.sum(-1) - labels) ** 2).mean()

    return tpu_embed.fit(made, loss, source, progress=False, **options)


def test_fit_goes_on_from_a_bucket(bucket):
    url, _ = bucket
    source = [(np.arange(8) % 30, np.ones(8, np.float32))] * 8

    def run(steps, directory):
        made = engine_of(30, 2)
        report = fit(made, source, steps=steps, directory=directory, save_every=2)
        return made.rows(report.state, "t", np.arange(30))

    run(4, url)
    with io.CheckpointManager(url, engine_of(30, 2)) as manager:
        assert manager.latest_step() == 4
    np.testing.assert_array_equal(run(8, url), run(8, None))


def test_a_bucket_that_fails_hides_no_error_of_fit(bucket):
    url, server = bucket

    def source():
        yield np.arange(8), np.ones(8, np.float32)
        server.rule = lambda *_: 403
        raise KeyError("a file of the source")

    with pytest.raises(KeyError, match="a file of the source") as error:
        fit(engine_of(9, 2), source(), steps=5, directory=url)
    assert "does not tell its checkpoints" in "".join(error.value.__notes__)
    server.rule = nothing


@pytest.mark.parametrize("fault", ["reset", "delay", "cut", "lose", 429, 503])
@pytest.mark.quick(2)
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
    if stage == "restore":
        save(f"{url}/1")
    server.rule = lambda *_: 403
    with pytest.raises((OSError, ValueError), match=r"://bucket/.*(403|PERMISSION|denied)"):
        save(f"{url}/2") if stage == "save" else restore(f"{url}/1")
    server.rule = nothing
    with manager_of(url) as manager:
        assert manager.all_steps() == ([1] if stage == "restore" else [])


@pytest.mark.quick(1)
def test_a_save_that_fails_at_any_request_is_not_there(bucket):
    url, server = bucket
    save(f"{url}/0", model=MODEL)
    requests, failed = len(server.seen), 0
    for first in range(0, requests, max(1, requests // 8)):
        server.seen.clear()
        server.rule = lambda *_, first=first: 403 if len(server.seen) >= first else None
        with contextlib.suppress(OSError, ValueError):
            save(f"{url}/1", model=MODEL)
            failed -= 1
        failed += 1
        server.rule = nothing
        with manager_of(url) as manager:
            for step in manager.all_steps():
                manager.restore(step, model=MODEL)
                if step:
                    manager.remove(step)
    assert failed > 4
    manager_of(url, 2).close()  # sweeps what was left
    assert roots(url) == {"0", "2", "commits"}


@pytest.mark.parametrize("stage", ["mark", "commit"])
def test_what_a_commit_names_is_never_removed(bucket, stage):
    url, server = bucket
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
        save(f"{url}/1")
    else:  # no answer arrives, so nobody knows whether it is there
        with pytest.raises(OSError, match=r"commits/1\.json"):
            save(f"{url}/1")
    server.rule = nothing
    for step in (2, 3):  # sweeps what is left
        restore(f"{url}/1")
        manager_of(url, step, keep=None).close()


def test_a_sweep_and_a_commit_at_one_time_leave_none_without_parts(bucket):
    url, server = bucket
    at_commit(server, committer(store.place_of(url)).sweep)
    with pytest.raises(OSError, match="one writer per directory"):
        save(f"{url}/1")
    assert not store.place_of(url).names()


def test_others_may_write_beside_a_manager(bucket):
    url, _ = bucket
    how, root = begun(f"{url}/model")
    manager_of(url, 1).close()
    how.finish(root, [{}])
    assert how.find() == root
    how.begin(root)
    committer(store.place_of(url)).sweep("model")
    with pytest.raises(FileExistsError, match="expected none, got a commit"):
        how.finish(root, [{}])


def test_a_damaged_commit_can_be_removed(bucket):
    url = f"{bucket[0]}/ü"  # names may be of any alphabet
    manager_of(url, 1).close()
    with manager_of(url) as manager:
        assert manager.all_steps() == [1]
        store.place_of(f"{url}/commits/1.json").put(b"{}")
        with pytest.raises(ValueError, match=r"commits/1\.json"):
            manager.restore()
        manager.remove(1)
        assert manager.all_steps() == []
    assert not store.place_of(url).names()


@pytest.mark.parametrize("what", ["commits/1.json", "tables.json", "c.0", "leaves.json", "@"])
@pytest.mark.quick(3)
def test_a_flipped_byte_is_refused(bucket, what):
    url, server = bucket
    save(f"{url}/1", model=MODEL)
    server.rule = lambda method, path, body: "flip" if what in unquote(path) else None
    with pytest.raises((OSError, ValueError), match="://bucket/"):
        restore(f"{url}/1", model=MODEL)
    assert any(fault == "flip" for *_, fault in server.seen)


def test_one_of_two_writers_is_told(bucket):
    url, server = bucket

    def write_first():
        with manager_of(url, in_background=False) as manager:
            manager.save(1, plain()[1], position="first")

    at_commit(server, write_first)
    with pytest.raises(FileExistsError, match="one of another writer"):
        save(f"{url}/1", position="second")
    assert restore(f"{url}/1").position == "first"
