"""`measure` and `best`: numbers of one's own, the best evaluation, and the end of patience."""

import functools

import numpy as np
import pytest
from flax import nnx
from loop_cases import (
    DENSE,
    Network,
    batches,
    left_by,
    loss_of_network,
    loss_of_tables,
    make_engine,
    of_items,
    plain_engine,
)

from tpu_embed import FeatureConfig, TableConfig, fit
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.io import CheckpointManager
from tpu_embed.loop import Best
from tpu_embed.optimizers import SGD


@functools.cache
def engine():
    return plain_engine()


def trained(source=None, **options):
    source = of_items(12) if source is None else source
    return fit(engine(), loss_of_tables, source, **{"progress": False} | options)


def table(report):
    return np.asarray(engine().tables(report.state)["item"])


@functools.cache
def table_after(step):
    return table(trained(steps=step))


def steps_in(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


# -- numbers of one's own ------------------------------------------------------------------------


def test_what_is_measured_stands_in_the_evaluation():
    calls, reports = [], []

    def measure(report):
        calls.append((report.step, report.evaluation and sorted(report.evaluation)))
        return {"rows": np.float32(table(report).size), "step": report.step}

    options = {"measure": measure, "callback": reports.append, "report_every": 5}
    trained(evaluate_every=8, evaluation=list(of_items(1)), **options)
    assert calls == [(8, ["loss"]), (12, ["loss"])]
    seen = [(report.step, report.evaluation and sorted(report.evaluation)) for report in reports]
    assert seen == [
        (5, None),
        (8, ["loss", "rows", "step"]),
        (10, None),
        (12, ["loss", "rows", "step"]),
    ]
    assert reports[1].evaluation["rows"] == 80
    alone = trained(measure=measure)
    assert alone.evaluation == {"rows": 80, "step": 12}


def test_some_features_are_enough_to_measure():
    """Without another engine, and without a copy of a table."""
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    made = EmbeddingEngine({"item": item, "wide": FeatureConfig(TableConfig(9, 2))}, SGD(0.5))
    source = [({"item": np.arange(8), "wide": np.arange(8)}, np.ones(8, np.float32))] * 2

    def measure(report):
        batch = made.place({"item": np.arange(8)}, training=False)
        return {"sum": made.lookup(report.state, batch)["item"].sum()}

    report = fit(made, loss_of_tables, source, measure=measure, progress=False)
    expected = made.tables(report.state)["item"][:8].sum()
    np.testing.assert_allclose(report.evaluation["sum"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": 3}, "fit: measure: expected a function, got int"),
        ({"measure": lambda report: 3}, "measure returned: expected a dictionary of named numbers"),
        ({"measure": lambda report: {"x": "a"}}, "a dictionary of named numbers, got {'x': 'a'}"),
        (
            {"measure": lambda report: {"loss": 1}, "evaluation": list(of_items(1))},
            r"names that evaluation= does not have, \['loss'\], got \['loss'\]",
        ),
        ({"best": "loss"}, r"fit: best: expected a Best, got 'loss'; such as .*Best\("),
        ({"best": Best("loss", "min")}, "fit: best: expected evaluate_every= beside it"),
        (
            {"best": Best("loss", "min"), "evaluate_every": 2, "measure": lambda report: {}},
            "fit: best: expected directory= beside it",
        ),
    ],
)
def test_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        trained(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mode": "most"}, "Best: mode: expected 'max' | 'min'"), ({"patience": 0}, "Best: patience")],
)
def test_a_best_of_other_words_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Best(**{"name": "loss", "mode": "min"} | options)


def test_a_number_that_no_evaluation_has_is_refused_and_the_run_is_saved(tmp_path):
    options = {"directory": tmp_path, "evaluate_every": 2, "measure": lambda report: {"ndcg": 1}}
    with pytest.raises(
        ValueError, match=r"best: expected one of .'ndcg'., got 'ndgc'; did you mean"
    ):
        trained(best=Best("ndgc", "max"), **options)
    assert steps_in(tmp_path) == [2]


# -- the best ------------------------------------------------------------------------------------


def scores(*values, every=2):
    """Return a `measure` with a score for each evaluation."""
    return lambda report: {"score": values[report.step // every - 1]}


NAN = float("nan")
CASES = {  # scores of steps 2, 4, …; mode, patience: the best step, and the last one
    "the first": ((3, 2, 1, 0, 0, 0), "max", None, 2, 12),
    "in the middle": ((3, 4, 6, 5, 5, 5), "max", None, 6, 12),
    "the last": ((3, 2, 1, 3, 3, 0), "min", None, 12, 12),
    "as good is no better": ((3, 3, 3, 3, 3, 3), "max", None, 2, 12),
    "patience": ((3, 2, 2.5, 1, 1, 1), "min", 2, 8, 12),
    "patience ends": ((3, 4, 1, 1, 9, 9), "max", 2, 4, 8),
    "NaN is never better": ((NAN, 1, NAN, 0, 0, 0), "max", None, 4, 12),
    "nothing but NaN": ((NAN,) * 6, "max", 3, None, 6),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(5)
def test_the_report_is_that_of_the_best_step(case, tmp_path):
    values, mode, patience, best, last = CASES[case]
    reports = []
    options = {
        "measure": scores(*values),
        "evaluate_every": 2,
        "best": Best("score", mode, patience),
    }
    options |= {"callback": reports.append, "save_every": 5, "keep": 1, "directory": tmp_path}
    report = trained(**options)
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
    made = make_engine()
    model = {"model": Network(nnx.Rngs(0)), "optimizer": DENSE, "progress": False}
    undisturbed = fit(made, loss_of_network, batches(4), **model)
    expected = left_by(made, undisturbed)
    model |= {"best": Best("score", "max", patience=2), "measure": scores(1, 5, 4, 2, 2, 2)}
    model |= {"evaluate_every": 2, "save_every": 3, "keep": 1, "directory": tmp_path}
    for steps in (7, 12):  # one of the two that patience allows is in the first call
        report = fit(made, loss_of_network, batches(12), steps=steps, **model)
        assert (report.step, report.evaluation) == (4, {"score": 5})
    for found, one in zip(left_by(made, report), expected, strict=True):
        np.testing.assert_array_equal(found, one)
    assert steps_in(tmp_path) == [4, 8]


def test_only_an_evaluation_of_the_same_number_ends_the_patience(tmp_path):
    """Not a report without one, in a run that goes on after its patience had ended."""
    options = {"evaluate_every": 2, "directory": tmp_path, "report_every": 1}
    options["measure"] = lambda report: {"score": -report.step, "other": report.step}
    for name, steps, last in (("score", 12, 6), ("score", 11, 8), ("other", 10, 10)):
        reports = []
        best = Best(name, "max", patience=2)
        trained(steps=steps, best=best, callback=reports.append, **options)
        assert reports[-1].step == last


def test_losses_that_are_not_finite_can_be_recorded(tmp_path):
    def loss(activations, wanted):
        return loss_of_tables(activations, wanted) * np.nan, {"far": wanted.sum() * np.inf}

    options = {"directory": tmp_path, "evaluate_every": 2, "on_nonfinite": "continue", "steps": 4}
    options |= {"measure": scores(2, 1), "best": Best("score", "max")}
    for _ in range(2):
        report = fit(engine(), loss, of_items(12), progress=False, **options)
        assert (report.step, report.metrics) == (2, {"far": np.inf})
        assert np.isnan(report.loss)


def test_a_measure_that_raises_ends_the_run_which_then_goes_on(tmp_path):
    options = {"evaluate_every": 2, "best": Best("score", "max"), "directory": tmp_path}

    def broken(report):
        return {"score": 1 / (report.step - 4)}

    with pytest.raises(ZeroDivisionError) as error:
        trained(measure=broken, **options)
    assert error.value.__notes__ == [f"fit: {tmp_path} has step 4; the same call goes on from it."]
    report = trained(measure=scores(9, 9, 1, 2, 3, 0), **options)
    assert (report.step, report.evaluation) == (10, {"score": 3})


def test_a_best_checkpoint_that_was_removed_is_forgotten(tmp_path):
    options = {"evaluate_every": 2, "best": Best("score", "max"), "directory": tmp_path}
    options["measure"] = scores(1, 9, 2, 3, 4, 3)
    trained(steps=6, **options)
    with CheckpointManager(tmp_path, engine()) as manager:
        manager.remove(4)
    assert trained(**options).step == 10
