"""One optimizer, applied in two ways: to whole parameters, and to single rows of a table.

A dense parameter is updated by an optax transform. A table with a sparse gradient is updated by a
rule over rows, which reads and writes only the rows that the gradient names.

Input: one of `tpu_embed.optimizers`, or an optax transform.
Output: `DeclaredOptimizer`, which has both: `dense`, the transform, and `rows`, the rule.
"""

from __future__ import annotations

import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import optax

from tpu_embed._checks import message
from tpu_embed._types import ArrayLike, PyTree
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.dense import dense_transform, rate_of
from tpu_embed.optimizers.optax_rows import OptaxOptimizer


@final
class SumsItself(optax.GradientTransformationExtraArgs):
    """Marker type of the transforms of `cross_shard`, so that gradients are not summed twice."""


def summed_twice(what: str, got: str) -> ValueError:
    """Return the error of an optimizer that sums gradients inside of another that does.

    Args:
      what: the name of the optimizer, for messages.
      got: what sums inside.
    """
    expected = "an optimizer without an axis of its own"
    remedy = "sum once: leave the axis out of one, or give the transform inside cross_shard"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))


@final
class DeclaredOptimizer:
    """Hold an optimizer as a transform of trees, and make a rule over rows of it on first use.

    Args:
      given: one of `tpu_embed.optimizers`, or an optax transform.

    Raises:
      ValueError: `given` is neither.
    """

    def __init__(self, given: Any) -> None:
        # Both are wrappers around an optax transform, and handled as that transform.
        if isinstance(given, OptaxOptimizer):
            given = given.transform
        if isinstance(given, optax.MultiSteps):
            given = given.gradient_transformation()
        self._given = given
        self.sums_itself = isinstance(given, SumsItself)
        self.rule: TableOptimizer | None = None
        if isinstance(given, TableOptimizer):
            self.rule = given
            self.dense = dense_transform(given, seed=0)
        elif isinstance(given, optax.GradientTransformation):
            self.dense = optax.with_extra_args_support(given)
        else:
            made = f"{given.__name__}(...)" if isinstance(given, type) else "optimizers.SGD(0.1)"
            raise ValueError(
                message(
                    "optimizer",
                    expected="one of tpu_embed.optimizers or an optax transform",
                    got=repr(given),
                    remedy=f"make one: {made}",
                )
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was given; the transform made from a rule has functions that cannot be."""
        return DeclaredOptimizer, (self._given,)

    @functools.cached_property
    def rows(self) -> TableOptimizer:
        """The rule over rows.

        Raises:
          ValueError: the transform is not row-separable.
        """
        # A property and not made in __init__: a transform that is not row-separable is still an
        # optimizer of dense parameters.
        if self.rule is not None:
            return self.rule
        try:
            return OptaxOptimizer(self.dense)
        except ValueError as error:
            raise ValueError(
                message(
                    "IndexedSlices",
                    expected="a rule over rows",
                    got=f"an optax transform that is not one ({error})",
                    remedy="give tables an Optimizer of their own: var_list chooses parameters",
                )
            ) from error

    def update(
        self, gradients: PyTree, state: PyTree, params: PyTree, learning_rate: ArrayLike | None
    ) -> tuple[PyTree, PyTree]:
        """Return the updates and the next state of the transform.

        Raises:
          ValueError: the transform needs the loss (as `optax.polyak_sgd` does).
        """
        extra = {} if learning_rate is None else {"learning_rate": learning_rate}
        try:
            return self.dense.update(gradients, state, params, **extra)
        except TypeError as error:
            if not self._reads_the_loss(gradients, state, params):
                raise
            raise ValueError(
                message(
                    "optimizer",
                    expected="a transform of gradients, state and parameters alone",
                    got=f"one that reads the loss too ({error})",
                    remedy="call its own update(grads, state, params, value=, grad=, value_fn=)",
                )
            ) from error

    def _reads_the_loss(self, gradients: PyTree, state: PyTree, params: PyTree) -> bool:
        """Return whether an update that failed would succeed if it were given the loss."""
        # The names under which optax passes the loss: its value, its gradient, and its function.
        value = jnp.zeros(())
        loss = {"value": value, "grad": gradients, "value_fn": lambda _: value}
        try:
            jax.eval_shape(lambda: self.dense.update(gradients, state, params, **loss))
        except Exception:
            return False  # a user's own transform may raise anything; its first error says more
        return True

    def learning_rate(self, step: ArrayLike, given: ArrayLike | None) -> ArrayLike | None:
        """Return the learning rate of an update, None if the transform holds its own.

        Args:
          step: int32 scalar t, 1 at the first update.
          given: the rate that a user gives instead of the rule's, or None.

        Raises:
          ValueError: a rate is given to an optax transform, or is missing inside a jit.
        """
        if self.rule is None:
            if given is not None:
                raise ValueError(
                    message(
                        "learning_rate",
                        expected="none: an optax transform holds its own",
                        got=repr(given),
                        remedy="optax.inject_hyperparams puts it into the state",
                    )
                )
            return None
        remedy = "apply_gradients(..., learning_rate=value)"
        return rate_of(self.rule, step, given, remedy=remedy)
