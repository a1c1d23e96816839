"""What the processes tell each other of the keys of a batch, as bytes.

Input: what one process's part of a batch has. Output: bytes; or what all parts have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """What one process's part of a batch has of one table.

    Attributes:
      known: int32 `[k]`, the rows of known keys, perhaps repeated.
      keys: uint64, by feature of the table, the unknown keys in the order of their first examples.
      examples: int64, by feature, these examples in the global batch.
      absent: int32, by feature, where the rows of these keys are among those of the feature's keys;
        empty in the parts of other processes.
    """

    known: np.ndarray
    keys: list[np.ndarray]
    examples: list[np.ndarray]
    absent: list[np.ndarray]


def encode(part: Part) -> bytes:
    """Return what a process has of one table as bytes: each known row once."""
    known = distinct_rows(part.known)
    pieces, sizes = [known], [known.size]
    for keys, places in zip(part.keys, part.examples, strict=True):
        pieces += [keys, places.astype(np.int64)]
        sizes.append(keys.size)
    return b"".join(array.tobytes() for array in [np.array(sizes, np.int64), *pieces])


def distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Return each of the rows once, int32, without -1."""
    ascending = np.sort(rows)
    # Rows -1 3 3 5 have the differences 0 4 0 2.
    return ascending[np.diff(ascending, prepend=-1) > 0].astype(np.int32)


def decode(said: bytes, features: Sequence[int]) -> list[Part]:
    """Return the parts that a process has sent, one per table.

    Args:
      said: the bytes of all tables, one after another.
      features: the number of features of each table.
    """
    at, parts = 0, []

    def read(dtype: type, n: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(said, dtype, n, at)
        at += array.nbytes
        return array

    for count in features:
        num_known, *sizes = read(np.int64, 1 + count).tolist()
        known = read(np.int32, num_known)
        pairs = [(read(np.uint64, n), read(np.int64, n)) for n in sizes]
        parts.append(Part(known, [keys for keys, _ in pairs], [at for _, at in pairs], []))
    return parts


def encode_guests(guests: Sequence[tuple[np.ndarray, np.ndarray]]) -> bytes:
    """Return keys, uint64, and their rows, int32, as bytes: each key once."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(some for some, _ in guests)])
    rows = np.concatenate([np.zeros(0, np.int32), *(rows for _, rows in guests)])
    keys, first = np.unique(keys, return_index=True)
    return keys.tobytes() + rows[first].astype(np.int32).tobytes()


def decode_guests(said: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and the rows that a process has sent."""
    n = len(said) // 12  # 8 bytes a key, then 4 bytes a row
    return np.frombuffer(said, np.uint64, n), np.frombuffer(said, np.int32, n, 8 * n)
