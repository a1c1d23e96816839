"""Map keys of any kind, strings or large integers, to the rows of a table by hashing.

If the set of keys is not known beforehand, there is no dictionary from keys to rows. A hash
function gives every key a row; different keys may share one. The result depends only on the key,
the vocabulary size and the seed. It is the same in every process, on every platform and in every
Python version, so that a checkpoint and a server agree on it.

Input: arrays, columns, lists or bags of keys, on the host. Output: ids in the same form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PADDING_ID
from tpu_embed.columns import mask_missing, read_lists
from tpu_embed.core.ids.containers import RaggedIds, SparseIds
from tpu_embed.key_hashes import hash_keys


def hash_ids(
    keys: Any, vocabulary_size: int | None, *, seed: int = 0, missing: int = PADDING_ID
) -> Any:
    """Map keys to ids in [0, vocabulary_size).

    All arithmetic is unsigned, modulo 2⁶⁴. With

        mix(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9
                x ^= x >> 27; x *= 0x94D049BB133111EB
                x ^= x >> 31

    and s = mix(seed + 0x9E3779B97F4A7C15):

    - an integer k (two's complement): h = mix(k ^ s);
    - a string: its n bytes (a str: its UTF-8), padded with zeros to ⌈n/8⌉ little-endian words
      w₀, w₁, …; h = mix(n ^ s), then h = mix(h ^ wⱼ) for each word in order.

    The id is h mod vocabulary_size. A missing key is not hashed: None, NaN, NaT and pandas.NA
    beside other keys, nulls of Arrow, and masked entries of a masked array. The keys -1 and "" are
    hashed like any other key; where -1 is padding, it has to be restored afterwards:
    `np.where(keys == -1, -1, hash_ids(keys, V))`.

    Args:
      keys: an array of any integer dtype, of NumPy strings (str or bytes), or of str and bytes
        objects; a column of such keys of pandas, polars or Arrow; (nested) lists of keys; columns
        and lists of lists; or `RaggedIds` or `SparseIds` whose values are keys. NumPy's fixed-width
        strings drop trailing NUL characters; lists, objects and columns keep them.
      vocabulary_size: V, the number of ids. None: 2⁶³, so that different keys hardly ever share an
        id: among n keys, the odds that any two do are about n²/2⁶⁴.
      seed: another seed gives another, independent mapping.
      missing: the id of a missing key: -1, which is padding, or a row. The row V, in a table of
        V + 1 rows, is no other key's.

    Returns:
      The ids, in the shape of the keys; int32 if V <= 2³¹ - 1, otherwise int64. For `RaggedIds` and
      `SparseIds` the same container of ids, with its weights. For a column of lists, or lists of
      different lengths, `RaggedIds`. In these, a key that is missing is masked if `missing` is -1:
      it leaves its bag, with its weight.

    Raises:
      TypeError: a key is neither a string nor an integer (a float or bool is refused).
      ValueError: `vocabulary_size`, `seed` or `missing` is outside its range.

    Example:
      >>> hash_ids(["red", None, "red"], 1000)
      array([834,  -1, 834], dtype=int32)
      >>> hash_ids([["red"], [], ["green", "red"]], 1000).values
      array([834, 574, 834], dtype=int32)

    Reference:
      Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014 (the constants
      of mix: D. Stafford's "variant 13").
    """
    size = 2**63
    if vocabulary_size is not None:
        size = _check_below("vocabulary_size", vocabulary_size, 63, minimum=1)
    seed = _check_below("seed", seed, 64, minimum=0)
    bits = 31 if size < 2**31 else 63
    missing = _check_below("missing", missing, bits, minimum=PADDING_ID)
    dtype = np.int32 if bits == 31 else np.int64

    def ids_of(flat: Any, in_bags: bool) -> np.ndarray:
        hashes, absent = hash_keys(flat, seed)
        ids = np.asarray(hashes % np.uint64(size), dtype)
        # -1 is padding in an array. In a bag it would be a bad id, so there the key is masked.
        if in_bags and missing == PADDING_ID:
            return mask_missing(ids, absent)
        if absent.any():
            ids[absent] = missing
        return ids

    if isinstance(keys, (RaggedIds, SparseIds)):
        return dataclasses.replace(keys, values=ids_of(keys.values, True))
    bags = read_lists("hash_ids: keys", keys)
    # Lists of equal lengths are an array [B, H].
    if bags is None or (isinstance(keys, (list, tuple)) and not np.ptp(bags.lengths)):
        return ids_of(keys, False)
    return RaggedIds(ids_of(bags.items, True), bags.row_splits)


def _check_below(name: str, value: Any, bits: int, *, minimum: int) -> int:
    """Return an argument, an integer from a minimum to 2**bits - 1.

    Raises:
      ValueError: it is not.
    """
    number = _checks.check_int(f"hash_ids: {name}", value, minimum=minimum)
    if number >= 2**bits:
        expected = f"{name} < 2**{bits}"
        raise ValueError(_checks.message(f"hash_ids: {name}", expected=expected, got=number))
    return number
