"""Which evaluation of a run was the best one, and how many have come since.

    evaluations of "ndcg", mode "max"    0.10  0.14  nan   0.13  0.13
    the best one so far                  0.10  0.14  0.14  0.14  0.14
    how many since it                    0     0     1     2     3     patience=3: the run ends

The record of this is a JSON value, which goes into checkpoints with the run.

Input: reports with evaluations. Output: the record.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tpu_embed._checks import check_choice, check_int, did_you_mean, message
from tpu_embed.loop.reports import Report

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
            expected, remedy = f"one of {sorted(numbers)}", did_you_mean(self.name, numbers)
            text = message("fit: best", expected=expected, got=repr(self.name), remedy=remedy)
            raise ValueError(text)
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
        return {"of": of, "since": 0, "report": {name: getattr(report, name) for name in kept}}

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
        expected, remedy = "a Best", 'such as tpu_embed.loop.Best("loss", "min")'
        raise TypeError(message("fit: best", expected=expected, got=repr(best), remedy=remedy))
    for name, value in {"evaluate_every": evaluate_every, "directory": directory}.items():
        if value is None:
            text = message("fit: best", expected=f"{name}= beside it", got="none")
            raise ValueError(text)
