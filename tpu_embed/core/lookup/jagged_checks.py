"""Check what users give to `Jagged`: arrays that fit, and padded rows with their lengths.

Input: the arguments of its constructor or of `Jagged.from_padded`. Output: nothing, or an error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_in_program, check_int, message
from tpu_embed._types import Array, Tracer


def refuse_arithmetic(self: Any, *_: Any, **__: Any) -> Any:
    """Refuse to be computed with as if it were an array.

    Raises:
      TypeError: always.
    """
    remedy = "compute with jagged.values, and jagged.with_values(new) has the same sequences again"
    raise TypeError(message("Jagged", expected="an array", got="a Jagged", remedy=remedy))


def concrete(what: str, array: Any) -> np.ndarray:
    """Return an array on the host.

    Raises:
      TypeError: it is traced.
    """
    if isinstance(array, Tracer):
        expected, got = "arrays whose values are known", "a tracer"
        remedy = "call it outside of the jit, or use to_padded"
        raise TypeError(message(what, expected=expected, got=got, remedy=remedy))
    return np.asarray(array)


def check_arrays(values: Any, row_splits: Any) -> None:
    """Check a pair of arrays; anything else is a placeholder, which is accepted.

    Raises:
      TypeError, ValueError: see `Jagged`.
    """
    dtype = getattr(row_splits, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(message("Jagged.row_splits", expected="integers", got=str(dtype)))
    shape, axes = getattr(values, "shape", None), row_splits.ndim
    if shape is None:
        return
    if not axes or len(shape) < axes or shape[: axes - 1] != row_splits.shape[:-1]:
        expected = "values [S, C, …] and row_splits [S, B / S + 1]"
        got = f"shapes {shape} and {row_splits.shape}"
        raise ValueError(message("Jagged", expected=expected, got=got))


def check_padded(padded: Array, lengths: Any, shards: int) -> None:
    """Check shapes and dtypes of the arguments of `Jagged.from_padded`.

    Raises:
      TypeError, ValueError: see there.
    """
    where = "Jagged.from_padded"
    check_int(f"{where}: shards", shards, minimum=1)
    if padded.ndim < 2:
        raise ValueError(message(f"{where}: padded", expected="[B, L, …]", got=str(padded.shape)))
    if padded.shape[0] % shards:
        expected, got = f"rows that {shards} shards divide", f"{padded.shape[0]}"
        remedy = "tpu_embed.pad_batch adds empty examples"
        raise ValueError(message(f"{where}: padded", expected=expected, got=got, remedy=remedy))
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(message(f"{where}: lengths", expected="integers", got=str(lengths.dtype)))
    if lengths.shape != padded.shape[:1]:
        expected, got = f"one per row, {padded.shape[:1]}", f"{lengths.shape}"
        raise ValueError(message(f"{where}: lengths", expected=expected, got=got))


def check_room(capacity: Any) -> Any:
    """Return a capacity: an integer, or the symbol that it is in a program exported for any B.

    Raises:
      ValueError: it is neither.
    """
    if jax.export.is_symbolic_dim(capacity):
        return capacity
    return check_int("Jagged.from_padded: capacity", capacity, minimum=0)


def check_lengths(lengths: Any, longest: int, room: int) -> None:
    """Check the lengths `[S, B / S]` of padded rows.

    Raises:
      ValueError: one is outside of 0 … `longest`, or those of a replica sum to more than `room`;
        where they are not known to this process, only `checkify` learns of it.
    """
    where = "Jagged.from_padded"
    if isinstance(lengths, Tracer) or not getattr(lengths, "is_fully_addressable", True):
        right = ((lengths >= 0) & (lengths <= longest)).all() & (lengths.sum(1) <= room).all()
        check_in_program(right, f"{where}: lengths outside of 0 to {longest}, or above {room}")
        return
    lengths = np.asarray(lengths)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= longest:
        expected, got = f"lengths from 0 to {longest}", f"{lengths.min()} to {lengths.max()}"
        raise ValueError(message(where, expected=expected, got=got))
    needed = int(lengths.sum(axis=1, dtype=np.int64).max(initial=0))
    if needed > room:
        expected, got = f"room for {needed} values on a replica", f"capacity {room}"
        remedy = "a capacity of None is always enough"
        raise ValueError(message(where, expected=expected, got=got, remedy=remedy))
