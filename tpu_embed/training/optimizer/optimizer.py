"""The classic optimizer of a whole parameter tree, made from a table's rule or an optax transform.

Input: one of `tpu_embed.optimizers` or an optax transform, and optionally the replicas' mesh axes.
Output: `Optimizer`, with the methods of `TreeOptimizer`.
"""

from __future__ import annotations

from typing import final

import optax

from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.training.optimizer.declared import DeclaredOptimizer, summed_twice
from tpu_embed.training.optimizer.verbs import TreeOptimizer, checked_name
from tpu_embed.training.replicas import AxisName, Reduction, make_replicas


@final
class Optimizer(TreeOptimizer):
    """Minimise a loss of a tree of parameters.

    Its methods are those of `TreeOptimizer`. It can be pickled if `tx_or_rule` can.

    Args:
      tx_or_rule: one of `tpu_embed.optimizers`, whose rule is also applied to dense parameters
        (`as_optax`), or an optax transform.
      name: the name of the optimizer, which messages say.
      axis_name: the mesh axes over which gradients are summed, as in `CrossShardOptimizer`. With
        None nothing is scaled or summed.
      reduction: whether the global loss is the "mean" or the "sum" over these axes.

    Raises:
      ValueError: an empty name, something that is not an optimizer, or an unknown reduction.

    Example:
      >>> import jax.numpy as jnp
      >>> from tpu_embed.optimizers import Adagrad
      >>> optimizer = Optimizer(Adagrad(0.5))
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
        name: str = "Optimizer",
        *,
        axis_name: AxisName | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self._name = checked_name("Optimizer", name)
        self._declared = DeclaredOptimizer(tx_or_rule)
        self._replicas = make_replicas(name, axis_name, reduction, required=False)
        # cross_shard sums the gradients itself; without an axis here it may do so.
        if axis_name is not None and self._declared.sums_itself:
            raise summed_twice(name, "cross_shard(...)")

    def declared_for(self, what: str) -> DeclaredOptimizer:
        """Return the optimizer inside this one, for a wrapper that sums gradients itself.

        Args:
          what: the name of the wrapper, for messages.

        Raises:
          ValueError: this optimizer sums gradients too.
        """
        what = f"{what}: optimizer {self._name}"
        if self._replicas.names:
            raise summed_twice(what, f"axis_name {self._replicas.names}")
        if self._declared.sums_itself:
            raise summed_twice(what, "cross_shard(...)")
        return self._declared
