"""What a user passed as an optimizer, in the two forms in which it is applied.

Leaves: an optax transform for dense parameters, and a rule over rows for tables whose gradient is
sparse. Called by the verbs of `TreeOptimizer`.
"""

from __future__ import annotations

import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import optax

from tpu_embed._checks import message
from tpu_embed._types import ArrayLike, PyTree, Tracer
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.dense import dense_transform
from tpu_embed.optimizers.learning_rate import LearningRateKind, learning_rate_kind
from tpu_embed.optimizers.optax_rows import OptaxOptimizer

__all__ = ["DeclaredOptimizer"]


@final
class SumsItself(optax.GradientTransformationExtraArgs):
    """What `cross_shard` makes: known again, so that gradients are not summed twice."""


@final
class DeclaredOptimizer:
    """Hold an optimizer as a transform of trees, and make it one of rows when that is asked.

    Args:
      given: one of `tpu_embed.optimizers`, or an optax transform.

    Raises:
      ValueError: it is neither.
    """

    def __init__(self, given: Any) -> None:
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
            expected = "one of tpu_embed.optimizers or an optax transform"
            made = f"{given.__name__}(...)" if isinstance(given, type) else "optimizers.SGD(0.1)"
            remedy = f"make one: {made}"
            raise ValueError(
                message("optimizer", expected=expected, got=repr(given), remedy=remedy)
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was given: the transform made of a rule is functions without a name."""
        return DeclaredOptimizer, (self._given,)

    @functools.cached_property
    def rows(self) -> TableOptimizer:
        """The rule over rows.

        Raises:
          ValueError: the transform is not row-separable.
        """
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

    @property
    def every_row(self) -> bool:
        """Whether a sparse gradient changes rows that it does not name."""
        return self.rule is not None and self.rule.updates_every_row

    def update(
        self, gradients: PyTree, state: PyTree, params: PyTree, learning_rate: ArrayLike | None
    ) -> tuple[PyTree, PyTree]:
        """Return the transform's updates and next state.

        Raises:
          ValueError: it is one that reads the loss.
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
        """Tell whether an update that fails would do with the loss."""

        def update() -> PyTree:
            value = jnp.zeros(())
            loss = {"value": value, "grad": gradients, "value_fn": lambda _: value}
            return self.dense.update(gradients, state, params, **loss)

        try:
            jax.eval_shape(update)
        except Exception:
            return False  # the transform's own code: the error that it gave first says more
        return True

    def learning_rate(self, step: ArrayLike, given: ArrayLike | None) -> ArrayLike | None:
        """Return the rate of an update, None where the transform holds its own.

        Args:
          step: int32 scalar t, 1 at the first update.
          given: what the user gives instead, or None.

        Raises:
          ValueError: one is given to a transform, or is missing inside a jit.
        """
        if self.rule is None:
            if given is not None:
                expected = "none: an optax transform holds its own"
                remedy = "optax.inject_hyperparams puts it into the state"
                got = repr(given)
                raise ValueError(
                    message("learning_rate", expected=expected, got=got, remedy=remedy)
                )
            return None
        if given is not None:
            return given
        rate: Any = self.rule.learning_rate
        if learning_rate_kind(rate) is not LearningRateKind.HOST:
            return self.rule.resolve_learning_rate(step, None)
        if isinstance(step, Tracer):
            raise ValueError(
                message(
                    "learning_rate",
                    expected="the value of a callable without arguments, called outside the jit",
                    got="none",
                    remedy="apply_gradients(..., learning_rate=value)",
                )
            )
        return rate()
