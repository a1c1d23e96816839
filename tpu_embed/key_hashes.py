"""Hash a column of keys, strings or integers: the same in every process and on every platform.

`hash_ids` (`core/ids/keys.py`) has the definition.

Input: an array or a flat column of keys. Output: a hash of 64 bits for each, and which are missing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.columns import as_arrow, describe_values, read_column, read_dictionary

# Added to the seed, so that seed 0 gives a state other than mix(0) = 0.
_GAMMA = 0x9E3779B97F4A7C15
# Bytes of a word: strings are hashed eight bytes at a time.
_WORD = 8


def hash_keys(keys: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of an array or a flat column of keys, and which keys are missing.

    Args:
      keys: strings or integers.
      seed: in [0, 2⁶⁴).

    Returns:
      (uint64, bool), both in the shape of the keys; the hash of a missing key is any number.

    Raises:
      TypeError: the keys are neither all strings nor all integers.
      ValueError: an integer has more than 64 bits.
    """
    return _hashes(keys, mix(np.array([(seed + _GAMMA) % 2**64], np.uint64)))


def _hashes(keys: Any, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of an array or a flat column of keys, and which keys are missing.

    Returns:
      (uint64, bool), both in the shape of the keys; the hash of a missing key is any number.
    """
    encoded = read_dictionary(keys)
    if encoded is not None:
        # Each entry of the dictionary is hashed once. The code of a missing key is -1: it gets the
        # last entry.
        hashes, missing = _hashes(encoded[0], state)
        return np.append(hashes, np.uint64(0))[encoded[1]], np.append(missing, True)[
            encoded[1]
        ]
    arrow = as_arrow(keys)
    if arrow is not None:
        kind = str(arrow.type).removeprefix("large_").removesuffix("_view")
        if kind in ("string", "binary"):
            strings, missing = _strings_of_arrow(arrow)
            return _hash_strings(strings, state), missing
    array = read_column(_KEYS, keys)
    missing, values = np.ma.getmaskarray(array), np.ma.getdata(array)
    some = bool(missing.any())
    present = _checked(keys, array, values[~missing] if some else values.ravel())
    if present.dtype.kind in "iu":
        # Sign-extend first, so that int8 -1 and int64 -1 are the same key.
        bits = present.astype(np.uint64 if present.dtype.kind == "u" else np.int64)
        found = mix(bits.view(np.uint64) ^ state)
    else:
        found = _hash_strings(_strings_of(present), state)
    if not some:
        return found.reshape(array.shape), missing
    hashes = np.zeros(array.shape, np.uint64)
    hashes[~missing] = found
    return hashes, missing


def mix(x: np.ndarray) -> np.ndarray:
    """Return `mix(x)` of uint64, see `hash_ids`; NumPy's products wrap around modulo 2⁶⁴."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class _Strings(NamedTuple):
    """The bytes of many strings.

    Attributes:
      data: uint8, at least 8 bytes longer than the last string reaches.
      starts: int64 [n], where in `data` each string begins.
      lengths: int64 [n], in bytes.
    """

    data: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def _hash_strings(strings: _Strings, state: np.ndarray) -> np.ndarray:
    """Return the hashes [n] of strings."""
    data, starts, lengths = strings
    # A word may begin at any byte: words[k] is made of data[k], …, data[k + 7].
    words = np.ndarray((data.size - _WORD + 1,), "<u8", data, strides=(1,))
    hashes = mix(lengths.astype(np.uint64) ^ state)
    # Word j of all strings at once, for j = 0, 1, …; first the words that all strings have whole.
    column = int(lengths.min()) // _WORD if lengths.size else 0
    for at in range(0, column * _WORD, _WORD):
        hashes = mix(hashes ^ words[starts + at].astype(np.uint64))
    # `active` are the strings that have a word j.
    active = np.flatnonzero(lengths > column * _WORD)
    while active.size:
        left = lengths[active] - column * _WORD
        # The last word of a string of 13 bytes has 5: the 3 after them are shifted out.
        shift = (np.maximum(_WORD - left, 0) * 8).astype(np.uint64)
        word = words[starts[active] + column * _WORD].astype(np.uint64)
        hashes[active] = mix(hashes[active] ^ ((word << shift) >> shift))
        active, column = active[left > _WORD], column + 1
    return hashes


_EXPECTED = "strings or integers"
_KEYS = "hash_ids: keys"


def _checked(keys: Any, array: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return keys `[n]` that are not missing: integers, fixed-width strings, or objects of strings.

    Args:
      keys: all keys, as the user gave them.
      array: the same keys as an array.
      present: those of the array that are not missing.

    Raises:
      TypeError: the keys are neither all strings nor all integers.
      ValueError: an integer has more than 64 bits.
    """
    if present.dtype.kind in "iuSU":
        return present
    objects = present
    if isinstance(keys, (list, tuple)) and present.dtype != object:
        objects = np.array(keys, dtype=object).ravel()
    if objects.dtype != object:
        nan = (
            'NaN makes floats of integers: column.astype("Int64") keeps what is missing'
        )
        got, remedy = describe_values(array)
        refuse(
            _KEYS,
            expected=_EXPECTED,
            got=got,
            remedy=nan if array.dtype.kind == "f" else remedy,
            error=TypeError,
        )
    kinds = set(map(type, objects))
    if all(issubclass(kind, (str, bytes)) for kind in kinds):
        return objects
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        if not all(-(2**63) <= key < 2**64 for key in objects):
            refuse(_KEYS, expected="integers of 64 bits", got="a larger one")
        # Some are negative and others beyond int64: modulo 2⁶⁴.
        return np.array([int(key) % 2**64 for key in objects], np.uint64)
    got, remedy = describe_values(objects)
    refuse(
        _KEYS,
        expected=f"{_EXPECTED}, not both",
        got=got,
        remedy=remedy,
        error=TypeError,
    )


def _strings_of(keys: np.ndarray) -> _Strings:
    """Return the bytes of NumPy strings, or of str and bytes objects `[n]`."""
    if keys.dtype.kind == "U":
        keys = _utf8(keys)
    if keys.dtype.kind == "O":
        joined, strings = _joined(keys.tolist())
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        data = np.frombuffer(joined + bytes(_WORD), np.uint8)
        return _Strings(data, np.cumsum(lengths) - lengths, lengths)
    # Fixed-width strings begin at every multiple of their width.
    data = np.frombuffer(keys.tobytes() + bytes(_WORD), np.uint8)
    return _Strings(
        data, np.arange(len(keys)) * keys.dtype.itemsize, np.strings.str_len(keys)
    )


def _joined(strings: list[Any]) -> tuple[bytes, list[Any]]:
    """Return the UTF-8 bytes of all strings, and the strings with as many characters as bytes."""
    if all(issubclass(kind, str) for kind in set(map(type, strings))):
        # To encode one long string is much faster than to encode many short ones.
        text = "".join(strings)
        if text.isascii():
            return text.encode(), strings
    encoded = [
        key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
        for key in strings
    ]
    return b"".join(encoded), encoded


def _utf8(strings: np.ndarray) -> np.ndarray:
    """Return the UTF-8 bytes of fixed-width str."""
    # NumPy stores str as UTF-32. If all code points are ASCII, dropping three of every four bytes
    # gives UTF-8, much faster than encoding.
    width = strings.dtype.itemsize // 4
    if width == 0 or len(strings) == 0:
        return strings.astype("S1")
    points = np.ascontiguousarray(strings.astype(f"=U{width}")).view(np.uint32)
    if points.max() < 128:
        return points.astype(np.uint8).view(f"S{width}")
    return np.strings.encode(strings, "utf-8", "surrogatepass")


def _strings_of_arrow(arrow: Any) -> tuple[_Strings, np.ndarray]:
    """Return the bytes of an Arrow array of strings `[n]`, and which are missing, bool `[n]`."""
    # Arrow has all bytes in one buffer and the offsets [n + 1] in another, so there is no need for
    # Python strings. Large offsets are int64: then all chunks fit into one array.
    array = arrow.cast("large_binary")
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    missing = array.is_null().to_numpy(zero_copy_only=False)
    _, offsets, data = array.buffers()
    ends = np.zeros(1, np.int64)
    if len(array):
        ends = np.frombuffer(offsets, np.int64)[
            array.offset : array.offset + len(array) + 1
        ]
    used = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    padded = np.concatenate([used, np.zeros(_WORD, np.uint8)])
    return _Strings(padded, ends[:-1] - ends[0], np.diff(ends)), missing
