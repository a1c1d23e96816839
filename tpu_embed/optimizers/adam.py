"""Adam: steps along a moving average of the gradient, divided by the root of that of its square.

Input: rows, both of their moving averages, and gradients.
Output: the rows and the averages after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import adam_rate, average, round_now
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, POSITIVE, RatedOptimizer, accepts

_LAZY = accepts(
    "True with use_gradient_accumulation=False",
    lambda value, optimizer: value or optimizer.use_gradient_accumulation,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(RatedOptimizer):
    """Divide the average gradient by the root of the average squared gradient.

        m = β₁ m + (1 - β₁) g;  v = β₂ v + (1 - β₂) g²
        α = lr √(1 - β₂ᵗ) / (1 - β₁ᵗ), or lr without bias correction
        w = w - α m / √(v + ε²), or α m / (√v + ε) with `sum_inside_sqrt=False`

    t is the step of the whole table, not the number of updates of the row.

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      beta_1: β₁, in [0, 1).
      beta_2: β₂, in [0, 1).
      epsilon: ε, > 0.
      lazy_adam: update touched rows only. With False m and v of every row decay and every row moves
        at every step, which costs a pass over the whole table.
      sum_inside_sqrt: add ε² inside the root instead of ε outside.
      bias_correction: correct lr as above. With False the learning rate is used as it is.

    The other options are those of `RowOptimizer`. Slots: `momenta` m and `velocities` v,
    `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range, or `lazy_adam=False` without accumulation.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"momenta": jnp.zeros((1, 1)), "velocities": jnp.zeros((1, 1))}
      >>> g = jnp.full((1, 1), 4.0)
      >>> rows, slots = Adam(0.1).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.1)
      >>> print(f"{float(rows[0, 0]):.4f} {float(slots['momenta'][0, 0]):.4f}")
      0.9000 0.4000

    Reference:
      Kingma and Ba, "Adam: a method for stochastic optimization", 2015.
    """

    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-7, metadata=POSITIVE)
    lazy_adam: bool = field(default=True, metadata=_LAZY)
    sum_inside_sqrt: bool = True
    bias_correction: bool = True

    def declared_slots(self) -> tuple[Slot, ...]:
        every = not self.lazy_adam
        return Slot("momenta", 0.0, every_row=every), Slot("velocities", 0.0, every_row=every)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m = average(slots["momenta"], g, self.beta_1, t=t)
        v = average(slots["velocities"], g**2, self.beta_2, t=t)
        alpha, epsilon = self._alpha(t, lr), self._epsilon(w.dtype)
        scale = jnp.sqrt(v + epsilon) if self.sum_inside_sqrt else jnp.sqrt(v) + epsilon
        return w - alpha * m / round_now(scale, t), {"momenta": m, "velocities": v}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        numbers = (self._alpha(t, lr), self._epsilon(lr.dtype))
        rates = (self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)
        slots = ("momenta", "velocities")
        return CompiledRule("adam", slots, (*numbers, *rates), flag=self.sum_inside_sqrt)

    def _alpha(self, t: Array, lr: Array) -> Array:
        """Return the learning rate with its bias correction."""
        return adam_rate(lr, self.beta_1, self.beta_2, t=t) if self.bias_correction else lr

    def _epsilon(self, dtype: Any) -> float:
        """Return what is added inside the root, or outside of it; never 0."""
        if self.sum_inside_sqrt:
            # ε² of a small ε underflows to 0 in float32; a row without gradients would be 0 / 0.
            return max(self.epsilon**2, float(jnp.finfo(dtype).tiny))
        return self.epsilon
