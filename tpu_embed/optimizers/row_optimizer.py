"""The base of our own rules: hyperparameters in a frozen dataclass, and one row-separable rule.

The rule is written once, over rows. The engine applies it to the touched rows of a table, and
`as_optax` applies it to dense trees. Options that all rules share, such as weight decay and
clipping, stand around the rule.

Input: rows, their slots, and their gradients.
Output: the rows and the slots after one update.
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import optax

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike
from tpu_embed.kernels.rules import CompiledRule
from tpu_embed.optimizers import _options
from tpu_embed.optimizers._rounding import round_now
from tpu_embed.optimizers.base import Slot, Slots, SlotShape, TableOptimizer, Updated
from tpu_embed.optimizers.dense import dense_transform
from tpu_embed.optimizers.learning_rate import LearningRate

_OPTIONAL = _options.converted(_options.optional_number)
_SLOT_VALUES = _options.converted(_options.slot_values)
_CLIPVALUE = _options.converted(_options.clip_bounds) | _options.accepts(
    "None with use_gradient_accumulation=False (clip before the update, or accumulate)",
    lambda value, optimizer: value is None or optimizer.use_gradient_accumulation,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer(TableOptimizer):
    """Hold the options common to all rules; optimizers are equal and hashable by value.

    One update of a touched row w with gradient g:

        g = clip(g, clipvalue)
        w = (1 - λ) w
        w, slots = rule(w, slots, g)
        w = clip(w, clip_weight)

    Args:
      use_gradient_accumulation: sum the gradients of a row, then update it once. With False there
        is one update per occurrence of the row.
      clip_weight_min: lower bound of the new row, or None.
      clip_weight_max: upper bound of the new row, or None.
      weight_decay_factor: λ, or None.
      multiply_weight_decay_factor_by_learning_rate: use λ multiplied by this step's learning rate.
      clipvalue: bounds of the gradient: None, c for (-c, c), or (min, max), either of which may
        be None.
      slot_initializers: initial values of slots by name: numbers, or initializers `(key, shape,
        dtype) -> array`. These are called once per row with the shape `(1, D)`, or `(1,)` for a
        slot with one number per row.

    Raises:
      ValueError: an option is out of its range, or `slot_initializers` names an unknown slot.
    """

    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = field(default=None, metadata=_OPTIONAL)
    clip_weight_max: float | None = field(default=None, metadata=_OPTIONAL)
    weight_decay_factor: float | None = field(default=None, metadata=_OPTIONAL)
    multiply_weight_decay_factor_by_learning_rate: bool = False
    clipvalue: Any = field(default=None, metadata=_CLIPVALUE)
    slot_initializers: Any = field(default=(), metadata=_SLOT_VALUES)

    decay_in_rule: ClassVar[bool] = False
    """Whether the rule itself uses the decay factor; `update_rows` then does not."""

    @final
    def __post_init__(self) -> None:
        _options.normalise(self)

    @abc.abstractmethod
    def declared_slots(self) -> tuple[Slot, ...]:
        """Return the rule's slots, with the initial values that its own options give."""

    @abc.abstractmethod
    def apply_rule(self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array) -> Updated:
        """Return rows and slots after the rule alone, without the options around it.

        A rule may reduce over the last axis only: rows must not depend on each other.

        Args:
          w: rows `[n, D]`, after weight decay.
          slots: `[n, D]`, or `[n]` for one number per row.
          g: gradients `[n, D]`, clipped.
          t: int32 scalar, the step.
          lr: scalar of the rows' dtype.
        """

    @abc.abstractmethod
    def compiled(self, *, t: Array, lr: Array) -> CompiledRule | None:
        """Return the rule alone for the compiled kernels, or None if they do not implement it."""

    @property
    @final
    def updates_every_row(self) -> bool:
        return any(slot.every_row for slot in self.declared_slots())

    @final
    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        declared = self.declared_slots()
        return {
            s.name: SlotShape(() if s.one_number else (dim,), jnp.dtype(dtype)) for s in declared
        }

    @final
    def init_slots(self, rows: Array, keys: Array) -> Slots:
        given = dict(self.slot_initializers)
        return {
            slot.name: _initial_slot(slot, given.get(slot.name, slot.initial), rows, keys)
            for slot in self.declared_slots()
        }

    @final
    def update_rows(
        self,
        rows: Array,
        slots: Mapping[str, Array],
        gradients: Array,
        step: ArrayLike,
        learning_rate: ArrayLike,
    ) -> Updated:
        rate = as_array(learning_rate).astype(rows.dtype)
        if self.clipvalue is not None:
            gradients = jnp.clip(gradients, *self.clipvalue)
        if self.weight_decay_factor and not self.decay_in_rule:
            rows = round_now(rows * self._keep(step, rate), step)
        rows, new_slots = self.apply_rule(
            rows, dict(slots), gradients, t=jnp.asarray(step), lr=rate
        )
        if self.clip_weight_min is not None or self.clip_weight_max is not None:
            rows = jnp.clip(rows, self.clip_weight_min, self.clip_weight_max)
        return rows, new_slots

    @final
    def compiled_rule(self, step: ArrayLike, learning_rate: Array) -> CompiledRule | None:
        rule = self.compiled(t=jnp.asarray(step), lr=learning_rate)
        if rule is None:
            return None
        decays = self.weight_decay_factor and not self.decay_in_rule
        return dataclasses.replace(
            rule,
            keep=self._keep(step, learning_rate) if decays else 1.0,
            gradient_bounds=self.clipvalue or (None, None),
            weight_bounds=(self.clip_weight_min, self.clip_weight_max),
        )

    def _keep(self, step: ArrayLike, learning_rate: Array) -> Array:
        """Return 1 - λ."""
        decay = jnp.asarray(self.decay_factor(learning_rate), learning_rate.dtype)
        return 1.0 - round_now(decay, step)

    @final
    def decay_factor(self, learning_rate: Array) -> Array | float:
        """Return this step's λ."""
        decay = self.weight_decay_factor or 0.0
        return (
            decay * learning_rate if self.multiply_weight_decay_factor_by_learning_rate else decay
        )

    @final
    def as_optax(self, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
        """Return the rule as an optax transform for dense trees.

        The last axis of a leaf is the row; a scalar leaf is a row of one number. Every row counts
        as touched. `optax.apply_updates` gives the rule's new rows up to rounding. Both kinds of
        clipping and weight decay work as in a table; `use_gradient_accumulation` has no effect.

        Args:
          seed: the seed of the keys for those `slot_initializers` that draw numbers.

        Returns:
          a transform. Its state holds the step as `count`, and in `slots` one tree per slot, shaped
          like the parameters. `update` needs `params`. A learning rate that is a callable without
          arguments is called by `update` outside of a jit; inside a jit give its value:
          `update(..., learning_rate=value)`.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from tpu_embed.optimizers import Momentum
          >>> tx = Momentum(0.1).as_optax()
          >>> params = {"w": jnp.ones((2, 3))}
          >>> state = tx.init(params)
          >>> updates, state = tx.update({"w": jnp.ones((2, 3))}, state, params)
          >>> float(optax.apply_updates(params, updates)["w"][0, 0])
          0.8999999761581421
          >>> sorted(state.slots), int(state.count)
          (['momenta'], 1)

        Reference:
          optax: an optimizer is a pair of pure functions, init and update.
        """
        return dense_transform(self, seed=seed)

    @final
    def describe(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"class": type(self).__name__} | {
            name: _plain(value) for name, value in fields.items()
        }


@dataclasses.dataclass(frozen=True)
class RatedOptimizer(RowOptimizer):
    """Take the learning rate as the first argument, and all other options by keyword."""

    learning_rate: LearningRate = field(default=0.001, metadata=_options.LEARNING_RATE)


def _initial_slot(slot: Slot, initial: Any, rows: Array, keys: Array) -> Array:
    """Return the slot of fresh rows: `[n, D]`, or `[n]` for one number per row."""
    shape = (rows.shape[0],) if slot.one_number else rows.shape
    if not callable(initial):
        return jnp.full(shape, initial, rows.dtype)
    # Each row draws from its own key, so that its numbers depend neither on how rows are placed on
    # devices nor on other rows; the slot's name makes slots of one row differ.
    one_row = (1, *shape[1:])
    tag = zlib.crc32(slot.name.encode())

    def draw(key: Array) -> Array:
        value: Any = initial(jax.random.fold_in(key, tag), one_row, rows.dtype)
        if jnp.shape(value) != one_row:
            what = f"initializer of slot {slot.name!r}"
            raise ValueError(message(what, expected=f"shape {one_row}", got=jnp.shape(value)))
        return jnp.asarray(value).astype(rows.dtype)[0]

    return jax.vmap(draw)(keys)


def _plain(value: Any) -> Any:
    """Return an option as an object that JSON can hold; a callable becomes its name."""
    # (("m", 1.0),) -> {"m": 1.0}; (-1.0, None) -> [-1.0, None].
    if isinstance(value, tuple):
        pairs = value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        return {name: _plain(v) for name, v in value} if pairs else [_plain(v) for v in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value
