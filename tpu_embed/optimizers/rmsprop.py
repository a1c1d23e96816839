"""RMSProp and Adadelta: gradients divided by the root of their mean square.

Input: rows, their moving averages, their momenta, and gradients.
Output: the rows and the slots after one update.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import RatedOptimizer, fraction, positive


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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        s = average(slots["ms"], g**2, self.rho, t=t)
        c = average(slots["mg"], g, self.rho, t=t)
        # Rounding may make s smaller than c².
        variance = jnp.maximum(s - c**2, 0.0)
        b = self.momentum * slots["momenta"] + lr * g / jnp.sqrt(variance + self.epsilon)
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

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        u = slots["accum_updates"]
        a = average(slots["accumulators"], g**2, self.rho, t=t)
        d = g * jnp.sqrt(u + self.epsilon) / jnp.sqrt(a + self.epsilon)
        return w - lr * d, {"accumulators": a, "accum_updates": average(u, d**2, self.rho, t=t)}
