"""`measure` and `best`: numbers of one's own, the best evaluation, and the end of patience."""

import functools

import jax
import numpy as np
import pytest
from fit_cases import engine, full_engine, run, steps_in, table, trained
from loop_cases import batches, left_by, loss_of_tables, of_items

from tpu_embed.io import CheckpointManager
from tpu_embed.loop import Best


@functools.cache
def table_after(step):
    return table(trained(of_items(step)))


# -- numbers of one's own ------------------------------------------------------------------------


def test_what_is_measured_stands_in_the_evaluation():
    calls, reports = [], []

    def measure(report):
        calls.append((report.step, report.evaluation and sorted(report.evaluation)))
        return {"rows": np.float32(table(report).size), "step": report.step}

    options = {"measure": measure, "callback": reports.append, "report_every": 5}
    trained(of_items(12), evaluate_every=8, evaluation=list(of_items(1)), **options)
    assert calls == [(8, ["loss"]), (12, ["loss"])]
    seen = [(report.step, report.evaluation and sorted(report.evaluation)) for report in reports]
    measured = ["loss", "rows", "step"]
    assert seen == [(5, None), (8, measured), (10, None), (12, measured)]
    assert reports[1].evaluation["rows"] == 80
    assert trained(measure=measure).evaluation == {"rows": 80, "step": 6}


BEST, EVALUATION = Best("loss", "min"), {"evaluation": list(of_items(1))}


REFUSED = {
    "fit: measure: expected a function, got int": {"measure": 3},
    "measure returned: expected a dictionary of named numbers": {"measure": lambda report: 3},
    r"does not have, \['loss'\], got \['loss'\]": {"measure": lambda _: {"loss": 1}} | EVALUATION,
    r"fit: best: expected a Best, got 'loss'; such as .*Best\(": {"best": "loss"},
    "fit: best: expected evaluate_every= beside it": {"best": BEST},
    "fit: best: expected directory= beside it": {"best": BEST, "evaluate_every": 2} | EVALUATION,
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises((TypeError, ValueError), match=words):
        trained(**REFUSED[words])
    for mode, patience, said in (("most", 1, "mode: expected 'max' | 'min'"), ("min", 0, "pat")):
        with pytest.raises(ValueError, match=f"Best: {said}"):
            Best("loss", mode, patience)


def test_a_number_that_no_evaluation_has_is_refused_and_the_run_is_saved(tmp_path):
    options = {"directory": tmp_path, "evaluate_every": 2, "measure": lambda report: {"ndcg": 1}}
    with pytest.raises(ValueError, match=r"expected one of .'ndcg'., got 'ndgc'; did you mean"):
        trained(best=Best("ndgc", "max"), **options)
    assert steps_in(tmp_path) == [2]


# -- the best ------------------------------------------------------------------------------------


def scores(*values):
    """Return a `measure` with a score for each evaluation, at every second step."""
    return lambda report: {"score": values[report.step // 2 - 1]}


NAN = float("nan")
CASES = {  # scores of steps 2, 4, …; mode, patience: the best step, and the last one
    "in the middle": ((3, 4, 6, 5, 5, 5), "max", None, 6, 12),
    "the last": ((3, 2, 1, 3, 3, 0), "min", None, 12, 12),
    "as good is no better": ((3, 3, 3, 3, 3, 3), "max", None, 2, 12),
    "patience": ((3, 2, 2.5, 1, 1, 1), "min", 2, 8, 12),
    "patience ends": ((3, 4, 1, 1, 9, 9), "max", 2, 4, 8),
    "NaN is never better": ((NAN, 1, NAN, 0, 0, 0), "max", None, 4, 12),
    "nothing but NaN": ((NAN,) * 6, "max", 3, None, 6),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(3)
def test_the_report_is_that_of_the_best_step(case, tmp_path):
    values, mode, patience, best, last = CASES[case]
    reports = []
    options = {"measure": scores(*values), "best": Best("score", mode, patience)}
    options |= {"callback": reports.append, "directory": tmp_path, "evaluate_every": 2}
    options |= {"save_every": 5, "keep": 1}
    report = trained(of_items(12), **options)
    assert report.step == (best or last)
    np.testing.assert_array_equal(table(report), table_after(report.step))
    assert reports[-1].step == last
    same = next(each for each in reports if each.step == report.step)
    for name in ("loss", "metrics", "evaluation"):
        np.testing.assert_equal(getattr(report, name), getattr(same, name))
    assert steps_in(tmp_path) == sorted({best or last, last})
    again = trained([], **options | {"steps": last if patience is None else None})
    assert again.step == report.step
    np.testing.assert_array_equal(table(again), table(report))


def test_a_run_in_two_calls_ends_with_what_the_best_step_left(tmp_path):
    """A network, a dynamic vocabulary, a table on the host."""
    expected = left_by(full_engine(), run(None, steps=4))
    options = {"best": Best("score", "max", patience=2), "measure": scores(1, 5, 4, 2, 2, 2)}
    options |= {"evaluate_every": 2, "save_every": 3, "keep": 1}
    for steps in (7, 12):  # one of the two that patience allows is in the first call
        report = run(tmp_path, batches(12), steps=steps, **options)
        assert (report.step, report.evaluation) == (4, {"score": 5})
    jax.tree.map(np.testing.assert_array_equal, left_by(full_engine(), report), expected)
    assert steps_in(tmp_path) == [4, 8]


def test_only_an_evaluation_of_the_same_number_ends_the_patience(tmp_path):
    """Not a report without one, in a run that goes on after its patience had ended."""
    options = {"evaluate_every": 2, "directory": tmp_path, "report_every": 1}
    options["measure"] = lambda report: {"score": -report.step, "other": report.step}
    for name, steps, last in (("score", 12, 6), ("score", 11, 8), ("other", 10, 10)):
        reports = []
        best = Best(name, "max", patience=2)
        trained(of_items(12), steps=steps, best=best, callback=reports.append, **options)
        assert reports[-1].step == last


def test_losses_that_are_not_finite_can_be_recorded(tmp_path):
    def loss(activations, wanted):
        return loss_of_tables(activations, wanted) * np.nan, {"far": wanted.sum() * np.inf}

    options = {"directory": tmp_path, "evaluate_every": 2, "on_nonfinite": "continue", "steps": 4}
    options |= {"measure": scores(2, 1), "best": Best("score", "max")}
    for _ in range(2):
        report = trained(loss=loss, **options)
        assert (report.step, report.metrics) == (2, {"far": np.inf})
        assert np.isnan(report.loss)


def test_a_measure_that_raises_ends_the_run_which_then_goes_on(tmp_path):
    options = {"evaluate_every": 2, "best": Best("score", "max"), "directory": tmp_path}

    def broken(report):
        return {"score": 1 / (report.step - 4)}

    with pytest.raises(ZeroDivisionError) as error:
        trained(measure=broken, **options)
    assert error.value.__notes__ == [f"fit: {tmp_path} has step 4; the same call goes on from it."]
    report = trained(of_items(12), measure=scores(9, 9, 1, 2, 3, 0), **options)
    assert (report.step, report.evaluation) == (10, {"score": 3})


def test_a_best_checkpoint_that_was_removed_is_forgotten(tmp_path):
    options = {"evaluate_every": 2, "best": Best("score", "max"), "directory": tmp_path}
    options["measure"] = scores(1, 9, 2, 3, 4, 3)
    trained(steps=6, **options)
    with CheckpointManager(tmp_path, engine()) as manager:
        manager.remove(4)
    assert trained(of_items(12), **options).step == 10
