"""Places in buckets of this machine, behind a proxy that can be told to be faulty."""

import os

import pytest
from bucket_servers import fake_gcs, moto_s3, proxy, set_environment

from tpu_embed.io import store
from tpu_embed.io.commits import committer


@pytest.fixture(scope="module", params=["gs", "s3"])
def upstream(request):
    with (fake_gcs if request.param == "gs" else moto_s3)() as server:
        yield request.param, getattr(server, "server_address", server)


@pytest.fixture
def bucket(upstream, monkeypatch, tmp_path, request):
    """The URL of an empty place in a bucket, and the proxy before its server."""
    scheme, address = upstream
    monkeypatch.chdir(tmp_path)
    quick = {"max_retries": 3, "initial_delay": "10ms", "max_delay": "100ms"}
    monkeypatch.setattr(store, "_RETRIES", quick)
    monkeypatch.setattr(store, "DEADLINE", 20.0)
    with proxy(address) as server:
        set_environment(monkeypatch, scheme, server.server_address)
        yield f"{scheme}://bucket/{abs(hash(request.node.name))}/run", server
    assert not os.listdir(tmp_path)  # nothing is ever written elsewhere


def begun(url, name="one"):
    """Return a committer, and a root that it has begun."""
    how = committer(store.place_of(url))
    root = how.root(name)
    how.begin(root)
    return how, root


def roots(url):
    """Return the names of what is at a place: of its commits and of their parts."""
    return {name.partition("/")[0].partition("~")[0] for name in store.place_of(url).names()}
