"""How far a float32 step may be from the oracle: intervals around the float64 numbers.

A sum of n float32 terms is within n · 2⁻²⁴ · Σ|term| of the exact sum, however much cancels. The
error of a rule, from rounded inputs and its own roundings, is found by running the oracle's rule
again with the inputs and every operation nudged in their last bits. Where the rule is steep (at the
sign in Lion, or at Adam's first step with a gradient that cancels) the interval is wide; elsewhere
it is a few units in the last place. Nothing here calls the library but the oracle of its check.
"""

import random
from collections import namedtuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_rules

UNIT = 2.0**-24
"""Half a unit in the last place of float32: the relative error of one operation."""
ROUNDINGS = 8
"""How many roundings of one operation a nudge stands for."""
SAFETY = 4
"""Nudges try few combinations of signs; in others the roundings of a rule may add up."""
TINY = 1e-35
"""Below this, float32 loses digits, and then flushes to zero."""

OF_OPTAX = UNIT / (1 - 0.999)
"""optax computes 1 - 0.999ᵗ in float32, which loses three digits."""


class Interval(namedtuple("Interval", "low high")):
    """Numbers `low <= x <= high`: arrays of one shape, or NumPy scalars for one number."""

    @classmethod
    def around(cls, center, width):
        """Return the interval center ± width."""
        return cls(center - width, center + width)

    def rounded(self, dtype):
        """Return the interval after storing in a dtype: rounding is monotone, so the ends do."""
        return Interval(stored(self.low, dtype), stored(self.high, dtype))


def stored(values, dtype):
    """Return values as a table of this dtype stores them, in float64.

    float32 is not rounded here, because the bounds include that rounding.
    """
    if dtype == "float32":
        return values
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def activation(table, feature, ids, weights=None):
    """Return the interval of the activation of one feature, [B, …, D].

    `table` [V, D] holds exactly the numbers of the library's table.
    """
    table, config = np.asarray(table, np.float64), feature.table
    reading = oracle.read(feature, ids, weights)
    width = np.zeros((len(reading.bags), config.dim))
    for b, row, gain in oracle.terms(reading):
        size, jump = _looked_up(table[row], config.quantization_config)
        # Each term rounds three times: the term, the sum of rows, and the sum of weights.
        width[b] += abs(gain) * (UNIT * (2 * len(reading.bags[b]) + 8) * size + jump)
    center = oracle.lookup(table, feature, ids, weights)
    return Interval.around(center, width.reshape(center.shape) + TINY)


def _looked_up(row, quantization):
    """Return the magnitudes of a row, and how far rounding may move it to another bucket."""
    if quantization is None:
        return np.abs(row), 0.0
    low, high = quantization.lower, quantization.upper
    nudge = 8 * UNIT * (np.abs(row) + abs(low) + abs(high))
    ends = [oracle.quantize(row + sign * nudge, quantization) for sign in (-1, 1)]
    return abs(low) + abs(high), ends[1] - ends[0]


Updates = namedtuple("Updates", "gradients errors")
"""The updates of one row in order: gradients [D], each with its error bound [D]."""


def updates(config, hyper, occurrences):
    """Return row -> its updates in one step, as `oracle.train_step` makes them."""
    found, lazy = {}, hyper.get("lazy_adam", True)
    rows = {} if lazy else {row: [] for row in range(config.vocabulary_size)}
    for occurrence in occurrences:
        if occurrence.table is config:
            rows.setdefault(occurrence.row, []).append(occurrence.gradient)
    for row, each in rows.items():
        terms = np.reshape(each, (1, -1, config.dim))
        if not hyper.get("use_gradient_accumulation", True):
            terms = terms.swapaxes(0, 1)
        # A gain takes one or two divisions, and a sum of at most a few dozen weights.
        errors = UNIT * (terms.shape[1] + 64) * np.abs(terms).sum(1) + TINY
        found[row] = Updates(terms.sum(1), errors)
    return found


def updated_row(name, hyper, dtype, row, slots, given, t, lr):
    """Return the intervals of a row as it is stored, and of its slots by name.

    Args:
      name: the name of the rule in `oracle_rules`.
      hyper: its options.
      dtype: the dtype of the table.
      row: [D], exactly the numbers in the library's table.
      slots: arrays [D] or numbers, exactly those of the library.
      given: the updates of the row.
      t: the step, which is 1 for the first update.
      lr: the learning rate.
    """

    def follow(nudge):
        now, mine = nudge(row), {slot: nudge(value) for slot, value in slots.items()}
        new = now
        for gradient, error in zip(given.gradients, given.errors, strict=True):
            pushed = gradient + nudge.sign(gradient) * error
            new, mine = oracle_rules.apply(name, hyper, now, mine, pushed, t, lr)
            new, mine = nudge(new), {slot: nudge(value) for slot, value in mine.items()}
            now = stored(new, dtype)
        return {"": new, **mine}

    bounds = _bounds(follow)
    return bounds.pop("").rounded(dtype), bounds


def updated_by_optax(transform, dtype, rows, slots, given):
    """Return the intervals of rows [U, D] as they are stored, and of the transform's leaves.

    The transform itself runs in float64 on all rows at once, because it treats every number by
    itself.

    Args:
      transform: the optax transform.
      dtype: the dtype of the table.
      rows: exactly the rows in the library's table.
      slots: one array per leaf of the transform's state, in order: [U, D], or one number for all.
      given: one update per row.
    """
    gradients, errors = (np.stack([one[0] for one in x]) for x in zip(*given, strict=True))

    def follow(nudge):
        now = nudge(rows)
        leaves = [nudge(leaf) if np.ndim(leaf) else leaf for leaf in slots]
        structure = jax.tree.structure(jax.eval_shape(transform.init, jnp.asarray(rows)))
        state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
        pushed = gradients + nudge.sign(gradients) * errors
        steps, state = transform.update(jnp.asarray(pushed), state, jnp.asarray(now))
        steps = np.asarray(steps) * (1 + nudge.sign(gradients) * OF_OPTAX)
        new = [now + steps, *map(np.asarray, jax.tree.leaves(state))]
        # Whole numbers, such as the count of steps, are exact.
        whole = [np.issubdtype(array.dtype, np.integer) for array in new]
        return {i: new[i] if whole[i] else nudge(new[i]) for i in range(len(new))}

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        bounds = list(_bounds(follow).values())
    return bounds[0].rounded(dtype), bounds[1:]


class _Nudge:
    """Move numbers by a few units in the last place: none, all up, all down, or at random."""

    def __init__(self, run):
        self._run, self._rng = run, np.random.default_rng(run)

    def sign(self, values):
        if self._run < 3:
            return np.full(np.shape(values), (0.0, 1.0, -1.0)[self._run])
        return self._rng.choice([-1.0, 1.0], np.shape(values))

    def __call__(self, values):
        return values + self.sign(values) * ROUNDINGS * UNIT * np.abs(values)


class _Rounded(float):
    """A number whose every sum, product, quotient and power is off by a rounding or two."""

    random = random.Random(0)

    def sqrt(self):
        """Return the root; NumPy asks each object of an array for it."""
        return self**0.5


def _make_rounded(name):
    exact = getattr(float, name)

    def operation(self, *others):
        result = exact(self, *others)
        if result is NotImplemented:  # beside an array, which computes with each of its numbers
            return result
        return _Rounded(result * (1 + self.random.choice((-2, 2)) * UNIT))

    return operation


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _prefix in ("__", "__r"):
        setattr(_Rounded, f"{_prefix}{_name}__", _make_rounded(f"{_prefix}{_name}__"))


def _rounding(values):
    """Return an array of numbers that round."""
    return np.vectorize(_Rounded, otypes=[object])(values)


def _bounds(follow):
    """Return the intervals of what `follow(nudge)` returns by name, over several nudges."""
    center = follow(_Nudge(0))
    spread = {name: np.zeros(np.shape(value)) for name, value in center.items()}
    with mock.patch.object(oracle_rules, "as_numbers", _rounding):
        for run in range(1, 8):
            for name, value in follow(_Nudge(run)).items():
                spread[name] = np.maximum(spread[name], np.abs(value - center[name]))
    return {n: Interval.around(value, SAFETY * spread[n] + TINY) for n, value in center.items()}


def outside(values, bounds):
    """Return the indices [n, rank] of the values outside of their intervals; NaN is outside."""
    values = np.asarray(values).astype(np.float64)
    return np.argwhere(~((values >= bounds.low) & (values <= bounds.high)))
