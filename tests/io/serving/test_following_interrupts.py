"""Ctrl-C anywhere in a model that follows: it answers, and follows the next time."""

import numpy as np
import pytest
from interrupt_cases import Interrupt, ends_within, from_a_signal
from keyed_cases import Keyed, export, table, version, write_delta

from tpu_embed import FeatureConfig, io

CONFIG = table("t", size=8, dim=2)
FEATURES, GIVEN = {"x": FeatureConfig(CONFIG)}, {"x": np.arange(4)}
DELTAS = 30


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a model, and the deltas that follow it: all rows are the number of the version."""
    root, keyed = tmp_path_factory.mktemp("published"), Keyed(CONFIG)
    keyed.rows = {key: np.zeros(2, np.float32) for key in range(4)}
    model, deltas = export(root / "model", [keyed], FEATURES, GIVEN), []
    for step in range(1, DELTAS + 1):
        said = keyed.change(range(4), [])
        said.arrays["values"][:] = step
        deltas.append(write_delta(root / f"{step}", version(step - 1), version(step), {"t": said}))
    return model, deltas


def in_following(code):
    return code.co_filename.endswith("io/serving/following.py")


def numbers(served):
    return set(np.asarray(served(GIVEN)["x"]).ravel().tolist())


def test_of_calls(published):
    """The deltas that follow wait for no call that was interrupted."""
    model, deltas = published
    served, hit, kept = io.FollowingModel(model), 0, []
    for at in range(1, 200):
        with Interrupt(in_following, at, from_a_signal, only_signals=True) as interrupt:
            try:
                served(GIVEN)
            except KeyboardInterrupt as error:
                kept.append(error)  # as a notebook does, with all frames
        if interrupt.seen < at:
            break
        hit += 1
    with ends_within(60):
        for step, delta in enumerate(deltas[:4], 1):
            served.apply(delta)
            assert numbers(served) == {step}
    assert hit == len(kept) > 8


def test_of_deltas(published):
    model, deltas = published
    served, hit = io.FollowingModel(model), 0
    for at, delta in enumerate(deltas, 1):
        before = version(at - 1)
        with Interrupt(in_following, at, from_a_signal, only_signals=True) as interrupt:
            served.apply(delta)
        hit += interrupt.seen >= at
        assert served.version in (before, version(at))
        assert numbers(served) == {served.version.step}
        with ends_within(60):
            if served.version == before:
                served.apply(delta)
            assert numbers(served) == {at}
    assert 5 < hit < DELTAS, "every place of a call was reached"
