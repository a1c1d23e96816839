"""Rounding to bfloat16 at random, in NumPy, written from the definition of its random bits."""

import zlib

import numpy as np

MASK = 2**32 - 1


def mix(x: np.ndarray) -> np.ndarray:
    """Return the hash of numbers below 2³², as uint64."""
    x = np.asarray(x, np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & np.uint64(MASK)
    return x ^ (x >> np.uint64(16))


def random_bits(
    seed: int, name: str, step: int, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Return the random bits of rows and columns, which broadcast, as uint64 below 2³².

    Args:
      seed: the seed in the state.
      name: the table's name.
      step: the number of the update, 1 for the first.
      rows: row numbers or keys, as unsigned numbers below 2⁶⁴.
      columns: column numbers.
    """
    golden = np.uint64(0x9E3779B9)
    rows, columns = np.asarray(rows, np.uint64), np.asarray(columns, np.uint64)
    number = (rows & np.uint64(MASK)) ^ mix(rows >> np.uint64(32))
    table = mix(np.uint64(seed ^ zlib.crc32(name.encode())))
    at_step = mix(table + golden * np.uint64(step) & np.uint64(MASK))
    key = mix(at_step ^ mix(golden * number & np.uint64(MASK)))
    return mix(key + columns & np.uint64(MASK))


def round_up_or_down(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to bfloat16 by random bits, as float32."""
    u = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    stored = (u + (bits & np.uint64(0xFFFF))) >> np.uint64(16)
    stored = np.where(np.isnan(values), (u >> np.uint64(16)) | np.uint64(0x40), stored)
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
