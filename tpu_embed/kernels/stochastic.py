"""Round float32 to bfloat16 at random: up or down with probabilities that keep the mean.

Rounded to nearest, a row that moves by less than half a gap between two bfloat16 numbers stays
where it is, however many steps push it in the same direction. Rounded at random, it moves by a
whole gap now and then, and on average by what the steps say.

The random bits are those of a counter: a hash of the seed, the table's name, the step, the row and
the column. So they are the same on any device and in any program, and no state but the seed is
kept. With the constants A = 0x7feb352d, B = 0x846ca68b and G = 0x9E3779B9, all in uint32:

    mix(x):  x ^= x >> 16;  x *= A;  x ^= x >> 15;  x *= B;  x ^= x >> 16
    table  = mix(seed ^ crc32(table name))
    key    = mix(mix(table + G * step) ^ mix(G * row))
    bits   = mix(key + column)
    stored = (float32 as bits + (bits & 0xFFFF)) >> 16

A row number or a vocabulary's key of 64 bits becomes the uint32 `row` by `row_number`.

Input: new rows in float32, and what their bits depend on. Output: bfloat16 as bits, in uint16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array

STEP = np.uint32(0x9E3779B9)
"""G above, 2³² divided by the golden ratio: multiples of it are far apart."""


class Draws(NamedTuple):
    """What the random bits of a shard's rows depend on, in one step.

    Attributes:
      tables: uint32 `[T]`, one number per table of the stack, from `table_draws`.
      shard: uint32 `[]`, the number of the shard.
      numbers: uint32 `[R]`, the number of each local row in the hash, where a map on the host
        decides what row a key has; None: the row's number in its table.
    """

    tables: Array
    shard: Array
    numbers: Array | None


class RowPlaces(NamedTuple):
    """Which row of which table each local row of a shard is; static.

    Attributes:
      firsts: the first local row of each table, ascending.
      shard_steps: for each table, its first row on shard s + 1 minus that on shard s.
      row_step: a row of a table minus the one before it on the same shard.
    """

    firsts: tuple[int, ...]
    shard_steps: tuple[int, ...]
    row_step: int


class Rounding(NamedTuple):
    """How the new rows of a shard are rounded at random.

    Attributes:
      draws: what the random bits depend on.
      places: which rows the local rows are.
    """

    draws: Draws
    places: RowPlaces


def mix(x: Any) -> Any:
    """Return a hash of each number, uint32 (JAX or NumPy); of 0 it is 0."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def row_number(low: Any, high: Any) -> Any:
    """Return what stands for a row or key of 64 bits in the hash: low ^ mix(high).

    Row numbers below 2³² stand for themselves. Of two keys with the same result, the stored rows
    are rounded with the same random bits, which does no harm.

    Args:
      low, high: uint32, the halves of the number.

    Example:
      >>> int(row_number(jnp.uint32(7), jnp.uint32(0)))
      7
    """
    return low ^ mix(high)


def number_ids(ids: np.ndarray) -> np.ndarray:
    """Return `row_number` of row numbers, ids or keys, uint64 `[n]`: uint32 `[n]`.

    Example:
      >>> number_ids(np.array([7, 2**32 - 1], np.uint64)).tolist()
      [7, 4294967295]
    """
    low = (ids & np.uint64(2**32 - 1)).astype(np.uint32)
    return row_number(low, (ids >> np.uint64(32)).astype(np.uint32))


def table_draws(seed: Array, crcs: np.ndarray, step: Array) -> Array:
    """Return `Draws.tables`, uint32 `[T]`: mix(mix(seed ^ crc) + G * step).

    Args:
      seed: uint32 `[]`.
      crcs: uint32 `[T]`, the CRC-32 of each table's name.
      step: int32 `[]`, the number t of the update.
    """
    return mix(mix(seed ^ jnp.asarray(crcs)) + STEP * step.astype(jnp.uint32))


def row_draws(rounding: Rounding, row_ids: Array, numbers: Array | None) -> Array:
    """Return the `key` of each row, uint32 `[U]`; that of an absent row means nothing.

    Args:
      rounding: what the bits depend on.
      row_ids: integer `[U]`, local rows.
      numbers: uint32 `[U]`, of each row, where a map decides; None: the row's number in its table.
    """
    draws, places = rounding
    # Tables with the first local rows 0 and 3: the local rows 0 … 4 are of the tables 0 0 0 1 1.
    firsts = np.array(places.firsts, row_ids.dtype)
    table = jnp.searchsorted(jnp.asarray(firsts[1:]), row_ids, side="right")
    if numbers is not None:
        return mix(draws.tables[table] ^ mix(STEP * numbers))
    shard_steps = jnp.asarray(np.array(places.shard_steps, row_ids.dtype))[table]
    index = row_ids - jnp.asarray(firsts)[table]
    rows = draws.shard.astype(row_ids.dtype) * shard_steps + index * places.row_step
    low, high = rows.astype(jnp.uint32), jnp.zeros(rows.shape, jnp.uint32)
    if rows.dtype == jnp.int64:
        high = (rows >> 32).astype(jnp.uint32)
    return mix(draws.tables[table] ^ mix(STEP * row_number(low, high)))


def round_rows(rows: Array, keys: Array) -> Array:
    """Return rows rounded to bfloat16 at random, as bits, uint16 `[U, D]`.

    A number that bfloat16 holds is kept, infinity too; NaN becomes a quiet NaN. Any other becomes
    one of its two neighbours, the upper one with probability distance / gap, to 2⁻¹⁶.

    Args:
      rows: float32 `[U, D]`.
      keys: uint32 `[U]`, from `row_draws`.

    Example:
      >>> rows = jnp.full((1, 4), 1 + 2**-8, jnp.float32)  # in the middle of 1 and 1 + 2**-7
      >>> [hex(bits) for bits in round_rows(rows, jnp.uint32([1]))[0].tolist()]
      ['0x3f81', '0x3f80', '0x3f81', '0x3f80']
    """
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    columns = jax.lax.iota(jnp.uint32, rows.shape[1])
    drawn = mix(keys[:, None] + columns[None, :])
    rounded = (bits + (drawn & np.uint32(0xFFFF))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    return jnp.where(jnp.isnan(rows), quiet_nan, rounded).astype(jnp.uint16)
