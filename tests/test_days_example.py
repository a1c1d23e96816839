"""The example of DLRMv4's ranker: its log, its network by request, a run that is stopped."""

from unittest import mock

import jax
import numpy as np
import pytest
from example_cases import ROOT, config_of, load_from

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
