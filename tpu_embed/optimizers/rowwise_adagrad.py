"""Adagrad with one accumulator per row: all entries of a row share a step size.

Input: rows, one accumulator per row, and gradients.
Output: the rows and the accumulators after one update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import round_now, row_mean
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import NON_NEGATIVE, POSITIVE, RatedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    initial_accumulator_value: float = field(default=0.1, metadata=POSITIVE)
    epsilon: float = field(default=1e-8, metadata=NON_NEGATIVE)

    def declared_slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", self.initial_accumulator_value, one_number=True),)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        mean = round_now(row_mean(round_now(g**2, t)), t)
        a = slots["accumulators"] + mean[:, 0]
        rate = lr / round_now(jnp.sqrt(a) + self.epsilon, t)
        return w - round_now(g * rate[:, None], t), {"accumulators": a}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        return CompiledRule("rowwise_adagrad", ("accumulators",), (lr, self.epsilon))
