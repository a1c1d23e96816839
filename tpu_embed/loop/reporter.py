"""Reports of a run while it goes on: when they are due, what is in them, and who gets them.

A run is evaluated on a second source, which is read from its beginning each time, or as users do.

Input: a run after each of its steps. Output: reports, to a callback and to the progress line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.data import Prefetcher
from tpu_embed.loop.network import Objective
from tpu_embed.loop.reports import Best, ProgressLine, Report, Window
from tpu_embed.loop.run import Keeper, Run
from tpu_embed.loop.step import make_evaluation_step, take_apart
from tpu_embed.processes import gather_from_all


@dataclasses.dataclass
class Reporter:
    """Makes the reports of a run.

    Args:
      objective: makes the model of a report.
      evaluate: evaluates a run, which it is given with its report; or None.
      best: compares evaluations, or None.
      callback: gets every report, or None.
      steps: of the whole run, or None.
      report_every: how many steps lie between two reports.
      evaluate_every: how many steps lie between two evaluations, or None.
      line: shows the reports.

    Raises:
      TypeError: the callback is no function.
      ValueError: evaluations are due, and there is nothing to evaluate.
    """

    objective: Objective
    evaluate: Callable[[Run, Report], dict[str, float]] | None
    best: Best | None
    callback: Callable[[Report], Any] | None
    steps: int | None
    report_every: int
    evaluate_every: int | None
    line: ProgressLine

    def __post_init__(self) -> None:
        if self.callback is not None and not callable(self.callback):
            refuse(
                "fit: callback",
                expected="a function",
                got=type(self.callback).__name__,
                remedy="it is called with each Report",
                error=TypeError,
            )
        if self.evaluate_every is not None and self.evaluate is None:
            refuse(
                "fit: evaluate_every",
                expected="an evaluation beside it",
                got=f"{self.evaluate_every} alone",
                remedy="give evaluation=, a second source, or measure=, a function",
            )
        self._window = Window()
        self._last: Report | None = None

    def wants_end(self, run: Run, loss: Any, metrics: dict[str, Any]) -> bool:
        """Take in a step, and report if that is due; return whether the run ends with it.

        A callback ends it, or the patience for evaluations that are no better.
        """
        self._window.add(loss, metrics)
        every = self.evaluate_every
        evaluates = every is not None and run.step % every == 0
        if evaluates or run.step % self.report_every == 0:
            return self._report(run, evaluates=evaluates)[1]
        return False

    def finish(self, run: Run) -> Report:
        """Return the report of the last step; make it unless it was made."""
        last, evaluates = self._last, self.evaluate is not None
        if last is None or last.step != run.step or (evaluates and last.evaluation is None):
            last, _ = self._report(run, evaluates=evaluates)
        return last

    def take_best(self, run: Run, keeper: Keeper, last: Report) -> Report:
        """Return the report of the best evaluation, with its state and model, or the last one."""
        if self.best is None or run.best_step in (None, run.step):
            return last
        keeper.take_best(run)
        again = {"state": run.state, "model": self.objective.model_of(run.network, run.state)}
        report = dataclasses.replace(last, steps_per_second=0, **run.best["report"], **again)
        self.line.show(f"the best: {report.line()}")
        return report

    def _report(self, run: Run, *, evaluates: bool) -> tuple[Report, bool]:
        """Report; return the report, and whether the run ends."""
        run.losses.check()
        (means, speed), last = self._window.close(), self._last
        idle = not means and last is None  # the run went on from its end
        if not means and last is not None:  # a second report of one step
            means = {"loss": last.loss, **last.metrics}
        report = Report(
            step=run.step,
            steps=self.steps,
            loss=means.pop("loss", float("nan")),
            metrics=means,
            evaluation=None,
            steps_per_second=speed,
            state=run.state,
            model=self.objective.model_of(run.network, run.state),
        )
        over = False
        if evaluates and self.evaluate is not None:
            report = dataclasses.replace(report, evaluation=self.evaluate(run, report))
            if self.best is not None:
                run.best = self.best.compare(run.best, report)
                over = self.best.is_over(run.best)
        self._last, self._window = report, Window()  # whose time begins now
        self.line.show(report.line(idle=idle))
        answer = None if self.callback is None else self.callback(report)
        return report, over or answer is True or (isinstance(answer, np.bool_) and bool(answer))


WHAT = "fit: evaluation"


def make_evaluate(
    engine: EmbeddingEngine,
    objective: Objective,
    source: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    measure: Callable[[Report], Any] | None,
    *,
    weighted: bool,
    depth: int,
) -> Callable[[Run, Report], dict[str, float]] | None:
    """Return a function that evaluates a run, which it is given with its report.

    It raises what the batches, the loss or `measure` raise, and `ValueError` if the source has no
    batch. None without a source and without `measure`.

    Raises:
      TypeError: the source is neither an iterable nor a function, or `measure` is no function.
      ValueError: the source can be read only once.
    """
    if measure is not None and not callable(measure):
        refuse(
            "fit: measure",
            expected="a function",
            got=type(measure).__name__,
            remedy="it is called with a Report",
            error=TypeError,
        )
    if source is None:
        return None if measure is None else lambda _, report: _measured(measure, report)
    got = type(source).__name__
    if not callable(source) and not isinstance(source, Iterable):
        refuse(
            WHAT, expected="an iterable, or a function that returns one", got=got, error=TypeError
        )
    if isinstance(source, Prefetcher) or (not callable(source) and iter(source) is source):
        refuse(
            WHAT,
            expected="what can be read several times",
            got=f"{got}, which can be read once",
            remedy="give the function that makes it, such as functools.partial(batches, path)",
        )
    step = make_evaluation_step(engine, objective)

    def evaluate(run: Run, report: Report) -> dict[str, float]:
        found, begun = Window(), source() if callable(source) else source
        number = np.int32(run.step) if objective.keywords else None
        with Prefetcher(engine, begun, depth, weighted=weighted, training=False) as batches:
            for item in batches:
                batch, rest = take_apart(engine, item)
                found.add(*step(run.state, run.network, batch, rest, number))
                found.wait(depth)
        if not found.count:
            refuse(
                WHAT,
                expected="at least one batch",
                got="none",
                remedy="a function that returns an iterator must make a new one in each call",
            )
        means = found.means()
        if measure is None:
            return means
        return means | _measured(measure, dataclasses.replace(report, evaluation=means))

    return evaluate


def _measured(measure: Callable[[Report], Any], report: Report) -> dict[str, float]:
    """Return the numbers that a user's function returns; in all processes those of the first.

    Raises:
      TypeError: it did not return named numbers.
      ValueError: one has the name of a number that the report has.
    """
    found, known, what = measure(report), report.evaluation or {}, "fit: what measure returned"
    try:
        numbers = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        refuse(
            what,
            expected="a dictionary of named numbers",
            got=repr(found),
            error=TypeError,
            cause=error,
        )
    if numbers.keys() & known.keys():
        refuse(
            what,
            expected=f"names that evaluation= does not have, {sorted(known)}",
            got=f"{sorted(numbers)}",
        )
    return gather_from_all("fit: measure", numbers)[0]
