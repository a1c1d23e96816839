"""The classic optimizer over a whole model, made of a rule or an optax transform.

Its verbs are those of `TreeOptimizer`; `CrossShardOptimizer` takes one and adds the replicas.
"""

from __future__ import annotations

from typing import final

import optax

from tpu_embed._checks import message
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.training.optimizer.declared import DeclaredOptimizer
from tpu_embed.training.optimizer.verbs import TreeOptimizer, checked_name
from tpu_embed.training.replicas import AxisName, Reduction, make_replicas

__all__ = ["Optimizer"]


@final
class Optimizer(TreeOptimizer):
    """Minimise a loss of a tree of parameters.

    Its verbs are those of `TreeOptimizer`. It pickles when `tx_or_rule` does.

    Args:
      tx_or_rule: one of `tpu_embed.optimizers`, whose rule is applied to the rows of dense
        parameters too (`as_optax`), or an optax transform.
      name: of the optimizer.
      axis_name: mesh axes over which gradients are summed, as in `CrossShardOptimizer`; None:
        nothing is scaled or summed.
      reduction: over these axes, "mean" or "sum" of the losses.

    Raises:
      ValueError: an empty name, another optimizer or reduction.

    Example:
      >>> import jax.numpy as jnp
      >>> from tpu_embed.optimizers import Adagrad
      >>> optimizer = Optimizer(Adagrad(0.5), "adagrad")
      >>> params = {"w": jnp.ones(2), "b": jnp.zeros(())}
      >>> state = optimizer.init(params)
      >>> def loss(params):
      ...     return (params["w"] ** 2).sum()
      >>> params, state, value = optimizer.minimize(loss, params, state)
      >>> float(value), [round(float(w), 3) for w in params["w"]]
      (2.0, [0.506, 0.506])
      >>> optimizer.get_slot_names(state), int(state.step)
      (['accumulators'], 1)

    Reference:
      The optimizer of TensorFlow 1, its verbs and their order; optax, its explicit state.
    """

    def __init__(
        self,
        tx_or_rule: TableOptimizer | optax.GradientTransformation,
        name: str,
        *,
        axis_name: AxisName | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self._name = checked_name("Optimizer", name)
        self._declared = DeclaredOptimizer(tx_or_rule)
        self._shards = make_replicas(name, axis_name, reduction)
        if axis_name is not None and self._declared.sums_itself:
            raise _summed_twice(name, "cross_shard(...)")

    def lifts_for(self, what: str) -> DeclaredOptimizer:
        """Return what it applies, for another that sums gradients before.

        Args:
          what: the other, for messages.

        Raises:
          ValueError: this one sums them too.
        """
        what = f"{what}: optimizer {self._name}"
        if self._shards.names:
            raise _summed_twice(what, f"axis_name {self._shards.names}")
        if self._declared.sums_itself:
            raise _summed_twice(what, "cross_shard(...)")
        return self._declared


def _summed_twice(what: str, got: str) -> ValueError:
    expected = "an optimizer without an axis of its own"
    remedy = "leave the axis out of one of the two: gradients are summed once"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))
