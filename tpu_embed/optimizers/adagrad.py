"""Adagrad: each entry of a row has its own step size, which falls with the gradients it has seen.

Input: rows, their sums of squared gradients, and gradients.
Output: the rows and the sums after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import round_now
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import NON_NEGATIVE, POSITIVE, RatedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    initial_accumulator_value: float = field(default=0.1, metadata=POSITIVE)
    epsilon: float = field(default=0.0, metadata=NON_NEGATIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value),)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        # Every intermediate that the compiled kernel rounds is rounded here too: equal bits.
        a = slots["accumulators"] + round_now(g**2, t)
        return w - lr * g / round_now(jnp.sqrt(a) + self.epsilon, t), {"accumulators": a}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("adagrad", ("accumulators",), (lr, self.epsilon))
