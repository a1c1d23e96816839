"""Evaluate a run: on a second source, which is read from its beginning each time, or as users do.

Input: a run, or its report. Output: the means of the loss and the metrics over the batches of the
source; whatever numbers a user's function returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.data import Prefetcher
from tpu_embed.loop.network import Objective
from tpu_embed.loop.reports import Report, Window
from tpu_embed.loop.run import Run
from tpu_embed.loop.step import make_evaluation_step, take_apart
from tpu_embed.processes import gather_from_all

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
        got, remedy = type(measure).__name__, "it is called with a Report"
        text = message("fit: measure", expected="a function", got=got, remedy=remedy)
        raise TypeError(text)
    if source is None:
        return None if measure is None else lambda _, report: _measured(measure, report)
    _check_source(source)
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
            remedy = "a function that returns an iterator must make a new one in each call"
            text = message(WHAT, expected="at least one batch", got="none", remedy=remedy)
            raise ValueError(text)
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
        text = message(what, expected="a dictionary of named numbers", got=repr(found))
        raise TypeError(text) from error
    if numbers.keys() & known.keys():
        expected = f"names that evaluation= does not have, {sorted(known)}"
        raise ValueError(message(what, expected=expected, got=f"{sorted(numbers)}"))
    return gather_from_all("fit: measure", numbers)[0]


def _check_source(source: Any) -> None:
    """Check that a source can be read several times."""
    got = type(source).__name__
    if not callable(source) and not isinstance(source, Iterable):
        expected = "an iterable, or a function that returns one"
        raise TypeError(message(WHAT, expected=expected, got=got))
    if isinstance(source, Prefetcher) or (not callable(source) and iter(source) is source):
        expected, got = "what can be read several times", f"{got}, which can be read once"
        remedy = "give the function that makes it, such as functools.partial(batches, path)"
        raise ValueError(message(WHAT, expected=expected, got=got, remedy=remedy))
