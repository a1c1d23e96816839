"""Keys instead of row numbers: strings and numbers of any size, hashed or looked up in a map.

A batch of keys is validated before anyone knows the keys' rows, because a batch that is refused
must not change the map from keys to rows. So each key is first replaced by its position among the
feature's distinct keys, which is treated like a row id that is always valid. Once the rows are
known, they take the places of the positions. The bags [k, m] and [k], whose keys k and m have the
rows 8 and -1 (none), are

    distinct keys [k, m]     positions [[0, 1], [0, -1]]     rows [[8, -1], [8, -1]]

If the set of keys is not known beforehand, and the vocabulary does not live, a hash function gives
every key a row (`hash_ids`); different keys may share one. The result depends only on the key, the
vocabulary size and the seed. It is the same in every process, on every platform and in every Python
version, so that a checkpoint and a server agree on it.

Input: arrays, columns, lists or bags of keys; or integers of any dtype, and later the row of each
key. Output: ids in the same form; or positions and keys, then `HostIds` as those of any other
table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PADDING_ID
from tpu_embed.columns import mask_missing, read_lists
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, values_of
from tpu_embed.core.ids.feature_ids import HostIds
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.host_reference import DistinctKeys
from tpu_embed.key_hashes import hash_keys


class Split(NamedTuple):
    """The keys that one feature of a batch looks up.

    Attributes:
      known: int32 `[k]`, the rows of keys that have one, each once.
      absent: int32 `[m]`, the positions of the keys without a row, each once, in batch order.
      keys: uint64 `[m]`, these keys.
      examples: int64 `[m]`, the first example of each.
    """

    known: np.ndarray
    absent: np.ndarray
    keys: np.ndarray
    examples: np.ndarray


def number_keys(ids: Any) -> tuple[Any, DistinctKeys]:
    """Replace the keys of a feature by their positions among the distinct ones.

    Args:
      ids: an array or a container of integers; -1 is padding in dense arrays of a signed dtype, and
        a key like any other elsewhere.

    Returns:
      The same array or container with positions int32, those of padding masked; and the distinct
      keys, with what stands at padding among them.
    """
    values = values_of(ids)
    numbers, absent = np.ma.getdata(values), np.ma.getmask(values)
    signed = numbers.dtype.kind == "i"
    if values is ids and signed:
        absent = absent | (numbers == PADDING_ID)
    wide = np.int64 if signed else np.uint64
    distinct = _distinct(numbers.astype(wide, copy=False).reshape(-1))
    numbered = mask_missing(distinct.positions.reshape(values.shape), absent)
    if values is not ids:
        numbered = dataclasses.replace(ids, values=numbered)
    return numbered, distinct


def with_keys(host: HostIds, distinct: DistinctKeys) -> HostIds:
    """Return the `HostIds` of a feature whose ids are positions, with the keys that these are of.

    Args:
      host: the feature.
      distinct: what `number_keys` returned.
    """
    # Nothing was left out of dense ids that are as many as before, and none of them is padding.
    whole = (
        host.bags is None
        and not host.padded
        and host.ids.size == distinct.positions.size
    )
    first = distinct.first if whole else None
    return dataclasses.replace(host, keys=distinct.keys, first=first)


def number_ids(host: HostIds) -> HostIds:
    """Replace the ids of a table on the host, which were validated, by positions among them."""
    if not host.padded:
        keys, numbered, first = _distinct(
            host.ids.reshape(-1).astype(np.int64, copy=False)
        )
        numbered = numbered.reshape(host.ids.shape)
    else:
        chosen, first = host.ids >= 0, None
        numbered = np.full(host.ids.shape, PADDING_ID, np.int32)
        keys, numbered[chosen], _ = _distinct(host.ids[chosen].astype(np.int64))
    return dataclasses.replace(host, ids=numbered, keys=keys, first=first)


def _distinct(numbers: np.ndarray) -> DistinctKeys:
    """Return the distinct keys among integers of 64 bits `[n]`; a signed -1 is the key 2⁶⁴ - 1."""
    return dispatch.host_kernels().distinct_keys(
        np.ascontiguousarray(numbers).view(np.uint64)
    )


def _positions(host: HostIds) -> np.ndarray:
    return np.ascontiguousarray(host.ids.reshape(-1), np.int32)


def looked_up(host: HostIds) -> np.ndarray:
    """Return the positions of the keys that a feature looks up, `[m]` in batch order."""
    positions = host.ids.reshape(-1)
    return positions[positions >= 0] if host.padded else positions


def split_keys(host: HostIds, rows: np.ndarray) -> Split:
    """Split the keys that a feature looks up into those with a row and those without.

    Args:
      host: the feature, with positions for ids.
      rows: int32 `[n]`, the row of each key; -1: none.
    """
    assert host.keys is not None, "positions are those of keys"
    positions = _positions(host)
    if host.first is None:
        known, places = dispatch.host_kernels().split_by_row(positions, rows)
    else:
        # Faster than `rows[rows >= 0]`: NumPy reads a mask twice, to count and to copy.
        known = rows.take(np.flatnonzero(rows >= 0))
        places = host.first.take(np.flatnonzero(rows < 0))
    if host.bags is not None:
        examples = host.bags[places].astype(np.int64) // host.shape.bags
    else:  # positions [B, bags, width]: the index of an id, divided by bags · width
        examples = places // max(1, positions.size // host.shape.batch)
    absent = positions[places]
    return Split(known, absent, host.keys[absent], examples)


def batch_order(features: Sequence[tuple[np.ndarray, int]]) -> np.ndarray:
    """Return the order in which the keys of several features stand in the batch.

    Args:
      features: for each feature in flattening order, the example of each of its keys, int64
        `[m]`, ascending, and the number of its examples in the global batch.

    Returns:
      int `[all m]`, the order of the keys, counted through all features.
    """
    # Example e of B comes at e / B of the batch. The fractions of batches of 2 and 3 examples
    # become the integers 0 3 and 0 2 4. A stable sort keeps the features, and the keys of one
    # example, in order. Python's integers are as large as need be.
    whole = math.lcm(*(size for _, size in features))
    dtype = np.int64 if whole < 2**63 else object
    places = [index.astype(dtype) * (whole // size) for index, size in features]
    return np.argsort(np.concatenate([np.zeros(0, dtype), *places]), kind="stable")


def give_rows(host: HostIds, rows: np.ndarray) -> HostIds:
    """Return a feature's ids with the rows of its keys; what has no row is as a dropped id.

    Args:
      host: the feature, with positions for ids.
      rows: int32 `[n]`, the row of each key; -1: none.
    """
    ids = (
        dispatch.host_kernels().rows_at(rows, _positions(host)).reshape(host.ids.shape)
    )
    found = dataclasses.replace(host, ids=ids, keys=None, first=None)
    return found.only(ids >= 0) if host.padded or (rows < 0).any() else found


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

    def ids_of(flat, in_bags):
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
    number = check_int(f"hash_ids: {name}", value, minimum=minimum)
    if number >= 2**bits:
        refuse(f"hash_ids: {name}", expected=f"{name} < 2**{bits}", got=number)
    return number
