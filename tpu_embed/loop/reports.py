"""What a loop tells of itself: the means of its losses and metrics over some steps.

A loss stays on the device until it is reported, because reading it waits for its step.

Which evaluation of a run was the best one, and how many have come since, is a record of its own:

    evaluations of "ndcg", mode "max"    0.10  0.14  nan   0.13  0.13
    the best one so far                  0.10  0.14  0.14  0.14  0.14
    how many since it                    0     0     1     2     3     patience=3: the run ends

It is a JSON value, which goes into checkpoints with the run.

Input: losses and metrics, step after step. Output: means, a `Report` of them, the record, and
lines; on a terminal the reports are one line that is rewritten.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from typing import Any, Literal

import jax
import numpy as np

from tpu_embed._checks import check_choice, check_int, did_you_mean, message, refuse
from tpu_embed.core.state import TableState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """How a run stands.

    Attributes:
      step: how many batches the run has been trained on.
      steps: how many there will be, or None if the source decides.
      loss: the mean over the steps since the last report; NaN if there were none.
      metrics: the same of each metric that the loss returned.
      evaluation: means over the second source, "loss" among them, and what `measure` returned;
        None if nothing was evaluated now.
      steps_per_second: since the last report, without evaluations.
      state: tables and slots. The next step takes their memory: copy what is to stay.
      model: with its parameters as they are now, for which the same holds.
    """

    step: int
    steps: int | None
    loss: float
    metrics: dict[str, float]
    evaluation: dict[str, float] | None
    steps_per_second: float
    state: TableState
    model: Any

    def line(self, *, idle: bool = False) -> str:
        """Return the report as one line.

        Args:
          idle: whether the run had reached its end before, so that there is no loss to tell.

        Example:
          >>> given = {"metrics": {"auc": 0.75}, "evaluation": {"loss": 0.5}, "model": None}
          >>> Report(step=1200, steps=5000, loss=0.4321, steps_per_second=85.2, state=None,
          ...        **given).line()
          'step 1,200 of 5,000  loss 0.4321  auc 0.75  evaluation: loss 0.5  85.2 steps/s'
        """
        parts = [f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")]
        means = {"loss": self.loss, **self.metrics}.items()
        told = [f"{name} {value:.4g}" for name, value in means]
        parts += ["nothing left to train on"] if idle else told
        if self.evaluation is not None:
            named = (f"{name} {value:.4g}" for name, value in self.evaluation.items())
            parts.append("evaluation: " + "  ".join(named))
        if self.steps_per_second:  # there were steps since the last report
            parts.append(f"{self.steps_per_second:,.1f} steps/s")
        return "  ".join(parts)


class Losses:
    """The losses of the last steps, which may be under way.

    A loss is looked at when `ahead` steps have followed, which waits for nothing that these do not
    wait for; and before anything is made of the state that its step has left.

    Args:
      ahead: how many steps may be under way.
      on_nonfinite: "stop": a loss that is not finite is an error, then in each call; "continue": it
        is not.

    Raises:
      ValueError: `on_nonfinite` is another word, or `ahead` is below 1.
    """

    def __init__(self, ahead: int, on_nonfinite: Literal["stop", "continue"]) -> None:
        words = ("stop", "continue")
        self._stops = check_choice("fit: on_nonfinite", on_nonfinite, words) == "stop"
        self._ahead = check_int("fit: depth", ahead, minimum=1)
        self._waiting: collections.deque[tuple[int, Any]] = collections.deque()
        self._error: FloatingPointError | None = None

    def add(self, step: int, loss: Any) -> None:
        """Add the loss of a step, whose number counts from 1, and look at that of an earlier one.

        Raises:
          FloatingPointError: it is not finite.
        """
        loss.copy_to_host_async()
        self._waiting.append((step, loss))
        self.check(self._ahead)

    def check(self, ahead: int = 0) -> None:
        """Wait until at most so many steps are under way, and look at the losses of the others.

        Raises:
          FloatingPointError: one is not finite.
        """
        while self._error is None and len(self._waiting) > ahead:
            step, loss = self._waiting.popleft()
            value = np.asarray(loss)
            if self._stops and not np.isfinite(value):
                what, remedy = (
                    f"fit: loss of step {step}",
                    "take smaller learning rates; or leave ",
                )
                remedy += 'such steps out: on_nonfinite="continue", and on_bad_gradient="skip" of '
                remedy += "the engine"
                text = message(
                    what, expected="a finite number", got=f"{value}", remedy=remedy
                )
                self._error = FloatingPointError(text)
        if self._error is not None:
            raise self._error


class Window:
    """Losses and metrics of some steps.

    Attributes:
      count: how many steps there were.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = collections.defaultdict(list)
        self.count, self._since = 0, time.perf_counter()

    def add(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Add a step."""
        for name, value in {"loss": loss, **metrics}.items():
            self._values[name].append(value)
        self.count += 1

    def wait(self, ahead: int) -> None:
        """Wait until at most so many of the steps are under way."""
        if self.count > ahead:
            jax.block_until_ready(self._values["loss"][-1 - ahead])

    def means(self) -> dict[str, float]:
        """Return the mean of each; this waits for the last step."""
        found = {
            name: np.asarray(jax.device_get(v), float)
            for name, v in self._values.items()
        }
        return {name: float(values.mean()) for name, values in found.items()}

    def close(self) -> tuple[dict[str, float], float]:
        """Return the means and the steps per second."""
        means = self.means()
        return means, self.count / max(time.perf_counter() - self._since, 1e-9)


class ProgressLine:
    """Shows reports: one line that is rewritten on a terminal, a line for each report elsewhere.

    Args:
      shows: whether it shows any; of several processes, the first one does.
    """

    def __init__(self, *, shows: bool) -> None:
        self._shows, self._width = shows and jax.process_index() == 0, 0

    def begin(self, text: str) -> None:
        """Say in a line of its own where the run begins."""
        if self._shows:
            print(text, file=sys.stderr, flush=True)

    def show(self, line: str) -> None:
        """Show a report, `Report.line`."""
        if not self._shows:
            return
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End a line that was being rewritten."""
        if self._width:
            sys.stderr.write("\n")
            self._width = 0


Record = dict[str, Any]
"""{"of": [name, mode], "since": …, "report": {"step": …, …}}; no "report" before a best one."""


@dataclasses.dataclass(frozen=True)
class Best:
    """Keep the checkpoint of the best evaluation, and end a run that no longer improves.

    Args:
      name: which number of `Report.evaluation` is compared.
      mode: "max" if larger is better, "min" if smaller is. NaN is never better.
      patience: after so many evaluations in a row that were no better, the run ends; None: it does
        not end for this reason.

    Raises:
      ValueError: `mode` is another word, or `patience` is below 1.

    Example:
      >>> Best("ndcg@10", "max", patience=5)
      Best(name='ndcg@10', mode='max', patience=5)
    """

    name: str
    mode: Literal["max", "min"]
    patience: int | None = None

    def __post_init__(self) -> None:
        check_choice("Best: mode", self.mode, ("max", "min"))
        if self.patience is not None:
            check_int("Best: patience", self.patience, minimum=1)

    def compare(self, record: Record, report: Report) -> Record:
        """Return the record after another evaluation.

        Args:
          record: the one before; {} at first. One of another name or mode counts as {}.
          report: of the evaluation.

        Raises:
          ValueError: the evaluation has no such number.
        """
        numbers = report.evaluation or {}
        if self.name not in numbers:
            refuse(
                "fit: best",
                expected=f"one of {sorted(numbers)}",
                got=repr(self.name),
                remedy=did_you_mean(self.name, numbers),
            )
        of = [self.name, self.mode]
        if record.get("of") != of:
            record = {"of": of, "since": 0}
        new, before = numbers[self.name], record.get("report")
        if before is not None:
            old = before["evaluation"][self.name]
            better = new > old if self.mode == "max" else new < old
        else:
            better = new == new  # not NaN
        if not better:
            return record | {"since": record["since"] + 1}
        kept = ("step", "loss", "metrics", "evaluation")
        return {
            "of": of,
            "since": 0,
            "report": {name: getattr(report, name) for name in kept},
        }

    def is_over(self, record: Record) -> bool:
        """Tell whether a run with this record ends."""
        return self.patience is not None and record.get("since", 0) >= self.patience


def check_best(best: Any, evaluate_every: int | None, directory: Any) -> None:
    """Check that evaluations can be compared, and the best one kept.

    Raises:
      TypeError: `best` is neither a `Best` nor None.
      ValueError: there are no evaluations to compare, or there is no directory.
    """
    if best is None:
        return
    if not isinstance(best, Best):
        refuse(
            "fit: best",
            expected="a Best",
            got=repr(best),
            remedy='such as tpu_embed.loop.Best("loss", "min")',
            error=TypeError,
        )
    for name, value in {
        "evaluate_every": evaluate_every,
        "directory": directory,
    }.items():
        if value is None:
            refuse("fit: best", expected=f"{name}= beside it", got="none")
