"""An optimizer's rule in the form the compiled kernels take it: numbers, not code.

Enters: what `TableOptimizer.compiled_rule` returns. Leaves: operands of `cpu.update_rows`.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike

KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "ftrl")
"""The rules of `native/loops.h`, in the order of its `RuleKind`."""


@dataclasses.dataclass(frozen=True)
class CompiledRule:
    """A rule that the compiled kernels know, at one step.

    Attributes:
      kind: one of `KINDS`.
      slots: names of its slots, in the kernel's order.
      numbers: its numbers, in the order in which `native/loops.inc` reads them; scalars.
      flag: its switch, for rules that have one.
      keep: what the row is multiplied with before the rule, 1 - λ.
      gradient_bounds: of the gradient; None: none.
      weight_bounds: of the new row; None: none.
    """

    kind: str
    slots: tuple[str, ...] = ()
    numbers: tuple[ArrayLike, ...] = ()
    flag: bool = False
    keep: ArrayLike = 1.0
    gradient_bounds: tuple[float | None, float | None] = (None, None)
    weight_bounds: tuple[float | None, float | None] = (None, None)

    def operand(self) -> Array:
        """Return all numbers, float32: the common ones, then the rule's own."""
        bounds = (*_infinite(self.gradient_bounds), *_infinite(self.weight_bounds))
        numbers = [jnp.asarray(x, jnp.float32) for x in (self.keep, *bounds, *self.numbers)]
        return jnp.stack(numbers)


def _infinite(bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = bounds
    return -math.inf if low is None else low, math.inf if high is None else high
