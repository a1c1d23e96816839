"""Yogi: Adam whose average of squared gradients changes by bounded steps.

Input: rows, both of their moments, and gradients.
Output: the rows and the moments after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import adam_rate, average
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, LEARNING_RATE, POSITIVE, RowOptimizer


@dataclasses.dataclass(frozen=True)
class Yogi(RowOptimizer):
    """Move along the average gradient, scaled by a second moment that changes additively.

        m = β₁ m + (1 - β₁) g;  v = v - (1 - β₂) sgn(v - g²) g²
        α = lr √(1 - β₂ᵗ) / (1 - β₁ᵗ);  w = w - α m / (√v + ε)

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      beta_1: β₁, in [0, 1).
      beta_2: β₂, in [0, 1).
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`. Slots: `momenta` m, initially 0, and `velocities`
    v, initially 1e-6, `[V, D]`.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"momenta": jnp.zeros((1, 1)), "velocities": jnp.full((1, 1), 9.0)}
      >>> g = jnp.ones((1, 1))
      >>> rows, slots = Yogi(0.1).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.1)
      >>> print(f"{float(slots['velocities'][0, 0]):.4f}")
      8.9990

    Reference:
      Zaheer et al., "Adaptive methods for nonconvex optimization", 2018.
    """

    learning_rate: LearningRate = field(default=0.01, metadata=LEARNING_RATE)
    _: dataclasses.KW_ONLY
    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-3, metadata=POSITIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", 0.0), Slot("velocities", 1e-6)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m, v, g2 = average(slots["momenta"], g, self.beta_1, t=t), slots["velocities"], g**2
        v = v - (1.0 - self.beta_2) * jnp.sign(v - g2) * g2
        alpha = adam_rate(lr, self.beta_1, self.beta_2, t=t)
        return w - alpha * m / (jnp.sqrt(v) + self.epsilon), {"momenta": m, "velocities": v}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
