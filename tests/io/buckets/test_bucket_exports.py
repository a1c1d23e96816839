"""Exports and deltas in buckets: a server downloads a model once, and reads deltas into memory."""

import itertools
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import unquote

import bucket_fixtures
import numpy as np
import pytest
from bucket_fixtures import begun
from publication_cases import Trainer

from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed.io import store
from tpu_embed.io.commits import download, find
from tpu_embed.io.serving.following import publications

bucket, upstream = bucket_fixtures.bucket, bucket_fixtures.upstream


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.quick(3)
def test_a_server_follows_a_bucket(bucket, keys, tmp_path_factory):
    url, server = bucket
    one = Trainer(keys=keys)
    one.train(np.arange(8))
    version, cache = one.touched.version(one.state), tmp_path_factory.mktemp("cache")
    one.export(f"{url}/model", version)
    with pytest.raises(FileExistsError):
        one.export(f"{url}/model", version)
    with pytest.raises(ValueError, match="cache: expected a folder, for a URL"):
        io.load_model(f"{url}/model")
    served = io.FollowingModel(io.load_model(f"{url}/model", cache=cache))
    server.seen.clear()
    io.load_model(f"{url}/model", cache=cache)
    assert len(server.seen) < 4  # it is there already
    rows = {"t": np.array(one.tables()["t"])}
    for step in range(2):
        one.train(np.arange(4 + step, 12 + step))
        delta = f"{url}/delta-{step}"
        last = io.export_delta(delta, one.engine, one.state, one.touched, since=version)
        served.apply(delta)
        if not keys:
            assert io.apply_delta(rows, delta, version) == last
        version = last
    one.check(served)
    if not keys:
        np.testing.assert_array_equal(rows["t"], one.tables()["t"])
    server.rule = lambda method, path, body: "flip" if "values" in path else None
    with pytest.raises((OSError, ValueError), match="://bucket/"):
        served.apply(f"{url}/delta-0")
    with pytest.raises((OSError, ValueError), match="://bucket/"):
        io.load_model(f"{url}/model", cache=tmp_path_factory.mktemp("other"))


def test_large_files_are_written_in_pieces(bucket, tmp_path_factory, monkeypatch):
    url, server = bucket
    monkeypatch.setattr(store, "_BLOCK", 2**12)
    config = FeatureConfig(TableConfig(2_000, 3, name="t"))  # 24,000 bytes
    values = np.arange(6_000, dtype=np.float32).reshape(2_000, 3)
    ids = np.arange(0, 2_000, 7)
    faults = itertools.cycle([None, "reset", None, 503, None, "cut", None, "lose"])
    server.rule = lambda method, path, body: next(faults) if "values" in path else None
    io.export_model(f"{url}/model", lambda rows: rows, {"t": values}, config, ids, platforms="cpu")
    server.rule = lambda *_: None
    names = [name for name in store.place_of(url).names() if "values" in name]
    assert [name.rpartition("@")[2] for name in names] == ["0", "1", "2", "3", "4", "5"]
    served = io.load_model(f"{url}/model", cache=tmp_path_factory.mktemp("cache"))
    np.testing.assert_array_equal(served(ids), values[ids])
    for fault in ("flip", 404):
        server.rule = lambda _, path, body, fault=fault: fault if "@3" in unquote(path) else None
        with pytest.raises(OSError, match=r"://bucket/.*values\.npy: expected"):
            io.load_model(f"{url}/model", cache=tmp_path_factory.mktemp("other"))


def test_faults_between_a_trainer_and_a_server_are_healed_or_named(bucket, tmp_path_factory):
    url, server = bucket
    one = Trainer()

    def publish():
        io.publish(url, one.engine, one.state, one.touched, one.export, deltas=2, keep=1)

    def published():
        return [each.name for each in publications(store.place_of(url))]

    faults = itertools.cycle(["reset", "delay", "cut", "lose", 429, 503])
    server.rule = lambda method, path, body: next(faults) if len(server.seen) % 5 == 3 else None
    publish()
    one.check(served := io.follow(url, cache=tmp_path_factory.mktemp("cache")))
    one.train(np.arange(8))
    publish()
    served.poll()
    one.check(served)
    there = published()
    one.train(np.arange(8) + 3)
    server.rule = lambda *_: 403
    for action in (publish, served.poll):
        with pytest.raises(OSError, match=r"://bucket/.*expected an answer"):
            action()
    server.rule = lambda method, path, body: 403 if method in ("PUT", "POST") else None
    with pytest.raises(OSError, match=r"://bucket/.*(403|PERMISSION|denied)"):
        publish()
    server.rule = lambda *_: None
    assert published() == there
    assert served.poll() == served.version != one.touched.version(one.state)
    publish()
    server.rule = lambda method, path, body: "flip" if "values" in path else None
    with pytest.raises((OSError, ValueError), match="://bucket/"):
        served.poll()
    server.rule = lambda *_: None
    served.poll()
    one.check(served)
    assert published() == ["00000003-full"]  # and all that it makes superfluous is gone
    assert all("00000003" in name for name in store.place_of(url).names())


def test_a_model_is_downloaded_once_at_a_time(bucket, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(store, "_BLOCK", 2)  # bytes of a file that are in memory at a time
    url, server = bucket
    how, root = begun(f"{url}/model")
    for name in ("a", "b", "c"):
        (root / name).put(5 * name.encode())
    how.finish(root, [root.written])
    cache, meanwhile = tmp_path_factory.mktemp("cache"), []

    def load():
        return download(find(f"{url}/model"), cache)

    with ThreadPoolExecutor() as pool:

        def rule(method, path, body):
            if "model~one" in path and not meanwhile:
                meanwhile.append(pool.submit(load))
                wait(meanwhile, 0.3)

        server.rule = rule
        assert load() == meanwhile[0].result()
    found = {one.name: one.read_bytes() for one in load().iterdir()}
    assert found == {"a": b"aaaaa", "b": b"bbbbb", "c": b"ccccc"}


@pytest.mark.parametrize("name", ["../a", "/tmp/a", "b/../../a"])
def test_a_commit_leads_nowhere_else(bucket, name):
    url, _ = bucket
    how, root = begun(f"{url}/model")
    how.finish(root, [{f"{root.key}/{name}": [0, 0]}])
    with pytest.raises(ValueError, match="expected names that lead nowhere else"):
        find(f"{url}/model")
