"""Describe an optimizer's rule to the compiled kernels: a name and numbers instead of Python code.

The kernels have the rules of common optimizers built in. A `CompiledRule` says which one to run,
with which numbers, and which bounds to apply before and after it.

Input: what `TableOptimizer.compiled_rule` returns. Output: an operand of `cpu.update_rows`.
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
    """A rule that the compiled kernels know, with its numbers at one step.

    Attributes:
      kind: one of `KINDS`.
      slots: the names of its slots, in the order of the kernel.
      numbers: its scalars, in the order in which `native/loops.inc` reads them.
      flag: its switch, for rules that have one.
      keep: what the row is multiplied with before the rule, 1 - λ.
      gradient_bounds: lower and upper bound of the gradient; None: unbounded.
      weight_bounds: lower and upper bound of the new row; None: unbounded.
    """

    kind: str
    slots: tuple[str, ...] = ()
    numbers: tuple[ArrayLike, ...] = ()
    flag: bool = False
    keep: ArrayLike = 1.0
    gradient_bounds: tuple[float | None, float | None] = (None, None)
    weight_bounds: tuple[float | None, float | None] = (None, None)

    def operand(self) -> Array:
        """Return all numbers as one float32 array: the common ones, then the rule's own."""
        # [keep, gradient low, gradient high, row low, row high, own numbers …]
        bounds = (*_infinite(self.gradient_bounds), *_infinite(self.weight_bounds))
        numbers = [jnp.asarray(x, jnp.float32) for x in (self.keep, *bounds, *self.numbers)]
        return jnp.stack(numbers)


def _infinite(bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = bounds
    return -math.inf if low is None else low, math.inf if high is None else high
