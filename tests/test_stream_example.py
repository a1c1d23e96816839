"""The example of items that come and go: its stream, its measure, its scores, then a small run."""

import jax
import numpy as np
import pytest
from example_cases import ROOT, config_of, load, numbers, run

from tpu_embed import DynamicVocabulary

CONFIG = (ROOT / "configs" / "stream.py").read_text()
SMALL = """
batches, births, lifetime, window = 120, 20, 30, 40
batch_size, users, rows = 512, 50, 300
"""


@pytest.fixture(scope="module")
def config():
    return config_of(CONFIG + SMALL)


def test_scores_are_those_of_a_lookup_before_the_training(config, monkeypatch):
    """An item without a row is a zero row, as is one that has just got its row."""
    stream = load("stream_data", monkeypatch).Stream(config)
    model = load("stream_model", monkeypatch)
    learner = model.Learner(config, DynamicVocabulary(admit_after=config.admit_after))

    @jax.jit
    def score(state, batch):
        return model.logits(learner.engine.lookup(state, batch))

    learner.check(stream.batch(5))  # which is not learned, and gives no item a row
    for number in range(4):
        batch = stream.batch(number)
        placed = learner.engine.place(learner.features(batch), training=False)
        expected = np.asarray(score(learner.state, placed))
        # Another program, in which sums of 16 products may be rounded differently.
        np.testing.assert_allclose(learner.learn(batch), expected, atol=1e-6)
    assert learner.engine.vocabularies.counters["items"]["admitted"] > 0
    assert int(learner.state.step) == 4


@pytest.mark.whole
def test_a_living_vocabulary_learns_more_than_hashed_rows_on_1_and_8_devices(tmp_path):
    config = tmp_path / "small.py"
    config.write_text(CONFIG + SMALL)
    printed = []
    for devices in (1, 8):
        out = run("stream.py", "--devices", devices, "--config", config, cwd=tmp_path)
        header, *lines, _, _ = out.splitlines()  # at last the seconds, and where the picture is
        assert header == f"{devices} device(s), 3000 items, 300 rows"
        printed.append(lines)
    assert printed[0] == printed[-1]
    text = "\n".join(printed[0])
    living, hashed, best = (numbers(rf"(\S+) {n}", text) for n in ("living", "hashed", "true"))
    assert len(living) == 4  # of three windows, then of all batches
    assert (hashed > 0.5).all()
    assert (hashed[2:] + 0.01 < living[2:]).all()  # after the first windows
    assert (living < best).all()
    admitted, evicted, unseen = (numbers(rf"(\d+) {n}", text) for n in ("adm", "evi", "uns"))
    np.testing.assert_array_equal(admitted - evicted, 300)  # all rows are taken
    assert (np.diff(unseen) > 0).all()
    assert (tmp_path / "build" / "stream.png").stat().st_size > 1000
