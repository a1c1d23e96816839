"""FTRL-proximal: each row minimises a regularised sum of all its past gradients.

Input: rows, their sums of squared gradients, their linear terms, and gradients.
Output: the rows and both slots after one update.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.arithmetic import round_now
from tpu_embed.optimizers.base import Slot, Slots, Updated
from tpu_embed.optimizers.row_optimizer import RatedOptimizer, accepts, non_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(RatedOptimizer):
    """Recompute a row from its linear term z and its accumulator a; l1 makes entries exactly 0.

        a' = a + g²;  p = learning_rate_power;  z = z + g - (a'^(-p) - a^(-p)) w / lr
        w = 0 if |z| <= l1 else (l1 sgn z - z) / ((a'^(-p) + β) / lr + 2 l2)

    With `multiply_linear_by_learning_rate`, z is stored multiplied by lr. If lr changes, an old z
    is not rescaled.

        z = z + lr g - (a'^(-p) - a^(-p)) w
        w = 0 if |z| <= lr l1 else (lr l1 sgn z - z) / (a'^(-p) + β + 2 lr l2)

    The row is recomputed even if g is 0; a fresh row, whose z is 0, then becomes 0. Without the
    flag, lr = 0 leaves row and slots unchanged.

    Args:
      learning_rate: lr, a number, a schedule of the step, or a callable without arguments.
      learning_rate_power: p, <= 0; -0.5 is Adagrad's square root, 0 a fixed learning rate.
      l1_regularization_strength: l1, >= 0.
      l2_regularization_strength: l2, >= 0.
      beta: β, >= 0, added to the root of the accumulator.
      initial_accumulator_value: the initial value of a, > 0; take a small one, such as 1e-6, if the
        loss is a mean over the batch, see `Adagrad`.
      multiply_linear_by_learning_rate: store z multiplied by lr.
      allow_zero_accumulator: allow 0 as the initial value of a.

    The other options are those of `RowOptimizer`. Slots: `accumulators` a and `linears` z `[V, D]`,
    z initially 0.

    Raises:
      ValueError: an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> slots = {"accumulators": jnp.full((1, 1), 9.0), "linears": jnp.zeros((1, 1))}
      >>> g = jnp.full((1, 1), 4.0)
      >>> rows, slots = FTRL(0.5).update_rows(jnp.ones((1, 1)), slots, g, 1, 0.5)
      >>> rows.tolist(), slots["linears"].tolist()
      ([[0.0]], [[0.0]])

    Reference:
      McMahan et al., "Ad click prediction: a view from the trenches", 2013.
    """

    learning_rate_power: float = accepts(-0.5, "a number <= 0", lambda value, _: value <= 0)
    l1_regularization_strength: float = non_negative(0.0)
    l2_regularization_strength: float = non_negative(0.0)
    beta: float = non_negative(0.0)
    initial_accumulator_value: float = accepts(
        0.1,
        "a number > 0 (>= 0 with allow_zero_accumulator=True)",
        lambda value, rule: value > 0 or (value == 0 and rule.allow_zero_accumulator),
    )
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False

    def declared_slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", self.initial_accumulator_value), Slot("linears", 0.0)

    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        a, z = slots["accumulators"], slots["linears"]
        new_a = a + round_now(g**2, t)
        root = self._root(new_a)
        change = (root - self._root(a)) * w
        if self.multiply_linear_by_learning_rate:
            new_z = z + round_now(lr * g, t) - round_now(change, t)
            new_w = self._solve(new_z, root + self.beta, scale=lr, t=t)
            return new_w, {"accumulators": new_a, "linears": new_z}
        still, inverse = self._inverse(lr)
        new_z = z + g - round_now(change * inverse, t)
        quadratic = round_now((root + self.beta) * inverse, t)
        new_w = self._solve(new_z, quadratic, scale=jnp.ones_like(lr), t=t)
        new_slots = {"accumulators": new_a, "linears": new_z}
        # lr = 0: the numbers above were computed with 1 / lr = 1, and are dropped.
        kept = {name: jnp.where(still, slots[name], new) for name, new in new_slots.items()}
        return jnp.where(still, w, new_w), kept

    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        if self.learning_rate_power != -0.5:
            return None
        multiplied = self.multiply_linear_by_learning_rate
        still, inverse = self._inverse(lr)
        take, over, scale = (lr, 1.0, lr) if multiplied else (1.0, inverse, jnp.ones_like(lr))
        strengths = (self.l1_regularization_strength, 2.0 * scale * self.l2_regularization_strength)
        numbers = (take, over, scale * strengths[0], strengths[1], self.beta)
        rests = jnp.zeros_like(lr) if multiplied else still.astype(lr.dtype)
        return CompiledRule("ftrl", ("accumulators", "linears"), (*numbers, rests))

    def _inverse(self, lr: Array) -> tuple[Array, Array]:
        """Return whether lr is 0, and 1 / lr (1 if lr is 0).

        The rule multiplies by this reciprocal. XLA would turn two divisions by the same scalar into
        products in some programs and not in others, which changes bits.
        """
        still = lr == 0
        return still, 1.0 / jnp.where(still, jnp.ones_like(lr), lr)

    def _root(self, a: Array) -> Array:
        """Return a^(-p)."""
        # A square root is correctly rounded, a power need not be.
        return jnp.sqrt(a) if self.learning_rate_power == -0.5 else a**-self.learning_rate_power

    def _solve(self, z: Array, quadratic: Array, *, scale: Array, t: Array) -> Array:
        """Return the row that minimises z w + quadratic w² / 2 + scale (l1 |w| + l2 w²)."""
        l1 = scale * self.l1_regularization_strength
        denominator = quadratic + round_now(2.0 * scale * self.l2_regularization_strength, t)
        w = (round_now(l1 * jnp.sign(z), t) - z) / denominator
        return jnp.where(jnp.abs(z) <= l1, jnp.zeros_like(z), w)
