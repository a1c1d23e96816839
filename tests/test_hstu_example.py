"""The HSTU example: candidates of a request, its export, losses, ranks, a small run."""

import itertools
import types

import jax
import numpy as np
import pytest
from example_cases import ROOT, load_from, numbers, run
from flax import nnx

from tpu_embed import Jagged, TableConfig
from tpu_embed.io import export_model, load_model

ITEMS, D = 600, 8


@pytest.mark.whole
def test_500_candidates_in_one_call_are_500_calls(monkeypatch, tmp_path):
    ranker = load_from("hstu", "ranker", monkeypatch)
    network = ranker.Ranker(2, D, 2, longest=64, buckets=8, block=32, rngs=nnx.Rngs(0))
    for layer in network.stack.layers:  # biases matter as soon as they are trained
        for bias in (layer.position_bias, layer.time_bias):
            bias[...] = jax.random.normal(jax.random.key(bias[...].shape[1]), bias[...].shape)
    features = ranker.feature_config(TableConfig(ITEMS, D, name="items"))
    rng = np.random.default_rng(0)
    tables = {"items": rng.normal(size=(ITEMS, D)).astype(np.float32)}
    seen = np.full((1, 40), -1, np.int32)
    seen[0, :37] = rng.integers(ITEMS, size=37)
    times, now = np.sort(rng.integers(900, size=(1, 40))).astype(np.int32), np.int32([1000])
    candidates = rng.permutation(ITEMS)[None, :500].astype(np.int32)
    options, found = {"inputs": (times, now), "batch": 1, "platforms": "cpu"}, []
    for calls in ([candidates], candidates[0][:, None, None]):
        ids, path = {"history": seen, "candidates": calls[0]}, tmp_path / f"{len(calls)}"
        export_model(path, ranker.served(network), tables, features, ids, **options)
        served = load_model(path)
        logits = [served(ids | {"candidates": call}, times, now) for call in calls]
        found.append(np.concatenate(logits, axis=1))
    assert found[0].shape == (1, 500)
    assert np.std(found[0]) > 0.1
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.whole
def test_a_log_becomes_a_served_model(tmp_path):
    out = run("hstu/from_log.py", cwd=tmp_path)
    assert len(numbers(r"(\d+)", out.rsplit(":", 1)[1])) == 10


def test_the_loss_of_a_request_does_not_depend_on_others(monkeypatch):
    """Logits of 300 less than another request's, whose exponentials would be 0 beside those."""
    ranker = load_from("hstu", "ranker", monkeypatch)
    logits = np.array([1.0, 2, 4, -300, -301, 7, 50, 90], np.float32)  # the last two are no one's
    splits, chosen = np.array([0, 3, 5, 6], np.int32), np.array([1, 0, 0], np.int32)

    def total(values):
        losses = ranker.listwise_losses(Jagged(values, splits), chosen)
        return losses.sum(), losses

    slopes, losses = jax.grad(total, has_aux=True)(jax.numpy.asarray(logits))
    expected, wanted = [], np.zeros(8)
    for (begin, end), one in zip(itertools.pairwise(splits), chosen, strict=True):
        exact = np.exp(logits[begin:end].astype(np.float64))
        wanted[begin:end] = exact / exact.sum()
        expected.append(-np.log(wanted[begin + one]))
        wanted[begin + one] -= 1
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    np.testing.assert_allclose(slopes, wanted, atol=1e-6)


def test_held_out_films_are_ranked_among_the_unseen(monkeypatch):
    """User 0 has seen films 0 and 1, user 1 film 2; 2 and 0 are held out."""
    next_film = load_from("hstu", "next_film", monkeypatch)
    columns = {"user": [0, 0, 0, 1, 1], "item": [0, 1, 2, 2, 0], "timestamp": [1, 2, 3, 1, 2]}
    data = types.SimpleNamespace(**{name: np.array(x) for name, x in columns.items()})
    scores = np.array([[9, 8, 1, 5, 4], [3, 2, 9, 1, 0]], np.float32)
    recall, ndcg = next_film.Histories(data, 8).measure(scores)
    assert recall == 1
    np.testing.assert_allclose(ndcg, (1 / np.log2(4) + 1) / 2, rtol=1e-6)  # places 2 and 0


SMALL = """
items, steps, every, tested, batch_size = 10, 60, 20, 50, 8
longest, block, dim, heads, layers = 32, 16, 16, 2, 1
"""


@pytest.mark.whole
def test_planted_sessions_are_learned(tmp_path):
    config = tmp_path / "small.py"
    config.write_text((ROOT / "configs" / "hstu_sessions.py").read_text() + SMALL)
    out = run("hstu/planted_sessions.py", "--devices", 8, "--config", config, cwd=tmp_path)
    for name in ("with times", "without times"):
        shares = numbers(rf"{name}  step .*, (\S+) of", out)
        assert len(shares) == 3
        assert shares[0] < shares[-1] < 1
    assert (tmp_path / "build" / "hstu_sessions.png").stat().st_size > 1000
