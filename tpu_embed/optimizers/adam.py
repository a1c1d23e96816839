"""Adam and its relatives: steps along a moving average of the gradient.

Input: rows, their moving averages, and gradients.
Output: the rows and the averages after one update.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import adam_rate, average, one_minus_power, round_now, row_sum
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import (
    LEARNING_RATE,
    RatedOptimizer,
    RowOptimizer,
    accepts,
    fraction,
    positive,
)


@dataclass(frozen=True, kw_only=True)
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

    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.999)
    epsilon: float = positive(1e-7)
    lazy_adam: bool = accepts(
        True,
        "True with use_gradient_accumulation=False",
        lambda value, optimizer: value or optimizer.use_gradient_accumulation,
    )
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


@dataclass(frozen=True, kw_only=True)
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

    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.999)
    epsilon: float = positive(1e-6)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", 0.0), Slot("velocities", 0.0)

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

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


@dataclass(frozen=True)
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
    _: KW_ONLY
    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.999)
    epsilon: float = positive(1e-3)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", 0.0), Slot("velocities", 1e-6)

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m, v, g2 = average(slots["momenta"], g, self.beta_1, t=t), slots["velocities"], g**2
        v = v - (1.0 - self.beta_2) * jnp.sign(v - g2) * g2
        alpha = adam_rate(lr, self.beta_1, self.beta_2, t=t)
        return w - alpha * m / (jnp.sqrt(v) + self.epsilon), {"momenta": m, "velocities": v}


@dataclass(frozen=True)
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
    _: KW_ONLY
    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.99)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("momenta", 0.0),)

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m = slots["momenta"]
        direction = jnp.sign(average(m, g, self.beta_1, t=t))
        return w - lr * direction, {"momenta": average(m, g, self.beta_2, t=t)}
