"""What a loop tells of itself: the means of its losses and metrics over some steps.

A loss stays on the device until it is reported, because reading it waits for its step.

Input: losses and metrics, step after step. Output: means, and a `Report` of them.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from tpu_embed.core.state import TableState

AHEAD = 4
"""How many steps may be under way: the loop waits for the loss of the step that is so far back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """How a run stands.

    Attributes:
      step: how many batches the run has been trained on.
      steps: how many there will be, or None if the source decides.
      loss: the mean over the steps since the last report; NaN if there were none.
      metrics: the same of each metric that the loss returned.
      evaluation: means over the second source, "loss" among them; None if it was not read now.
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
        parts += ["nothing left to train on"] if idle else self._means()
        if self.evaluation is not None:
            named = (f"{name} {value:.4g}" for name, value in self.evaluation.items())
            parts.append("evaluation: " + "  ".join(named))
        if self.steps_per_second:  # there were steps since the last report
            parts.append(f"{self.steps_per_second:,.1f} steps/s")
        return "  ".join(parts)

    def _means(self) -> list[str]:
        return [
            f"{name} {value:.4g}" for name, value in {"loss": self.loss, **self.metrics}.items()
        ]


class Window:
    """Losses and metrics of some steps.

    Attributes:
      count: how many steps there were.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = collections.defaultdict(list)
        self.count, self._since = 0, time.perf_counter()

    def add(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Add a step; wait until at most `AHEAD` steps are under way."""
        for name, value in {"loss": loss, **metrics}.items():
            self._values[name].append(value)
        self.count += 1
        if self.count > AHEAD:
            jax.block_until_ready(self._values["loss"][-1 - AHEAD])

    def means(self) -> dict[str, float]:
        """Return the mean of each; this waits for the last step."""
        found = {name: np.asarray(jax.device_get(v), float) for name, v in self._values.items()}
        return {name: float(values.mean()) for name, values in found.items()}

    def close(self) -> tuple[dict[str, float], float]:
        """Return the means and the steps per second."""
        means = self.means()
        return means, self.count / max(time.perf_counter() - self._since, 1e-9)
