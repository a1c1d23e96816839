"""Adadelta: the size of a step follows the size of past steps, so that units match.

Input: rows, their averages of squared gradients and squared steps, and gradients.
Output: the rows and both averages after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import average
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import FRACTION, POSITIVE, RatedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    rho: float = field(default=0.95, metadata=FRACTION)
    epsilon: float = field(default=1e-7, metadata=POSITIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", 0.0), Slot("accum_updates", 0.0)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        u = slots["accum_updates"]
        a = average(slots["accumulators"], g**2, self.rho, t=t)
        d = g * jnp.sqrt(u + self.epsilon) / jnp.sqrt(a + self.epsilon)
        return w - lr * d, {"accumulators": a, "accum_updates": average(u, d**2, self.rho, t=t)}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
