"""Initial values of table rows, independent of how a table is split over devices.

An initializer is a function `(key, shape, dtype) -> array`, like those of `jax.nn.initializers`.
It is called for one row at a time, with shape (1, D) and a key of that row, so that a row has the
same values however many shards there are. An initializer with a `shard_info` argument is called
once per shard instead, with shape (n, D), and is told which rows these are.

Input: a random key, a shape and a dtype. Output: the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from tpu_embed._checks import check_choice, check_int, is_int, is_number, refuse
from tpu_embed._types import Array

__all__ = [
    "RowIdInitializer",
    "ShardInfo",
    "TruncatedNormal",
    "VarianceScaling",
    "check",
    "resolve",
    "variance_scaling",
    "wants_shard_info",
]

Initializer = Callable[..., Array]
Mode = Literal["fan_in", "fan_out", "fan_avg"]
Distribution = Literal["truncated_normal", "normal", "uniform"]

_TRUNCATED_STDDEV = 0.87962566103423978
"""The standard deviation of a standard normal distribution that is cut at ±2."""

# The functions of `jax.nn.initializers` that look at the fan-in, which one row does not show.

_FAN_IN_FACTORIES = {
    f"{name}_{kind}"
    for name in ("glorot", "xavier", "lecun", "he", "kaiming")
    for kind in ("normal", "uniform")
} | {"variance_scaling", "orthogonal", "delta_orthogonal"}


@dataclasses.dataclass(frozen=True, eq=False)
class ShardInfo:
    """Tells an initializer with a `shard_info` argument which rows of a table to make.

    Args:
      table_shape: (V, D), the shape of the whole logical table.
      rows: int32 [n], the logical row ids, in [0, V), of the rows of the result.
    """

    table_shape: tuple[int, int]
    rows: Array


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
    """Draw from a normal distribution with mean 0, cut at two standard deviations.

    Two of these are equal if their arguments are.

    Args:
      stddev: σ of the distribution before the cut, at least 0.

    Raises:
      ValueError: `stddev` is not a finite number of at least 0.

    Example:
      >>> TruncatedNormal(0.5)(jax.random.key(0), (1, 4), "float32").shape
      (1, 4)
    """

    stddev: float = 1.0

    def __post_init__(self) -> None:
        _check_finite("TruncatedNormal.stddev", self.stddev)

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of `shape` and `dtype`."""
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * self.stddev


@dataclasses.dataclass(frozen=True)
class RowIdInitializer:
    """Fill row i with i + offset, so that a test or a debugger can see which row it has.

    Args:
      offset: integer that is added to every row id.

    Raises:
      ValueError: `offset` is not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> info = ShardInfo(table_shape=(10, 2), rows=jnp.array([3, 7], "int32"))
      >>> RowIdInitializer(offset=1)(jax.random.key(0), (2, 2), "float32", info).tolist()
      [[4.0, 4.0], [8.0, 8.0]]
    """

    offset: int = 0

    def __post_init__(self) -> None:
        if not is_int(self.offset):
            refuse(
                "RowIdInitializer.offset", expected="an integer", got=repr(self.offset)
            )

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: Any, shard_info: ShardInfo
    ) -> Array:
        """Return `[n, D]` of `dtype`: row j is filled with `shard_info.rows[j] + offset`."""
        del key
        values = (shard_info.rows + int(self.offset)).astype(dtype)
        return jax.numpy.broadcast_to(values[:, None], shape)


@dataclasses.dataclass(frozen=True)
class VarianceScaling:
    """Draw with variance scale / fan, where the fan is that of the whole table [V, D].

    "fan_in" is V, "fan_out" is D, and "fan_avg" is (V + D)/2. "truncated_normal" is cut at two
    standard deviations, and widened so that the variance is right after the cut; "uniform" is
    within ±√(3 scale/fan). Two of these are equal if their arguments are.

    Args:
      scale: the factor of the variance, at least 0.
      mode: "fan_in", "fan_out" or "fan_avg".
      distribution: "truncated_normal", "normal" or "uniform".
      table_shape: (V, D).

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> glorot = VarianceScaling(1.0, "fan_avg", "uniform", table_shape=(100, 16))
      >>> glorot(jax.random.key(0), (1, 16), "float32").shape
      (1, 16)

    Reference:
      He et al., "Delving deep into rectifiers", 2015; Glorot and Bengio, "Understanding the
      difficulty of training deep feedforward neural networks", 2010.
    """

    scale: float
    mode: Mode
    distribution: Distribution
    table_shape: tuple[int, int]

    def __post_init__(self) -> None:
        what = "variance_scaling"
        _check_finite(f"{what}.scale", self.scale)
        check_choice(f"{what}.mode", self.mode, ("fan_in", "fan_out", "fan_avg"))
        check_choice(
            f"{what}.distribution",
            self.distribution,
            ("truncated_normal", "normal", "uniform"),
        )
        shape = self.table_shape
        if not isinstance(shape, (tuple, list)) or len(shape) != 2:
            refuse(f"{what}.table_shape", expected="(V, D)", got=repr(shape))
        sizes = tuple(
            check_int(f"{what}.table_shape[{i}]", n, minimum=1)
            for i, n in enumerate(shape)
        )
        object.__setattr__(self, "table_shape", sizes)

    @property
    def stddev(self) -> float:
        """The standard deviation √(scale / fan)."""
        rows, dim = self.table_shape
        fan = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}[self.mode]
        return math.sqrt(self.scale / fan)

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of `shape` and `dtype`."""
        if self.distribution == "normal":
            return jax.random.normal(key, shape, dtype) * self.stddev
        if self.distribution == "uniform":
            # Uniform on [-a, a] has the standard deviation a / √3.
            return jax.random.uniform(key, shape, dtype, -1.0, 1.0) * (
                math.sqrt(3) * self.stddev
            )
        return TruncatedNormal(self.stddev / _TRUNCATED_STDDEV)(key, shape, dtype)


def variance_scaling(
    scale: float = 1.0,
    mode: Mode = "fan_in",
    distribution: Distribution = "truncated_normal",
    *,
    table_shape: tuple[int, int],
) -> VarianceScaling:
    """Return an initializer with variance scale / fan for a table of `table_shape`.

    It replaces `jax.nn.initializers.variance_scaling`, which takes the fan from the shape that it
    is called with. Here that would be the shape of one row.

    Args:
      scale: the factor of the variance, at least 0.
      mode: "fan_in" (V), "fan_out" (D) or "fan_avg", their mean.
      distribution: "truncated_normal", "normal" or "uniform".
      table_shape: (V, D).

    Returns:
      A `VarianceScaling`, equal and hashable by value.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> variance_scaling(2.0, table_shape=(200, 8)).stddev
      0.1
    """
    return VarianceScaling(scale, mode, distribution, table_shape)


def resolve(initializer: Initializer | None, dim: int) -> Initializer:
    """Return `initializer`, or the default initializer if it is None.

    Args:
      initializer: the initializer that the table declares, or None.
      dim: D, the number of columns of the table.

    Returns:
      `initializer`; for None, `TruncatedNormal(1/√D)`.

    Example:
      >>> resolve(None, 16)
      TruncatedNormal(stddev=0.25)
    """
    return TruncatedNormal(1.0 / math.sqrt(dim)) if initializer is None else initializer


def wants_shard_info(initializer: Initializer) -> bool:
    """Tell whether `initializer` has an argument named `shard_info`.

    Example:
      >>> wants_shard_info(RowIdInitializer()), wants_shard_info(TruncatedNormal())
      (True, False)
    """
    try:
        return "shard_info" in inspect.signature(initializer).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def check(what: str, initializer: Any) -> None:
    """Refuse initializers that can't make one row of a table at a time.

    Args:
      what: the argument's name, for the message.
      initializer: None or a callable.

    Raises:
      ValueError: it is not callable, or it looks at the fan-in, which is always 1 for one row.
    """
    if initializer is None:
        return
    if not callable(initializer):
        refuse(
            what,
            expected="None or a callable (key, shape, dtype) -> array",
            got=repr(initializer),
        )
    # The initializers of JAX are closures: `he_normal()` is "variance_scaling.<locals>.init".
    factory = getattr(_innermost(initializer), "__qualname__", "").split(".")[0]
    if factory in _FAN_IN_FACTORIES:
        refuse(
            what,
            expected="an initializer that can make one row at a time",
            got=f"{factory}, which looks at the fan-in and would see one row",
            remedy="use tpu_embed.initializers.variance_scaling(table_shape=(V, D)), or give "
            "yours a shard_info argument",
        )


def _innermost(function: Any) -> Any:
    """Return the function inside any number of partials and decorators."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _check_finite(what: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        refuse(what, expected="a finite number >= 0", got=repr(value))
