"""The rules, each in the equations of its paper.

SGD steps along the gradient, or along a decaying sum of past ones; Adagrad and its relatives
shorten the steps by the squared gradients that a row has seen, RMSProp and Adadelta by their mean;
Adam and its relatives step along a moving average of the gradient; FTRL minimises a regularised sum
of all past gradients. The rule of a `CustomOptimizer` is a function that a user writes, of one row,
its slots and its gradient.

Input: rows, their slots, and gradients. Output: the rows and their slots after one update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tpu_embed._checks import refuse
from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import (
    LEARNING_RATE,
    RatedOptimizer,
    RowOptimizer,
    accepts,
    adam_rate,
    average,
    fraction,
    non_negative,
    one_minus_power,
    positive,
    round_now,
    row_mean,
    row_sum,
    slot_values,
)


@dataclass(frozen=True)
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

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        return w - round_now(lr * g, t), {}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("sgd", numbers=(lr,))


@dataclass(frozen=True, kw_only=True)
class Momentum(RatedOptimizer):
    """Move a row along the decaying sum of its gradients.

        m = μ m + g;  w = w - lr m, or w - lr (g + μ m) with `use_nesterov`

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      momentum: μ, in [0, 1).
      use_nesterov: use Nesterov's momentum, which looks one step ahead.

    The other options are those of `RowOptimizer`. Slots: `momenta` m `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer, slots = Momentum(0.5, momentum=0.5), {"momenta": jnp.full((1, 1), 2.0)}
      >>> g = jnp.ones((1, 1))
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> rows.tolist(), slots["momenta"].tolist()
      ([[0.0]], [[2.0]])

    Reference:
      Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """

    momentum: float = fraction(0.9)
    use_nesterov: bool = False

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("momenta", 0.0),)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        m = round_now(self.momentum * slots["momenta"], t) + g
        direction = g + round_now(self.momentum * m, t) if self.use_nesterov else m
        return w - round_now(lr * direction, t), {"momenta": m}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        numbers = (lr, self.momentum)
        return CompiledRule("momentum", ("momenta",), numbers, flag=self.use_nesterov)


@dataclass(frozen=True, kw_only=True)
class Adagrad(RatedOptimizer):
    """Divide each step by the root of the sum of squared gradients.

        a = a + g²;  w = w - lr g / (√a + ε)

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      initial_accumulator_value: the initial value of a, > 0. The gradients of a mean over a batch
        of B examples are about 1/B in size: for such a loss take about 1/B², such as 1e-6. With
        the default the table would barely learn.
      epsilon: ε, >= 0.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a `[V, D]`.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = Adagrad(0.1, initial_accumulator_value=9.0)
      >>> slots = {"accumulators": jnp.full((1, 1), 9.0)}
      >>> g = jnp.full((1, 1), 4.0)
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 1)), slots, g, 1, 0.1)
      >>> print(f"{float(rows[0, 0]):.4f}", slots["accumulators"].tolist())
      0.9200 [[25.0]]

    Reference:
      Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
      optimization", 2011.
    """

    initial_accumulator_value: float = positive(0.1)
    epsilon: float = non_negative(0.0)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value),)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        # Every intermediate that the compiled kernel rounds is rounded here too: equal bits.
        a = slots["accumulators"] + round_now(g**2, t)
        return w - lr * g / round_now(jnp.sqrt(a) + self.epsilon, t), {
            "accumulators": a
        }

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("adagrad", ("accumulators",), (lr, self.epsilon))


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RatedOptimizer):
    """Divide each step by the root of the accumulated mean square of the row's gradients.

        a = a + mean_d g²;  w = w - lr g / (√a + ε)

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      initial_accumulator_value: the initial value of a, > 0; take a small one, such as 1e-6, if the
        loss is a mean over the batch, see `Adagrad`.
      epsilon: ε, >= 0.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a `[V]`, which take D times
    less memory than those of Adagrad.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"accumulators": jnp.full((1,), 3.5)}
      >>> g = jnp.array([[3.0, 4.0]])
      >>> rows, slots = RowWiseAdagrad(1.0).update_rows(jnp.ones((1, 2)), slots, g, 1, 1.0)
      >>> rows.tolist(), slots["accumulators"].tolist()
      ([[0.25, 0.0]], [16.0])

    Reference:
      Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning
      recommendation models", 2022.
    """

    initial_accumulator_value: float = positive(0.1)
    epsilon: float = non_negative(1e-8)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value, one_number=True),)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        mean = round_now(row_mean(round_now(g**2, t)), t)
        a = slots["accumulators"] + mean[:, 0]
        rate = lr / round_now(jnp.sqrt(a) + self.epsilon, t)
        return w - round_now(g * rate[:, None], t), {"accumulators": a}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("rowwise_adagrad", ("accumulators",), (lr, self.epsilon))


@dataclass(frozen=True, kw_only=True)
class AdagradMomentum(RatedOptimizer):
    """Scale the gradient as Adagrad does, then apply momentum to it.

        a = a + g² if β₂ = 1 else β₂ a + (1 - β₂) g²
        q = g (a + ε)^(-1 / exponent);  m = μ m + q
        w = w - lr m, or w - lr (μ m + q) with `use_nesterov`

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      momentum: μ, in [0, 1).
      use_nesterov: use Nesterov's momentum, which looks one step ahead.
      exponent: > 0; 2 is Adagrad's square root.
      beta2: β₂, in (0, 1]; 1 sums the squares, a smaller number averages them.
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a and `momenta` m,
    `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = AdagradMomentum(0.5, momentum=0.5)
      >>> slots = {"accumulators": jnp.full((1, 1), 9.0), "momenta": jnp.zeros((1, 1))}
      >>> g = jnp.full((1, 1), 4.0)
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> print(f"{float(rows[0, 0]):.4f} {float(slots['momenta'][0, 0]):.4f}")
      0.6000 0.8000

    Reference:
      Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
      optimization", 2011; the options are those of TensorFlow's TPU embedding.
    """

    momentum: float = fraction(0.0)
    use_nesterov: bool = False
    exponent: float = positive(2.0)
    beta2: float = accepts(1.0, "a number in (0, 1]", lambda value, _: 0 < value <= 1)
    epsilon: float = positive(1e-10)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", 0.0), Slot("momenta", 0.0)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        old = slots["accumulators"]
        a = old + g**2 if self.beta2 == 1.0 else average(old, g**2, self.beta2, t=t)
        if self.exponent == 2.0:
            q = g / jnp.sqrt(a + self.epsilon)
        else:
            q = g * (a + self.epsilon) ** (-1.0 / self.exponent)
        m = self.momentum * slots["momenta"] + q
        direction = self.momentum * m + q if self.use_nesterov else m
        return w - lr * direction, {"accumulators": a, "momenta": m}


@dataclass(frozen=True, kw_only=True)
class ProximalAdagrad(RatedOptimizer):
    """Take Adagrad's step, then shrink the row: l1 makes entries exactly 0, l2 scales them down.

        a = a + g²;  η = lr / √a;  y = w - η g;  w = sgn(y) max(|y| - η l1, 0) / (1 + η l2)

    With l1 or l2 a row changes even if its gradient is 0.

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      l1: strength of the l1 regularisation, >= 0.
      l2: strength of the l2 regularisation, >= 0.
      initial_accumulator_value: the initial value of a, > 0; take a small one, such as 1e-6, if the
        loss is a mean over the batch, see `Adagrad`.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a `[V, D]`.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots, g = {"accumulators": jnp.full((1, 1), 9.0)}, jnp.full((1, 1), 4.0)
      >>> optimizer = ProximalAdagrad(0.5, l1=1.0)
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> print(f"{float(rows[0, 0]):.4f}")
      0.5000

    Reference:
      Duchi and Singer, "Efficient online and batch learning using forward backward splitting",
      2009.
    """

    l1: float = non_negative(0.0)
    l2: float = non_negative(0.0)
    initial_accumulator_value: float = positive(0.1)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value),)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        a = slots["accumulators"] + g**2
        eta = lr / jnp.sqrt(a)
        y = w - eta * g
        shrunk = jnp.sign(y) * jnp.maximum(jnp.abs(y) - eta * self.l1, 0.0)
        return shrunk / (1.0 + eta * self.l2), {"accumulators": a}


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
        return Slot("momenta", 0.0, every_row=every), Slot(
            "velocities", 0.0, every_row=every
        )

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        m = average(slots["momenta"], g, self.beta_1, t=t)
        v = average(slots["velocities"], g**2, self.beta_2, t=t)
        alpha, epsilon = self._alpha(t, lr), self._epsilon(w.dtype)
        scale = jnp.sqrt(v + epsilon) if self.sum_inside_sqrt else jnp.sqrt(v) + epsilon
        return w - alpha * m / round_now(scale, t), {"momenta": m, "velocities": v}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        numbers = (self._alpha(t, lr), self._epsilon(lr.dtype))
        rates = (self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)
        slots = ("momenta", "velocities")
        return CompiledRule(
            "adam", slots, (*numbers, *rates), flag=self.sum_inside_sqrt
        )

    def _alpha(self, t: Array, lr: Array) -> Array:
        """Return the learning rate with its bias correction."""
        return (
            adam_rate(lr, self.beta_1, self.beta_2, t=t) if self.bias_correction else lr
        )

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

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
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

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        m, v, g2 = (
            average(slots["momenta"], g, self.beta_1, t=t),
            slots["velocities"],
            g**2,
        )
        v = v - (1.0 - self.beta_2) * jnp.sign(v - g2) * g2
        alpha = adam_rate(lr, self.beta_1, self.beta_2, t=t)
        return w - alpha * m / (jnp.sqrt(v) + self.epsilon), {
            "momenta": m,
            "velocities": v,
        }


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

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        m = slots["momenta"]
        direction = jnp.sign(average(m, g, self.beta_1, t=t))
        return w - lr * direction, {"momenta": average(m, g, self.beta_2, t=t)}


@dataclass(frozen=True, kw_only=True)
class FTRL(RatedOptimizer):
    """Recompute a row from its linear term z and its accumulator a; l1 makes entries exactly 0.

        a' = a + g²;  p = learning_rate_power;  z = z + g - (a'^(-p) - a^(-p)) w / lr
        w = 0 if |z| <= l1 else (l1 sgn z - z) / ((a'^(-p) + β) / lr + 2 l2)

    With `multiply_linear_by_learning_rate`, z is stored multiplied by lr. If lr changes, an old z
    is not rescaled.

        z = z + lr g - (a'^(-p) - a^(-p)) w
        w = 0 if |z| <= lr l1 else (lr l1 sgn z - z) / (a'^(-p) + β + 2 lr l2)

    The row is recomputed even if g is 0; a fresh row, whose z is 0, then becomes 0. Without the
    flag, lr = 0 leaves row and slots unchanged.

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      learning_rate_power: p, <= 0; -0.5 is Adagrad's square root, 0 a fixed learning rate.
      l1_regularization_strength: l1, >= 0.
      l2_regularization_strength: l2, >= 0.
      beta: β, >= 0, added to the root of the accumulator.
      initial_accumulator_value: the initial value of a, > 0; take a small one, such as 1e-6, if the
        loss is a mean over the batch, see `Adagrad`.
      multiply_linear_by_learning_rate: store z multiplied by lr.
      allow_zero_accumulator: allow 0 as the initial value of a.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a and `linears` z `[V, D]`,
    z initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"accumulators": jnp.full((1, 1), 9.0), "linears": jnp.zeros((1, 1))}
      >>> g = jnp.full((1, 1), 4.0)
      >>> rows, slots = FTRL(0.5).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> rows.tolist(), slots["linears"].tolist()
      ([[0.0]], [[0.0]])

    Reference:
      McMahan et al., "Ad click prediction: a view from the trenches", 2013.
    """

    learning_rate_power: float = accepts(
        -0.5, "a number <= 0", lambda value, _: value <= 0
    )
    l1_regularization_strength: float = non_negative(0.0)
    l2_regularization_strength: float = non_negative(0.0)
    beta: float = non_negative(0.0)
    initial_accumulator_value: float = accepts(
        0.1,
        "a number > 0 (>= 0 with allow_zero_accumulator=True)",
        lambda value, rule: value > 0 or (value == 0 and rule.allow_zero_accumulator),
    )
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", self.initial_accumulator_value), Slot(
            "linears", 0.0
        )

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        a, z = slots["accumulators"], slots["linears"]
        new_a = a + round_now(g**2, t)
        root = self._root(new_a)
        change = (root - self._root(a)) * w
        if self.multiply_linear_by_learning_rate:
            new_z = z + round_now(lr * g, t) - round_now(change, t)
            new_w = self._solve(new_z, root + self.beta, scale=lr, t=t)
            return new_w, {"accumulators": new_a, "linears": new_z}
        still, inverse = self._inverse(lr)
        new_z = z + g - round_now(change * inverse, t)
        quadratic = round_now((root + self.beta) * inverse, t)
        new_w = self._solve(new_z, quadratic, scale=jnp.ones_like(lr), t=t)
        new_slots = {"accumulators": new_a, "linears": new_z}
        # lr = 0: the numbers above were computed with 1 / lr = 1, and are dropped.
        kept = {
            name: jnp.where(still, slots[name], new) for name, new in new_slots.items()
        }
        return jnp.where(still, w, new_w), kept

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        if self.learning_rate_power != -0.5:
            return None
        multiplied = self.multiply_linear_by_learning_rate
        still, inverse = self._inverse(lr)
        take, over, scale = (
            (lr, 1.0, lr) if multiplied else (1.0, inverse, jnp.ones_like(lr))
        )
        strengths = (
            self.l1_regularization_strength,
            2.0 * scale * self.l2_regularization_strength,
        )
        numbers = (take, over, scale * strengths[0], strengths[1], self.beta)
        rests = jnp.zeros_like(lr) if multiplied else still.astype(lr.dtype)
        return CompiledRule("ftrl", ("accumulators", "linears"), (*numbers, rests))

    def _inverse(self, lr: Array) -> tuple[Array, Array]:
        """Return whether lr is 0, and 1 / lr (1 if lr is 0).

        The rule multiplies by this reciprocal. XLA would turn two divisions by the same scalar into
        products in some programs and not in others, which changes bits.
        """
        still = lr == 0
        return still, 1.0 / jnp.where(still, jnp.ones_like(lr), lr)

    def _root(self, a: Array) -> Array:
        """Return a^(-p)."""
        # A square root is correctly rounded, a power need not be.
        return (
            jnp.sqrt(a)
            if self.learning_rate_power == -0.5
            else a**-self.learning_rate_power
        )

    def _solve(self, z: Array, quadratic: Array, *, scale: Array, t: Array) -> Array:
        """Return the row that minimises z w + quadratic w² / 2 + scale (l1 |w| + l2 w²)."""
        l1 = scale * self.l1_regularization_strength
        denominator = quadratic + round_now(
            2.0 * scale * self.l2_regularization_strength, t
        )
        w = (round_now(l1 * jnp.sign(z), t) - z) / denominator
        return jnp.where(jnp.abs(z) <= l1, jnp.zeros_like(z), w)


@dataclass(frozen=True, kw_only=True)
class RMSProp(RatedOptimizer):
    """Divide the gradient by the root of its mean square, with momentum.

        s = ρ s + (1 - ρ) g²;  b = μ b + lr g / √(s + ε);  w = w - b

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      rho: ρ, in [0, 1).
      momentum: μ, in [0, 1).
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`. Slots: `ms` s, initially 1, and `momenta` b,
    initially 0, `[V, D]`.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"ms": jnp.ones((1, 1)), "momenta": jnp.zeros((1, 1))}
      >>> g = jnp.ones((1, 1))
      >>> rows, slots = RMSProp(0.5).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> print(f"{float(rows[0, 0]):.4f}")
      0.5000

    Reference:
      Tieleman and Hinton, lecture 6.5 of "Neural networks for machine learning", 2012.
    """

    rho: float = fraction(0.9)
    momentum: float = fraction(0.0)
    epsilon: float = positive(1e-7)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("ms", 1.0), Slot("momenta", 0.0)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        s = average(slots["ms"], g**2, self.rho, t=t)
        b = self.momentum * slots["momenta"] + lr * g / jnp.sqrt(s + self.epsilon)
        return w - b, {"ms": s, "momenta": b}


@dataclass(frozen=True, kw_only=True)
class CenteredRMSProp(RatedOptimizer):
    """Divide the gradient by an estimate of its standard deviation, with momentum.

        s = ρ s + (1 - ρ) g²;  c = ρ c + (1 - ρ) g
        b = μ b + lr g / √(max(s - c², 0) + ε);  w = w - b

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      rho: ρ, in [0, 1).
      momentum: μ, in [0, 1).
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`. Slots: `ms` s, initially 1, `mg` c and `momenta`
    b, initially 0, `[V, D]`.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {name: jnp.full((1, 1), first) for name, first in [("ms", 5), ("mg", 2.0)]}
      >>> slots |= {"momenta": jnp.zeros((1, 1))}
      >>> optimizer, g = CenteredRMSProp(0.5, rho=0.0), jnp.ones((1, 1))
      >>> _, slots = optimizer.update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> slots["ms"].tolist(), slots["mg"].tolist()
      ([[1.0]], [[1.0]])

    Reference:
      Graves, "Generating sequences with recurrent neural networks", 2013.
    """

    rho: float = fraction(0.9)
    momentum: float = fraction(0.0)
    epsilon: float = positive(1e-7)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("ms", 1.0), Slot("momenta", 0.0), Slot("mg", 0.0)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        s = average(slots["ms"], g**2, self.rho, t=t)
        c = average(slots["mg"], g, self.rho, t=t)
        # Rounding may make s smaller than c².
        variance = jnp.maximum(s - c**2, 0.0)
        b = self.momentum * slots["momenta"] + lr * g / jnp.sqrt(
            variance + self.epsilon
        )
        return w - b, {"ms": s, "momenta": b, "mg": c}


@dataclass(frozen=True, kw_only=True)
class Adadelta(RatedOptimizer):
    """Scale the gradient by the ratio of the root mean squares of past steps and gradients.

        a = ρ a + (1 - ρ) g²;  d = g √(u + ε) / √(a + ε);  u = ρ u + (1 - ρ) d²;  w = w - lr d

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      rho: ρ, in [0, 1).
      epsilon: ε, > 0.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a and `accum_updates` u,
    `[V, D]`, initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"accumulators": jnp.full((1, 1), 4.0), "accum_updates": jnp.ones((1, 1))}
      >>> g = jnp.full((1, 1), 2.0)
      >>> rows, slots = Adadelta(0.5).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> print(f"{float(rows[0, 0]):.4f}")
      0.5000

    Reference:
      Zeiler, "ADADELTA: an adaptive learning rate method", 2012.
    """

    rho: float = fraction(0.95)
    epsilon: float = positive(1e-7)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", 0.0), Slot("accum_updates", 0.0)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        u = slots["accum_updates"]
        a = average(slots["accumulators"], g**2, self.rho, t=t)
        d = g * jnp.sqrt(u + self.epsilon) / jnp.sqrt(a + self.epsilon)
        return w - lr * d, {
            "accumulators": a,
            "accum_updates": average(u, d**2, self.rho, t=t),
        }


Rule = Callable[
    [Array, Array, dict[str, Array], Array, Array], tuple[Array, Mapping[str, Array]]
]


def _checked_rule(what: str, rule: Any) -> Any:
    if not callable(rule):
        refuse(
            what,
            expected="a function (gradient, row, slots, learning_rate, step) -> (row, slots)",
            got=repr(rule),
        )
    return rule


@dataclasses.dataclass(frozen=True)
class CustomOptimizer(RowOptimizer):
    """Update each row with a function of the user's.

        w, slots = rule(g, w, slots, lr, t)

    The rule is mapped over the rows, so it sees one row at a time. If it sums over the row, use
    `row_sum`, `row_mean` and `row_norm`, which give the same bits for every number of devices and
    every placement (on CPU); `jnp.sum` does not. Two of these optimizers are equal if their rule is
    the same function and their options are equal. So define the function once, or else tables that
    use it do not stack.

    Args:
      rule: `(gradient [D], row [D], slots {name: [D]}, learning_rate scalar, step int32 scalar) ->
        (row [D], slots)`, in JAX functions.
      slots: the initial value of each slot by name: a number, or an initializer `(key, shape,
        dtype) -> array`, which is called once per row with the shape `(1, D)`.
      learning_rate: a number, a schedule of the step, or a callable without arguments.

    The other options are those of `RowOptimizer`.

    Raises:
      ValueError: an option is out of its range; at trace time, the rule returns another shape or
        other slots than it was given.

    Example:
      >>> import jax.numpy as jnp
      >>> def signed(gradient, row, slots, learning_rate, step):
      ...     return row - learning_rate * jnp.sign(gradient), {"seen": slots["seen"] + 1}
      >>> optimizer = CustomOptimizer(signed, {"seen": 0}, 0.5)
      >>> slots, g = {"seen": jnp.zeros((1, 2))}, jnp.array([[4.0, -8.0]])
      >>> rows, slots = optimizer.update_rows(jnp.ones((1, 2)), slots, g, 1, 0.5)
      >>> rows.tolist(), slots["seen"].tolist()
      ([[0.5, 1.5]], [[1.0, 1.0]])

    Reference:
      The custom optimizer of TensorFlow's TPU embedding: a function of gradient, weights and slots.
    """

    rule: Rule = field(metadata={"convert": _checked_rule})
    slots: Any = field(metadata={"convert": slot_values})
    learning_rate: LearningRate = field(default=0.01, metadata=LEARNING_RATE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(name, initial) for name, initial in self.slots)

    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        def update_row(g, w, slots):
            returned = self.rule(g, w, slots, lr, t)
            if not isinstance(returned, tuple) or len(returned) != 2:
                refuse(
                    "rule", expected="a pair (row, slots)", got=type(returned).__name__
                )
            new_w, new_slots = returned
            return _as_before("row", new_w, w), _same_slots(new_slots, slots)

        return jax.vmap(update_row)(g, w, slots)


def _same_slots(new: Mapping[str, Any], old: Slots) -> Slots:
    """Return the slots that the rule returned; `ValueError` if it was given other slots."""
    if not isinstance(new, Mapping) or set(new) != set(old):
        refuse(
            "slots of the rule",
            expected=f"{sorted(old)}",
            got=sorted(new) if isinstance(new, Mapping) else repr(new),
        )
    return {
        name: _as_before(f"slot {name!r} of the rule", new[name], old[name])
        for name in old
    }


def _as_before(what: str, new: Any, old: Array) -> Array:
    """Return an array in the dtype of the old one; `ValueError` if the shapes differ."""
    if jnp.shape(new) != old.shape:
        refuse(what, expected=f"shape {old.shape}", got=jnp.shape(new))
    return jnp.asarray(new).astype(old.dtype)
