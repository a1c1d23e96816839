"""LAMB: Adam's direction, scaled to the norm of the row.

Input: rows, both of their moving averages, and gradients.
Output: the rows and the averages after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import ClassVar

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average, one_minus_power, round_now, row_sum
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, POSITIVE, RatedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(RatedOptimizer):
    """Scale Adam's direction to the norm of the row.

        m = β₁ m + (1 - β₁) g;  v = β₂ v + (1 - β₂) g²
        r = (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε) + λ w
        w = w - lr (‖w‖ / ‖r‖) r, where the ratio is 1 if either norm is 0; norms are per row

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      beta_1: β₁, in [0, 1).
      beta_2: β₂, in [0, 1).
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`, except that `weight_decay_factor` is only the λ
    above. Slots: `momenta` m and `velocities` v, `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"momenta": jnp.zeros((1, 2)), "velocities": jnp.zeros((1, 2))}
      >>> rows, g = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]])
      >>> rows, slots = LAMB(0.1).update_rows(rows, slots, g, 1, 0.1)
      >>> print(f"{float(rows[0, 0]):.4f} {float(rows[0, 1]):.4f}")
      2.5000 4.0000

    Reference:
      You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020.
    """

    decay_in_rule: ClassVar[bool] = True

    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-6, metadata=POSITIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", 0.0), Slot("velocities", 0.0)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m = average(slots["momenta"], g, self.beta_1, t=t)
        v = average(slots["velocities"], g**2, self.beta_2, t=t)
        m_hat = m / one_minus_power(self.beta_1, t, w.dtype)
        v_hat = v / one_minus_power(self.beta_2, t, w.dtype)
        r = m_hat / (jnp.sqrt(v_hat) + self.epsilon) + self.decay_factor(lr) * w
        w_norm, r_norm = (jnp.sqrt(row_sum(round_now(x**2, t))) for x in (w, r))
        regular = (w_norm > 0) & (r_norm > 0)
        ratio = jnp.where(regular, w_norm, 1.0) / jnp.where(regular, r_norm, 1.0)
        return w - lr * ratio * r, {"momenta": m, "velocities": v}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
