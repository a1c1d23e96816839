"""Adagrad followed by a proximal step, which shrinks the row by l1 and l2.

Input: rows, their sums of squared gradients, and gradients.
Output: the rows and the sums after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import NON_NEGATIVE, POSITIVE, RatedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    l1: float = field(default=0.0, metadata=NON_NEGATIVE)
    l2: float = field(default=0.0, metadata=NON_NEGATIVE)
    initial_accumulator_value: float = field(default=0.1, metadata=POSITIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value),)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        a = slots["accumulators"] + g**2
        eta = lr / jnp.sqrt(a)
        y = w - eta * g
        shrunk = jnp.sign(y) * jnp.maximum(jnp.abs(y) - eta * self.l1, 0.0)
        return shrunk / (1.0 + eta * self.l2), {"accumulators": a}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return None
