"""The example of jagged histories: its network against loops, then a small run."""

import itertools

import jax
import numpy as np
import pytest
from example_cases import ROOT, load, numbers, run, table

from tpu_embed import Jagged

USERS, ITEMS = 32, 40
CONFIG = (ROOT / "configs" / "sequences.py").read_text()
SMALL = "\nbatch_size, epochs, longest, dim, layers, learning_rate = 16, 12, 16, 16, 1, 0.02\n"
LENGTHS = [[4, 0, 1], [3, 4, 2]]  # of 3 histories on each of 2 replicas
LONGEST, HEADS, D = 4, 2, 6


def histories(capacity, seed=0):
    rng = np.random.default_rng(seed)
    splits = np.concatenate([np.zeros((2, 1)), np.cumsum(LENGTHS, 1)], 1).astype(np.int32)
    return Jagged(rng.normal(size=(2, capacity, D)).astype(np.float32), splits)


@pytest.mark.parametrize("capacity", [9, 12, 18])
@pytest.mark.quick(1)
def test_attention_is_that_of_a_loop(monkeypatch, capacity):
    """Blocks of 4 events: histories lie in one block or in two, and the last block is not full."""
    model = load("sequences_model", monkeypatch)
    query, key, value = (histories(capacity, seed) for seed in range(3))
    bias = np.random.default_rng(3).normal(size=(HEADS, LONGEST)).astype(np.float32)

    def of_replica(query, key, value):
        heads = [x.values.reshape(capacity, HEADS, -1) for x in (query, key, value)]
        return model.attend(*heads, query.segment_ids, bias)

    found = jax.jit(jax.vmap(of_replica))(query, key, value)
    given = [np.float64(x.values.reshape(2, capacity, HEADS, -1)) for x in (query, key, value)]
    for s, h in np.ndindex(2, HEADS):
        q, k, v = (x[s, :, h] for x in given)
        for begin, end in itertools.pairwise(query.row_splits[s]):
            for i in range(begin, end):
                scores = {j: q[i] @ k[j] + bias[h, i - j] for j in range(begin, i + 1)}
                mixed = sum(x / (1 + np.exp(-x)) * v[j] for j, x in scores.items()) / LONGEST
                # Sums of at most 4 products of 3, in float32.
                np.testing.assert_allclose(found[s, i, h], mixed, atol=2e-6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return histories of 8 to 23 of 40 items, each the 7th after the one before, in a circle."""
    path = tmp_path_factory.mktemp("ml")
    rng = np.random.default_rng(0)
    events = [
        (user + 1, 1 + (start + 7 * k) % ITEMS, 3, 880_000_000 + k)
        for user, start in enumerate(rng.integers(ITEMS, size=USERS))
        for k in range(8 + user // 2)
    ]
    table(path / "ml-100k.inter", "user\titem\trating\ttimestamp", events, "\t")
    items = [(i + 1, f"Title {i}", 1950, "Drama") for i in range(ITEMS)]
    table(path / "ml-100k.item", "item\ttitle\tyear\tclass", items, "\t")
    users = [(u + 1, 30, "F", "writer", 0) for u in range(USERS)]
    table(path / "ml-100k.user", "user\tage\tgender\toccupation\tzip", users, "\t")
    return path


@pytest.mark.whole
def test_hstu_learns_as_well(directory, tmp_path):
    config = tmp_path / "small.py"
    numbers_of_hstu = (ROOT / "configs" / "hstu.py").read_text()
    config.write_text(numbers_of_hstu + SMALL + "\nblock, batch_size = 16, 8\n")
    arguments = ("--devices", 8, "--data", directory, "--config", config, "--seeds", 1)
    out = run("hstu/next_film.py", *arguments, cwd=tmp_path)
    ndcgs = numbers(r"HSTU  seed.*NDCG@10 (\S+)", out)
    assert len(ndcgs) == 12
    assert ndcgs[-1] > 0.8
    assert len(numbers(r"sequences\.py  seed.*NDCG@10 (\S+)", out)) == 8  # by its own config
    assert (tmp_path / "build" / "hstu.png").stat().st_size > 1000


@pytest.mark.whole
def test_sequences_learns_the_same_on_1_and_8_devices(directory, tmp_path):
    config = tmp_path / "small.py"
    config.write_text(CONFIG + SMALL)
    curves = []
    for devices in (1, 8):
        arguments = ("--devices", devices, "--data", directory, "--config", config)
        out = run("sequences.py", *arguments, cwd=tmp_path)
        assert f"{devices} device(s)" in out
        curves.append((numbers(r"loss (\S+)", out), numbers(r"NDCG@10 (\S+)", out)))
    losses, ndcgs = curves[0]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert len(ndcgs) == 13  # of popularity, then of every epoch
    assert ndcgs[0] < 0.5 < 0.9 < ndcgs[-1]
    # Sums over the batch are in another order: Adam's steps differ in their last digits.
    np.testing.assert_allclose(losses, curves[-1][0], atol=1e-3)
