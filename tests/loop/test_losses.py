"""A loss that is not finite ends a run, and nothing that it made is saved."""

import itertools

import numpy as np
import pytest
from fit_cases import steps_in, table, trained
from loop_cases import loss_of_tables, mesh, of_items

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, fit
from tpu_embed.optimizers import SGD


def source(bad, read=None):
    """Yield batches without an end, of which the one of step `bad` makes the loss NaN."""
    for step in itertools.count(1):
        if read is not None:
            read.append(step)
        ((ids, wanted),) = of_items(1)
        yield ids, np.full(8, np.nan, np.float32) if step == bad else wanted


WORDS = r"fit: loss of step 5: expected a finite number, got nan; .*on_nonfinite=.continue"


@pytest.mark.parametrize("depth", [1, 3])
def test_it_ends_the_run_at_most_depth_steps_later(depth):
    read = []
    with pytest.raises(FloatingPointError, match=WORDS):
        trained(source(5, read), depth=depth)
    assert 5 <= len(read) <= 5 + depth + depth  # steps that followed, and what was placed ahead


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_last_checkpoint_is_from_before_it(every, tmp_path):
    with pytest.raises(FloatingPointError, match=WORDS) as error:
        trained(source(5), directory=tmp_path, save_every=every, keep=None)
    before = [step for step in range(1, 5) if step % every == 0]
    assert steps_in(tmp_path) == before
    last = f"has step {before[-1]}; the same call goes on" if before else "there is no checkpoint"
    assert last in error.value.__notes__[-1]
    assert trained(source(0), directory=tmp_path, steps=8).step == 8


def failing():
    yield from itertools.islice(source(5), 5)
    raise OSError("disk gone")


@pytest.mark.parametrize("how", ["report", "end", "error"])
def test_whatever_comes_first_its_state_is_neither_reported_nor_saved(how, tmp_path):
    """The loss of step 5 is not looked at yet when the run is reported, ends, or fails."""
    options = {"report": {"report_every": 5}, "end": {"steps": 5}, "error": {}}[how]
    given, reports = failing() if how == "error" else source(5), []
    with pytest.raises((FloatingPointError, OSError)) as error:
        trained(given, directory=tmp_path, depth=9, callback=reports.append, **options)
    assert "loss of step 5" in " ".join([str(error.value), *error.value.__notes__])
    assert reports == []
    assert steps_in(tmp_path) == []


def test_continue_goes_on():
    reports = []
    options = {"on_nonfinite": "continue", "report_every": 1, "callback": reports.append}
    assert trained(source(2), steps=4, **options).step == 4
    assert [bool(np.isfinite(report.loss)) for report in reports] == [True, False, False, False]
    with pytest.raises(ValueError, match=r"expected 'stop' \| 'continue', got 'skip'"):
        trained(source(0), on_nonfinite="skip")


def test_with_skip_the_tables_are_those_without_the_step():
    """As the message proposes."""
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    made = EmbeddingEngine({"item": item}, SGD(0.5), mesh=mesh(2), on_bad_gradient="skip")
    options = {"on_nonfinite": "continue", "progress": False}
    found = made.tables(fit(made, loss_of_tables, source(2), steps=3, **options).state)["item"]
    np.testing.assert_array_equal(found, table(trained(source(0), steps=2)))
