"""Adagrad and its relatives: steps fall with the squared gradients that a row has seen.

Input: rows, their sums (or averages) of squared gradients, and gradients.
Output: the rows and their slots after one update.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average, round_now, row_mean
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import (
    RatedOptimizer,
    accepts,
    fraction,
    non_negative,
    positive,
)


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

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        # Every intermediate that the compiled kernel rounds is rounded here too: equal bits.
        a = slots["accumulators"] + round_now(g**2, t)
        return w - lr * g / round_now(jnp.sqrt(a) + self.epsilon, t), {"accumulators": a}

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

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        a = slots["accumulators"] + g**2
        eta = lr / jnp.sqrt(a)
        y = w - eta * g
        shrunk = jnp.sign(y) * jnp.maximum(jnp.abs(y) - eta * self.l1, 0.0)
        return shrunk / (1.0 + eta * self.l2), {"accumulators": a}
