"""Learning rates that are Python functions, and which stacks they belong to.

A learning rate is a number, a schedule (a function of the step, computed inside the program) or a
function without arguments. The last kind can only be called on the host, so its value is read
before every update and passed into the compiled program as an argument.

Input: a layout. Output: the callables, each once; their values; the value of every stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tpu_embed._checks import refuse
from tpu_embed._types import Array, ArrayLike, snapshot
from tpu_embed.core.layout.layout import Layout
from tpu_embed.optimizers import (
    LearningRateKind,
    learning_rate_kind,
)

_CALLABLES = LearningRateKind.HOST, LearningRateKind.SCHEDULE


def rate_callables(layout: Layout, kinds: Sequence[LearningRateKind] = _CALLABLES) -> list[Any]:
    """Return the learning rates of some kinds: each once, and those of one kind after another."""
    rates = [stack.optimizer.learning_rate for stack in layout.stacks if stack.optimizer]
    found: list[Any] = []
    for kind in kinds:
        for rate in rates:
            # `not in` compares by equality: a bound method is a new, equal object at each access.
            if learning_rate_kind(rate) is kind and rate not in found:
                found.append(rate)
    return found


class HostRates:
    """Learning rates that are callables without arguments: read on the host, once per update.

    Equal callables share one tag: their index in what `read` returns.

    Args:
      layout: the engine's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._callables = rate_callables(layout, [LearningRateKind.HOST])
        # stack -> tag; many stacks may share one callable, which is then called once per update.
        self._tags: dict[int, int] = {}
        for g, stack in enumerate(layout.stacks):
            rate = None if stack.optimizer is None else stack.optimizer.learning_rate
            if rate in self._callables:
                self._tags[g] = self._callables.index(rate)

    def read(self) -> tuple[Array, ...]:
        """Call each callable once, and return their values: scalars `[]`, indexed by tag.

        Raises:
          ValueError: a callable does not return a number.
        """
        return tuple(_scalar(rate(), rate) for rate in self._callables)

    def by_stack(self, values: Sequence[ArrayLike] | None) -> dict[int, Array]:
        """Return the learning rate of every stack whose rate is read on the host, by stack.

        Args:
          values: what `read` returned; None if there is nothing to read.

        Raises:
          ValueError: the number of values is not the number of callables.
        """
        given, most = () if values is None else values, len(self._callables)
        listed = isinstance(given, (tuple, list))
        if not listed or len(given) != most:
            refuse(
                "learning_rates",
                expected=f"{most} value(s), read outside the jitted function",
                got=f"{len(given)}" if listed and values is not None else repr(values),
                remedy="pass update(..., learning_rates=engine.learning_rates())",
            )
        # dtype `float` means float64 if x64 is on, otherwise float32.
        return {g: jnp.asarray(snapshot(given[tag]), float) for g, tag in self._tags.items()}


def _scalar(value: Any, rate: Any) -> Array:
    """Return what the callable `rate` returned as a scalar `[]`."""
    try:
        scalar = jnp.asarray(snapshot(value), float)
    except (TypeError, ValueError):
        scalar = None
    if scalar is None or scalar.shape != ():
        name = getattr(rate, "__qualname__", repr(rate))
        refuse(f"learning_rate {name}", expected="a call that returns a number", got=repr(value))
    return scalar
