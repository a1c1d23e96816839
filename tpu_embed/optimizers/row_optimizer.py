"""The base of our own rules: hyperparameters in a frozen dataclass, and one row-separable rule.

The rule is written once, over rows. The engine applies it to the touched rows of a table, and
`as_optax` applies it to dense trees, as an optax transform: a dense leaf counts as a table of which
every row is touched, and its last axis is the row. Options that all rules share, such as weight
decay and clipping, stand around the rule.

Optimizers are equal by value, so every option is stored in one way: `0.1`, `np.float32(0.1)` and a
0-d array all become a Python float. Each field of a rule says in its metadata what it accepts.

The arithmetic of rules gives the same bits in every program and in the compiled kernels. On CPU,
XLA may fuse a product and a sum into one multiply-add, which rounds once instead of twice. Whether
it does depends on the surrounding program, and optimization barriers are gone by then. It may also
turn a division by a root into a product with a reciprocal root. `round_now` prevents both. XLA
chooses the order of a sum itself, too. Its choice changes with the number of rows on a device,
hence with devices and placements, and the last bits of the sum change with it. `row_sum` adds the
upper half of the row to the lower half until one number is left. And a moving average that starts
at 0 is too small in the first steps; dividing by 1 - βᵗ corrects that.

Input: an optimizer as a user constructs it; then rows, their slots, and their gradients.
Output: the optimizer with every option checked; then rows and slots after one update, or a tree of
updates.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed._checks import is_number, message, refuse
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer, as_array
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.optimizers.base import (
    LearningRate,
    LearningRateKind,
    Slot,
    Slots,
    SlotShape,
    TableOptimizer,
    Updated,
    checked_learning_rate,
    learning_rate_kind,
)

# -- arithmetic ------------------------------------------------------------------------------------

_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def round_now(x: Array, step: ArrayLike) -> Array:
    """Return x, and prevent the compiler from fusing its computation with its uses.

    Args:
      x: floats of any shape.
      step: int32 scalar that is never negative and not known when the program is compiled.
    """
    # min(step, 0) is 0 for every step >= 0, but the compiler cannot know that.
    return _add_zero(x, jnp.minimum(jnp.asarray(step), 0))


@jax.custom_jvp
def _add_zero(x: Array, zero: Array) -> Array:
    integers = _INTEGERS[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, integers) + zero.astype(integers)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


# Without this rule the conversion to integers would cut the gradient.
@_add_zero.defjvp
def _derivative_of_identity(primals: tuple, tangents: tuple) -> tuple:
    return _add_zero(*primals), tangents[0]


def average(old: Array, new: Array, rate: float, *, t: Array) -> Array:
    """Return the moving average rate * old + (1 - rate) * new; t is the step."""
    # Both products are rounded: fused, one of them would not be, in some programs and not others.
    return round_now(rate * old, t) + round_now((1.0 - rate) * new, t)


def one_minus_power(beta: float, t: Array, dtype: jnp.dtype) -> Array:
    """Return 1 - βᵗ without the cancellation that float32 has when β is near 1.

    Args:
      beta: β in [0, 1).
      t: int32 scalar >= 1, the step.
      dtype: the dtype of the result.
    """
    if beta == 0.0:
        return jnp.ones((), dtype)
    # βᵗ = exp(t log β), and expm1(x) = exp(x) - 1 is exact for small x.
    return -jnp.expm1(t.astype(dtype) * math.log(beta))


def adam_rate(lr: Array, beta_1: float, beta_2: float, *, t: Array) -> Array:
    """Return α = lr √(1 - β₂ᵗ) / (1 - β₁ᵗ), a scalar of lr's dtype."""
    second = jnp.sqrt(one_minus_power(beta_2, t, lr.dtype))
    return lr * second / one_minus_power(beta_1, t, lr.dtype)


def row_sum(x: Array) -> Array:
    """Return the sums over the last axis, added up in a fixed order.

    A rule that reduces with this function gives the same bits for every number of devices and every
    placement (on CPU). A rule that uses `jnp.sum` does not.

    Args:
      x: floats `[…, D]`.

    Returns:
      `[…, 1]`.

    Example:
      >>> row_sum(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[6.0], [15.0]]
    """
    # D = 3: pad to width 4, [a, b, c, 0] -> [a + c, b + 0] -> [(a + c) + (b + 0)].
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def row_mean(x: Array) -> Array:
    """Return the means over the last axis, `[…, 1]`, summed as in `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_mean(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0]
    """
    return row_sum(x) * (1.0 / x.shape[-1])


def row_norm(x: Array) -> Array:
    """Return the Euclidean norms over the last axis, `[…, 1]`, summed as in `row_sum`.

    Args:
      x: floats `[…, D]`.

    Example:
      >>> row_norm(jnp.array([[3.0, 4.0]])).tolist()
      [[5.0]]
    """
    return jnp.sqrt(row_sum(x * x))


# -- rules over rows -------------------------------------------------------------------------------

Bounds = tuple[float | None, float | None]

LEARNING_RATE = {"convert": checked_learning_rate}
"""The metadata of a learning rate."""


def accepts(default: Any, expected: str, allowed: Callable[[Any, Any], bool]) -> Any:
    """Return a field whose value v must satisfy `allowed(v, optimizer)`.

    Args:
      default: the field's default.
      expected: the condition in words, for the error.
      allowed: the condition, on the value and the whole optimizer.
    """
    return field(default=default, metadata={"expected": expected, "allowed": allowed})


def positive(default: float) -> Any:
    """Return a field of a number above 0."""
    return accepts(default, "a number > 0", lambda value, _: value > 0)


def non_negative(default: float) -> Any:
    """Return a field of a number that is not below 0."""
    return accepts(default, "a number >= 0", lambda value, _: value >= 0)


def fraction(default: float) -> Any:
    """Return a field of the rate of a moving average."""
    return accepts(default, "a number in [0, 1)", lambda value, _: 0 <= value < 1)


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        refuse(what, expected="True or False", got=repr(value))
    return bool(value)


def number(what: str, value: Any) -> float:
    """Return `value` as a float.

    Raises:
      ValueError: `value` is not a number, or is NaN.
    """
    if not is_number(value) or math.isnan(value):
        refuse(what, expected="a number", got=repr(value))
    return float(value)


def optional_number(what: str, value: Any) -> float | None:
    """Return `value` as a float, or None.

    Raises:
      ValueError: `value` is neither a number nor None.
    """
    return None if value is None else number(what, value)


def check_order(what: str, bounds: Bounds) -> None:
    """Raise `ValueError` if the lower bound is above the upper one."""
    low, high = bounds
    if low is not None and high is not None and low > high:
        refuse(what, expected="min <= max", got=f"min {low!r} > max {high!r}")


def clip_bounds(what: str, value: Any) -> Bounds | None:
    """Return `(min, max)` of a clip option.

    Args:
      what: the option's name.
      value: None, one number c for (-c, c), or a pair of which either number may be None.

    Raises:
      ValueError: `value` is none of these, or min > max.
    """
    if value is None:
        return None
    if is_number(value) and not math.isnan(value):
        bounds: Bounds = (-float(value), float(value))
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        bounds = (optional_number(what, value[0]), optional_number(what, value[1]))
    else:
        refuse(
            what,
            expected="None, a number c for (-c, c), or a pair (min, max)",
            got=repr(value),
        )
    check_order(what, bounds)
    return None if bounds == (None, None) else bounds


def slot_values(what: str, values: Any) -> tuple[tuple[str, Any], ...]:
    """Return a mapping from slot names to numbers or initializers as sorted pairs.

    Raises:
      ValueError: `values` is not such a mapping.
    """
    try:
        pairs = dict(values.items() if isinstance(values, Mapping) else (values or ()))
    except (TypeError, ValueError):
        expected = "a mapping from slot names to numbers or initializers"
        raise ValueError(message(what, expected=expected, got=repr(values))) from None
    for slot, value in pairs.items():
        if not isinstance(slot, str) or not slot:
            refuse(what, expected="slot names (str)", got=repr(slot))
        if not callable(value) and not is_number(value):
            refuse(
                f"{what}[{slot!r}]",
                expected="a number or an initializer (key, shape, dtype) -> array",
                got=repr(value),
            )
    # {"m": 1, "a": np.float32(2)} -> (("a", 2.0), ("m", 1.0)): hashable, in one order.
    plain = {
        slot: float(value) if is_number(value) else value
        for slot, value in pairs.items()
    }
    return tuple((slot, plain[slot]) for slot in sorted(plain))


_CONVERT: dict[type, Callable[[str, Any], Any]] = {bool: _flag, float: number}
_OPTIONAL = {"convert": optional_number}
_CLIPVALUE = {
    "convert": clip_bounds,
    "expected": "None with use_gradient_accumulation=False (clip before the update, or accumulate)",
    "allowed": lambda value, optimizer: (
        value is None or optimizer.use_gradient_accumulation
    ),
}


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
    slot_initializers: Any = field(default=(), metadata={"convert": slot_values})

    decay_in_rule: ClassVar[bool] = False
    """Whether the rule itself uses the decay factor; `update_rows` then does not."""

    compiled: ClassVar[Callable[..., CompiledRule | None] | None] = None
    """A method of `(t=, lr=)` that returns the rule alone for the compiled kernels, or None for
    options that they do not implement; None in its place: they do not implement the rule."""

    @final
    def __post_init__(self) -> None:
        # Numbers become Python floats, mappings sorted tuples of pairs, and `clipvalue` a pair, so
        # that optimizers that mean the same compare equal.
        name, fields = type(self).__name__, dataclasses.fields(self)
        # Convert all fields before checking any: a condition may compare two of them.
        for option in fields:
            value = getattr(self, option.name)
            convert = option.metadata.get("convert", _CONVERT.get(type(option.default)))
            if convert is not None:
                object.__setattr__(
                    self, option.name, convert(f"{name}.{option.name}", value)
                )
        for option in fields:
            value, metadata = getattr(self, option.name), option.metadata
            if "allowed" in metadata and not metadata["allowed"](value, self):
                refuse(
                    f"{name}.{option.name}",
                    expected=metadata["expected"],
                    got=repr(value),
                )
        check_order(f"{name}.clip_weight", (self.clip_weight_min, self.clip_weight_max))
        known = [slot.name for slot in self.declared_slots()]
        for slot, _ in self.slot_initializers:
            if slot not in known:
                refuse(
                    f"{name}.slot_initializers",
                    expected=f"names of its slots ({', '.join(known) or 'it has none'})",
                    got=repr(slot),
                )

    @abc.abstractmethod
    def declared_slots(self) -> tuple[Slot, ...]:
        """Return the rule's slots, with the initial values that its own options give."""

    @abc.abstractmethod
    def apply_rule(
        self, w: Array, slots: Slots, g: Array, *, t: Array, lr: Array
    ) -> Updated:
        """Return rows and slots after the rule alone, without the options around it.

        A rule may reduce over the last axis only: rows must not depend on each other.

        Args:
          w: rows `[n, D]`, after weight decay.
          slots: `[n, D]`, or `[n]` for one number per row.
          g: gradients `[n, D]`, clipped.
          t: int32 scalar, the step.
          lr: scalar of the rows' dtype.
        """

    @property
    @final
    def updates_every_row(self) -> bool:
        return any(slot.every_row for slot in self.declared_slots())

    @final
    def slot_shapes(self, dim: int, dtype: Any) -> dict[str, SlotShape]:
        declared = self.declared_slots()
        return {
            s.name: SlotShape(() if s.one_number else (dim,), jnp.dtype(dtype))
            for s in declared
        }

    @final
    def init_slots(self, rows: Array, keys: Array) -> Slots:
        given = dict(self.slot_initializers)
        return {
            slot.name: _initial_slot(
                slot, given.get(slot.name, slot.initial), rows, keys
            )
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
    def compiled_rule(
        self, step: ArrayLike, learning_rate: Array
    ) -> CompiledRule | None:
        rule = self.compiled and self.compiled(t=jnp.asarray(step), lr=learning_rate)
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
            decay * learning_rate
            if self.multiply_weight_decay_factor_by_learning_rate
            else decay
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
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        return {"class": type(self).__name__} | {
            name: _plain(value) for name, value in fields.items()
        }


@dataclasses.dataclass(frozen=True)
class RatedOptimizer(RowOptimizer):
    """Take the learning rate as the first argument, and all other options by keyword."""

    learning_rate: LearningRate = field(default=0.001, metadata=LEARNING_RATE)


def _initial_slot(slot: Slot, initial: Any, rows: Array, keys: Array) -> Array:
    """Return the slot of fresh rows: `[n, D]`, or `[n]` for one number per row."""
    shape = (rows.shape[0],) if slot.one_number else rows.shape
    if not callable(initial):
        return jnp.full(shape, initial, rows.dtype)
    # Each row draws from its own key, so that its numbers depend neither on how rows are placed on
    # devices nor on other rows; the slot's name makes slots of one row differ.
    one_row = (1, *shape[1:])
    tag = zlib.crc32(slot.name.encode())

    def draw(key):
        value: Any = initial(jax.random.fold_in(key, tag), one_row, rows.dtype)
        if jnp.shape(value) != one_row:
            refuse(
                f"initializer of slot {slot.name!r}",
                expected=f"shape {one_row}",
                got=jnp.shape(value),
            )
        return jnp.asarray(value).astype(rows.dtype)[0]

    return jax.vmap(draw)(keys)


def _plain(value: Any) -> Any:
    """Return an option as an object that JSON can hold; a callable becomes its name."""
    # (("m", 1.0),) -> {"m": 1.0}; (-1.0, None) -> [-1.0, None].
    if isinstance(value, tuple):
        pairs = value and all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in value
        )
        return (
            {name: _plain(v) for name, v in value}
            if pairs
            else [_plain(v) for v in value]
        )
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value


# -- rules over dense trees ------------------------------------------------------------------------


class RowRuleState(NamedTuple):
    """State of a rule on a dense tree.

    Args:
      count: int32 scalar, the number of updates done so far.
      slots: for each slot, by name, a tree in the structure of the parameters. In a slot with one
        number per row the leaves lack the last axis.
    """

    count: Array
    slots: dict[str, PyTree]


def dense_transform(
    optimizer: TableOptimizer, *, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer` as an optax transform; see `RowOptimizer.as_optax`."""

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        # One dictionary of slots per leaf, [{m, v}, {m, v}], becomes one tree per slot.
        made = [
            _init_leaf(optimizer, as_array(leaf), seed, i)
            for i, leaf in enumerate(leaves)
        ]
        names = optimizer.slot_shapes(1, jnp.float32)
        slots = {
            name: treedef.unflatten([slots[name] for slots in made]) for name in names
        }
        return RowRuleState(jnp.zeros((), jnp.int32), slots)

    def update(updates, state, params=None, **extra):
        if params is None:
            refuse(
                "params",
                expected="the parameters",
                got="None",
                remedy="update(grads, state, params)",
            )
        step = state.count + 1
        remedy = "update(grads, state, params, learning_rate=value)"
        rate = rate_of(optimizer, step, extra.get("learning_rate"), remedy=remedy)
        gradients, treedef = jax.tree.flatten(updates)
        leaves = treedef.flatten_up_to(params)
        slots = {
            name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()
        }
        made = [
            _update_leaf(
                optimizer,
                leaf,
                {n: s[i] for n, s in slots.items()},
                gradient,
                step,
                rate,
            )
            for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True))
        ]
        new_slots = {
            name: treedef.unflatten([s[name] for _, s in made]) for name in slots
        }
        return treedef.unflatten([u for u, _ in made]), RowRuleState(step, new_slots)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(leaf: Array) -> Array:
    """Return a leaf as rows `[n, D]` in the dtype of the rule's arithmetic."""
    # [3, 5, D] -> [15, D]; [D] -> [1, D]; a scalar -> [1, 1].
    dim = leaf.shape[-1] if leaf.ndim else 1
    return leaf.reshape(math.prod(leaf.shape[:-1]), dim).astype(working_dtype(leaf))


def working_dtype(array: ArrayLike) -> np.dtype:
    """Return the dtype of the rule's arithmetic: float64 for such an array, otherwise float32."""
    return np.dtype(np.float64 if jnp.result_type(array) == jnp.float64 else np.float32)


def _init_leaf(
    optimizer: TableOptimizer, leaf: Array, seed: int, index: int
) -> dict[str, Array]:
    rows = _rows(leaf)
    # A key for each row of each leaf, which depends on the positions of both.
    key = jax.random.fold_in(jax.random.key(seed), index)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        key, jnp.arange(rows.shape[0], dtype=jnp.uint32)
    )
    shapes = optimizer.slot_shapes(rows.shape[1], rows.dtype)
    slots = optimizer.init_slots(rows, keys)
    # A slot part (D,) has the leaf's shape [3, 5, D]; a part () has one number per row: [3, 5].
    return {
        name: slots[name].reshape(leaf.shape if part.shape else leaf.shape[:-1])
        for name, part in shapes.items()
    }


def _update_leaf(
    optimizer: TableOptimizer,
    leaf: Array,
    slots: dict[str, Array],
    gradient: Array,
    step: Array,
    rate: Any,
) -> tuple[Array, dict[str, Array]]:
    leaf = as_array(leaf)
    rows = _rows(leaf)
    shapes = optimizer.slot_shapes(rows.shape[1], rows.dtype)
    held = {name: as_array(slots[name]) for name in shapes}
    as_rows = {n: s.reshape(rows.shape[:1] + shapes[n].shape) for n, s in held.items()}
    gradients = as_array(gradient).reshape(rows.shape).astype(rows.dtype)
    new_rows, new_slots = optimizer.update_rows(rows, as_rows, gradients, step, rate)
    # optax adds updates to parameters. The sum may differ from new_rows in the last bit.
    difference = (new_rows - rows).reshape(leaf.shape).astype(leaf.dtype)
    return difference, {
        name: new_slots[name].reshape(slots[name].shape) for name in shapes
    }


def rate_of(
    optimizer: TableOptimizer, step: ArrayLike, given: Any, *, remedy: str
) -> ArrayLike:
    """Return the given learning rate, or else that of the optimizer.

    Args:
      optimizer: the optimizer.
      step: int32 scalar t, 1 at the first update.
      given: the rate that a user gives instead of the optimizer's, or None.
      remedy: how to give one, for the message.

    Raises:
      ValueError: the rate is a callable without arguments, which would be called in a trace.
    """
    if given is not None:
        return given
    rate: Any = optimizer.learning_rate
    host = learning_rate_kind(rate) is LearningRateKind.HOST
    # In a jit it would be called once, and its value would be part of the program for good.
    if host and isinstance(step, Tracer):
        refuse(
            "learning_rate",
            expected="the value of a callable without arguments, called outside the jit",
            got="none",
            remedy=remedy,
        )
    return optimizer.resolve_learning_rate(step, rate() if host else None)
