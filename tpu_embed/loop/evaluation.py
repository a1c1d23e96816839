"""Evaluate a run on a second source, which is read from its beginning each time.

Input: a run. Output: the means of the loss and the metrics over the batches of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.data import Prefetcher
from tpu_embed.loop.network import Objective
from tpu_embed.loop.reports import Window
from tpu_embed.loop.run import Run
from tpu_embed.loop.step import make_evaluation_step, take_apart

WHAT = "fit: evaluation"


def make_evaluate(
    engine: EmbeddingEngine,
    objective: Objective,
    source: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    *,
    weighted: bool,
    depth: int,
) -> Callable[[Run], dict[str, float]] | None:
    """Return a function that evaluates a run; None without a source.

    The function raises `ValueError` if the source has no batch.

    Raises:
      TypeError: the source is neither an iterable nor a function.
      ValueError: it can be read only once.
    """
    if source is None:
        return None
    _check_source(source)
    step = make_evaluation_step(engine, objective)

    def evaluate(run: Run) -> dict[str, float]:
        found, begun = Window(), source() if callable(source) else source
        with Prefetcher(engine, begun, depth, weighted=weighted, training=False) as batches:
            for item in batches:
                batch, rest = take_apart(engine, item)
                found.add(*step(run.state, run.network, batch, rest))
        if not found.count:
            remedy = "a function that returns an iterator must make a new one in each call"
            text = message(WHAT, expected="at least one batch", got="none", remedy=remedy)
            raise ValueError(text)
        return found.means()

    return evaluate


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
