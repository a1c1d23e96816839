"""Keys as people have them (strings, signed or unsigned integers) as the numbers that maps hold.

Input: an array, a list or a column of keys. Output: uint64 `[n]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.columns import describe_values, read_column
from tpu_embed.key_hashes import hash_keys

_STRING_KEYS = np.uint64(2**63)
"""Hashes of strings are below this, so that -1 stays padding (`hash_ids(keys, None)`)."""


def read_keys(what: str, keys: Any) -> np.ndarray:
    """Return keys as maps hold them, as the features of a batch would be read.

    Args:
      what: their name, for messages.
      keys: integers of at most 64 bits or strings, `[n]`: an array, a list, or a column of pandas
        or Arrow. Signed integers count by their bits, so -1 is the key 2⁶⁴ − 1 here, and no
        padding. Strings are hashed as `hash_ids(keys, None)` does.

    Returns:
      uint64 `[n]`.

    Raises:
      TypeError: they are neither all integers nor all strings.
      ValueError: another shape, or one is missing.

    Example:
      >>> read_keys("keys", [7, 2**63]).tolist(), read_keys("keys", ["red"]).tolist()
      ([7, 9223372036854775808], [318610774259147834])
    """
    column = read_column(what, keys)
    if column.ndim != 1:
        refuse(what, expected="keys of shape (n,)", got=f"{column.dtype} of shape {column.shape}")
    missing = np.ma.getmaskarray(column)
    if missing.any():
        refuse(
            what, expected="a key at every place", got=f"a missing one at {int(np.argmax(missing))}"
        )
    numbers = np.ma.getdata(column)
    if numbers.dtype.kind == "i":
        return numbers.astype(np.int64).view(np.uint64)
    if numbers.dtype.kind == "u":
        return np.ascontiguousarray(numbers, np.uint64)
    if numbers.dtype.kind not in "USO":
        got, remedy = describe_values(numbers)
        refuse(what, expected="integers or strings", got=got, remedy=remedy, error=TypeError)
    if numbers.dtype.kind == "O" and not all(isinstance(one, (str, bytes)) for one in numbers):
        expected, (got, remedy) = (
            "integers of at most 64 bits, or strings",
            describe_values(numbers),
        )
        refuse(what, expected=expected, got=got, remedy=remedy, error=TypeError)
    return hash_keys(numbers, 0)[0] % _STRING_KEYS
