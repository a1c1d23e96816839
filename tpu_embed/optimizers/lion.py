"""Lion: every step has the same size, in the direction of the sign of an average gradient.

Input: rows, their average gradients, and gradients.
Output: the rows and the averages after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, LEARNING_RATE, RowOptimizer


@dataclasses.dataclass(frozen=True)
class Lion(RowOptimizer):
    """Move each entry by lr, against the sign of an average of past and present gradients.

        w = w - lr sgn(β₁ m + (1 - β₁) g);  m = β₂ m + (1 - β₂) g

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      beta_1: β₁, in [0, 1), the rate of the average that gives the direction.
      beta_2: β₂, in [0, 1), the rate of the average that is stored.

    The other options are those of `RowOptimizer`. Slots: `momenta` m `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots, g = {"momenta": jnp.zeros((1, 2))}, jnp.array([[4.0, -8.0]])
      >>> rows, slots = Lion(0.5).update_rows(jnp.ones((1, 2)), slots, g, 1, 0.5)
      >>> rows.tolist()
      [[0.5, 1.5]]

    Reference:
      Chen et al., "Symbolic discovery of optimization algorithms", 2023.
    """

    learning_rate: LearningRate = field(default=1e-4, metadata=LEARNING_RATE)
    _: dataclasses.KW_ONLY
    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.99, metadata=FRACTION)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("momenta", 0.0),)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m = slots["momenta"]
        direction = jnp.sign(average(m, g, self.beta_1, t=t))
        return w - lr * direction, {"momenta": average(m, g, self.beta_2, t=t)}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
