"""The example of DLRMv4's ranker: its log, its network by request, a run that is stopped."""

import types
from unittest import mock

import jax
import numpy as np
import pytest
from example_cases import ROOT, config_of, load_from
from flax import nnx

from tpu_embed import Jagged

CONFIG = (ROOT / "configs" / "days.py").read_text()
SMALL = """
days, first_day, requests, batch_size, shown, longest, block, every = 3, 1, 48, 16, 3, 9, 4, 2
rows = {"item": 40, "artist": 8, "album": 10, "user": 6, "hour": 24}
dim, width, key_dim, value_dim, layers, hidden_size, warm_up = 4, 8, 3, 5, 1, 6, 2
"""


@pytest.fixture(scope="module")
def config():
    return config_of(CONFIG + SMALL)


def test_histories_are_what_a_user_was_shown_before(config, monkeypatch):
    log = load_from("hstu", "drifting_log", monkeypatch).Log(config)
    before = {user: [] for user in range(config.rows["user"])}
    for number in range(config.days):
        day = log.day(number)
        assert (np.diff(day.asked) >= 0).all()
        assert (day.asked // 86_400 == number).all()
        for r, user in enumerate(day.user):
            events = day.history[day.splits[r] : day.splits[r + 1]]
            known = before[user][-config.longest :]
            assert [(log.item[e], log.action[e]) for e in events] == known
            assert (log.time[events] <= day.asked[r]).all()
            actions = np.where(day.listened[r], 1, 4)
            before[user] += list(zip(day.item[r], actions, strict=True))


def test_clicks_are_as_planted_and_tastes_drift(config, monkeypatch):
    module = load_from("hstu", "drifting_log", monkeypatch)
    large = types.SimpleNamespace(**vars(config) | {"requests": 2_000, "days": 4, "drift": 0.9})
    days = [module.Log(large).day(number) for number in range(4)]
    surplus = sum((day.listened - day.probability).sum() for day in days)
    variance = sum((day.probability * (1 - day.probability)).sum() for day in days)
    assert abs(surplus) < 4 * variance**0.5
    # What a user thinks of a track: much the same all day, and hardly related days later.
    liked = [{}, {}]
    for found, day in zip(liked, (days[0], days[3]), strict=True):
        for user, items, chances in zip(day.user, day.item, day.probability, strict=True):
            found |= {(user, i): p for i, p in zip(items, chances, strict=True)}
    both = [(p, liked[1][pair]) for pair, p in liked[0].items() if pair in liked[1]]
    assert len(both) > 100
    assert abs(np.corrcoef(np.transpose(both))[0, 1]) < 0.5


def draw_requests(module, config, lengths, shown, seed=0):
    """Return requests with these numbers of events and candidates, and room for more."""
    rng = np.random.default_rng(seed)
    vectors = len(config.histories) * config.dim

    def jagged(counts):
        splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return Jagged(rng.normal(size=(splits[-1] + 2, vectors)).astype(np.float32), splits)

    history, candidates = jagged(lengths), jagged(shown)
    size = len(lengths), len(config.contexts), config.dim
    contexts = rng.normal(size=size).astype(np.float32)
    actions = rng.integers(0, 8, len(history.values)).astype(np.int32)
    times = np.sort(rng.integers(0, 10**6, len(actions))).astype(np.int32)
    asked = (10**6 + rng.integers(0, 10**5, len(lengths))).astype(np.int32)
    return module.Samples(contexts, history, candidates, actions, times, asked)


def one_request(requests, r, without=None):
    """Return request r alone, and without one of its candidates."""

    def part(jagged, values, dropped=None):
        begin, end = jagged.row_splits[r], jagged.row_splits[r + 1]
        kept = [i for i in range(begin, end) if i - begin != dropped]
        one_more = np.asarray(values)[[*kept, 0]]  # as a capacity is at least 1
        return Jagged(one_more, np.array([0, len(kept)], np.int32))

    history, candidates = requests.history, requests.candidates
    return requests._replace(
        contexts=requests.contexts[r : r + 1],
        history=part(history, history.values),
        candidates=part(candidates, candidates.values, without),
        actions=part(history, requests.actions).values,
        times=part(history, requests.times).values,
        asked=requests.asked[r : r + 1],
    )


@pytest.mark.whole
def test_a_request_is_scored_by_itself_and_so_is_a_candidate(config, monkeypatch):
    module = load_from("hstu", "dlrm_v4_model", monkeypatch)
    network = module.DlrmV4(config, nnx.Rngs(1))
    # With zeros, as they begin, biases and tables would tell nothing of their places.
    state = nnx.state(network, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(2)
    leaves = [x + 0.3 * rng.normal(size=x.shape).astype(x.dtype) for x in leaves]
    nnx.update(network, jax.tree.unflatten(tree, leaves))
    requests = draw_requests(module, config, lengths=[5, 0, 9], shown=[3, 2, 0])
    score = nnx.jit(lambda network, requests: network(requests))
    found, splits = score(network, requests), requests.candidates.row_splits
    for r in (0, 1):
        alone = score(network, one_request(requests, r))[:-1]
        # Sums in another order, of vectors of at most 42 numbers, in float32.
        np.testing.assert_allclose(found[splits[r] : splits[r + 1]], alone, atol=2e-5)
    others = score(network, one_request(requests, 0, without=1))[:-1]
    np.testing.assert_allclose(others, found[np.array([0, 2])], atol=2e-5)
    # And what is known of a request tells: its actions, times, contexts and history.
    for changed in (
        requests._replace(actions=requests.actions ^ 1),
        requests._replace(times=requests.times - 50_000),
        requests._replace(asked=requests.asked + 5_000),
        requests._replace(contexts=requests.contexts[::-1]),
        requests._replace(history=requests.history.with_values(-requests.history.values)),
    ):
        assert abs(score(network, changed)[:3] - found[:3]).max() > 1e-3


def bits(training):
    state, *network = training.trained
    tables, slots = training.engine.tables(state), training.engine.slots(state)
    leaves, _ = jax.tree.flatten_with_path((tables, slots, network, state.step))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.mark.whole
@jax.numpy_dtype_promotion("standard")  # optax asks for it
def test_a_stopped_run_goes_on_to_the_same_bits(config, monkeypatch, tmp_path):
    days = load_from("hstu", "days", monkeypatch)
    whole = days.Training(config, tmp_path / "whole")
    figures = dict(whole.run())
    assert list(figures) == [1, 2]
    for found in figures.values():
        assert 0.5 < found["best AUC"] < 1
        assert found["best normalized entropy"] < 1
    assert whole.position["samples"] == 96

    stopped = days.Training(config, tmp_path / "stopped")
    # Its fifth save is the end of it.
    saves = [stopped.saves.save] * 4 + [mock.Mock(side_effect=RuntimeError("the machine stops"))]
    stopped.saves.save = lambda *given, **options: saves.pop(0)(*given, **options)
    with pytest.raises(RuntimeError, match="the machine stops"):
        dict(stopped.run())
    stopped.saves.close()
    resumed = days.Training(config, tmp_path / "stopped")
    assert resumed.position["samples"] == 64  # of 80: after one batch of the second day
    assert dict(resumed.run()) == {}
    found, expected = bits(resumed), bits(whole)
    assert [name for name, one in expected.items() if found[name] != one] == []
