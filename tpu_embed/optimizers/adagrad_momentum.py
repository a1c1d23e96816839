"""Adagrad with momentum, and with an exponent other than the square root if wanted.

Input: rows, their sums (or averages) of squared gradients, their momenta, and gradients.
Output: the rows and both slots after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, POSITIVE, RatedOptimizer, accepts

_BETA_2 = accepts("a number in (0, 1]", lambda value, _: 0 < value <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    momentum: float = field(default=0.0, metadata=FRACTION)
    use_nesterov: bool = False
    exponent: float = field(default=2.0, metadata=POSITIVE)
    beta2: float = field(default=1.0, metadata=_BETA_2)
    epsilon: float = field(default=1e-10, metadata=POSITIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", 0.0), Slot("momenta", 0.0)

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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
