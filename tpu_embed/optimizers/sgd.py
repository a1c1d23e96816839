"""Stochastic gradient descent: steps along the gradient, or a decaying sum of past gradients.

Input: rows, their momenta if they have any, and gradients.
Output: the rows and the momenta after one update.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import round_now
from tpu_embed.optimizers.base import LearningRate, Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import LEARNING_RATE, RatedOptimizer, RowOptimizer, fraction


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

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
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

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        m = round_now(self.momentum * slots["momenta"], t) + g
        direction = g + round_now(self.momentum * m, t) if self.use_nesterov else m
        return w - round_now(lr * direction, t), {"momenta": m}

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        numbers = (lr, self.momentum)
        return CompiledRule("momentum", ("momenta",), numbers, flag=self.use_nesterov)
