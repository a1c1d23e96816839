"""Reports of a run while it goes on: when they are due, what is in them, and who gets them.

Input: a run after each of its steps. Output: reports, to a callback and to the progress line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_embed._checks import check_int, message
from tpu_embed.loop.best import Best
from tpu_embed.loop.network import Objective
from tpu_embed.loop.progress import ProgressLine
from tpu_embed.loop.reports import Report, Window
from tpu_embed.loop.run import Run


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When something is due.

    Attributes:
      steps: of the whole run, or None.
      report_every: how many steps lie between two reports.
      evaluate_every: how many steps lie between two evaluations, or None.
      save_every: how many steps lie between two checkpoints.

    Raises:
      ValueError: a number is below 1.
    """

    steps: int | None
    report_every: int
    evaluate_every: int | None
    save_every: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                check_int(f"fit: {name}", value, minimum=1)


class Reporter:
    """Makes the reports of a run.

    Args:
      schedule: when.
      objective: makes the model of a report.
      evaluate: evaluates a run, which it is given with its report; or None.
      best: compares evaluations, or None.
      callback: gets every report, or None.
      progress: whether reports are shown.

    Raises:
      TypeError: the callback is no function.
      ValueError: evaluations are due, and there is nothing to evaluate.
    """

    def __init__(
        self,
        schedule: Schedule,
        objective: Objective,
        evaluate: Callable[[Run, Report], dict[str, float]] | None,
        best: Best | None,
        callback: Callable[[Report], Any] | None,
        *,
        progress: bool,
    ) -> None:
        if callback is not None and not callable(callback):
            got, remedy = type(callback).__name__, "it is called with each Report"
            text = message("fit: callback", expected="a function", got=got, remedy=remedy)
            raise TypeError(text)
        if schedule.evaluate_every is not None and evaluate is None:
            expected, got = "an evaluation beside it", f"{schedule.evaluate_every} alone"
            remedy = "give evaluation=, a second source, or measure=, a function"
            text = message("fit: evaluate_every", expected=expected, got=got, remedy=remedy)
            raise ValueError(text)
        self._schedule, self._objective, self._evaluate = schedule, objective, evaluate
        self._best, self._callback = best, callback
        self._line = ProgressLine() if progress else None
        self._window = Window()
        self._last: Report | None = None

    def say(self, text: str) -> None:
        """Show a text in a line of its own, before the reports."""
        if self._line is not None:
            self._line.begin(text)

    def wants_end(self, run: Run, loss: Any, metrics: dict[str, Any]) -> bool:
        """Take in a step, and report if that is due; return whether the run ends with it.

        A callback ends it, or the patience for evaluations that are no better.
        """
        self._window.add(loss, metrics)
        every = self._schedule.evaluate_every
        evaluates = every is not None and run.step % every == 0
        if evaluates or run.step % self._schedule.report_every == 0:
            return self._report(run, evaluates=evaluates)
        return False

    def finish(self, run: Run) -> Report:
        """Return the report of the last step; make it unless it was made."""
        last, evaluates = self._last, self._evaluate is not None
        if last is None or last.step != run.step or (evaluates and last.evaluation is None):
            self._report(run, evaluates=evaluates)
        assert self._last is not None
        return self._last

    def had_better(self, run: Run) -> bool:
        """Tell whether an evaluation before the last step was the best one."""
        return self._best is not None and run.best_step not in (None, run.step)

    def show_best(self, run: Run) -> Report:
        """Return the report of the best evaluation, of a run that has its state and model again."""
        assert self._last is not None
        again = {"state": run.state, "model": self._objective.model_of(run.network, run.state)}
        report = dataclasses.replace(self._last, steps_per_second=0, **run.best["report"], **again)
        if self._line is not None:
            self._line.show(f"the best: {report.line()}")
        return report

    def _report(self, run: Run, *, evaluates: bool) -> bool:
        """Report; return whether the run ends."""
        run.losses.check()
        means, speed = self._window.close()
        idle = not means and self._last is None  # the run went on from its end
        if not means and self._last is not None:  # a second report of one step
            means = {"loss": self._last.loss, **self._last.metrics}
        report = Report(
            step=run.step,
            steps=self._schedule.steps,
            loss=means.pop("loss", float("nan")),
            metrics=means,
            evaluation=None,
            steps_per_second=speed,
            state=run.state,
            model=self._objective.model_of(run.network, run.state),
        )
        over = False
        if evaluates and self._evaluate is not None:
            report = dataclasses.replace(report, evaluation=self._evaluate(run, report))
            if self._best is not None:
                run.best = self._best.compare(run.best, report)
                over = self._best.is_over(run.best)
        self._last, self._window = report, Window()  # whose time begins now
        if self._line is not None:
            self._line.show(report.line(idle=idle))
        answer = None if self._callback is None else self._callback(report)
        return over or answer is True or (isinstance(answer, np.bool_) and bool(answer))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        """End the progress line."""
        if self._line is not None:
            self._line.close()
