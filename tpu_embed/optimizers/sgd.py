"""Stochastic gradient descent: the step is the gradient times the learning rate.

Input: rows and gradients; there are no slots.
Output: the rows after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import round_now
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import LEARNING_RATE, RowOptimizer


@dataclasses.dataclass(frozen=True)
class SGD(RowOptimizer):
    """Move a row against its gradient.

        w = w - lr g

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.

    The other options are those of `RowOptimizer`. No slots.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> g = jnp.array([[1.0, -2.0]])
      >>> rows, slots = SGD(0.5).update_rows(jnp.ones((1, 2)), {}, g, 1, 0.5)
      >>> rows.tolist(), slots
      ([[0.5, 2.0]], {})

    Reference:
      Robbins and Monro, "A stochastic approximation method", 1951.
    """

    learning_rate: LearningRate = field(default=0.01, metadata=LEARNING_RATE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return ()

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        return w - round_now(lr * g, t), {}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("sgd", numbers=(lr,))
