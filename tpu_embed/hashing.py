"""Map keys of any kind, strings or large integers, to the rows of a table by hashing.

If the set of keys is not known beforehand, there is no dictionary from keys to rows. A hash
function gives every key a row; different keys may share one. The result depends only on the key,
the vocabulary size and the seed. It is the same in every process, on every platform and in every
Python version, so that a checkpoint and a server agree on it.

Input: arrays or lists of keys, on the host. Output: NumPy arrays of ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embed import _checks

__all__ = ["hash_ids"]

# Added to the seed, so that seed 0 gives a state other than mix(0) = 0.
_GAMMA = 0x9E3779B97F4A7C15
# Bytes of a word: strings are hashed eight bytes at a time.
_WORD = 8
_INT32_MAX = np.iinfo(np.int32).max


def hash_ids(keys: Any, vocabulary_size: int, *, seed: int = 0) -> np.ndarray:
    """Map keys to ids in [0, vocabulary_size).

    All arithmetic is unsigned, modulo 2⁶⁴. With

        mix(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9
                x ^= x >> 27; x *= 0x94D049BB133111EB
                x ^= x >> 31

    and s = mix(seed + 0x9E3779B97F4A7C15):

    - an integer k (two's complement): h = mix(k ^ s);
    - a string: its n bytes (a str: its UTF-8), padded with zeros to ⌈n/8⌉ little-endian words
      w₀, w₁, …; h = mix(n ^ s), then h = mix(h ^ wⱼ) for each word in order.

    The id is h mod vocabulary_size. The keys -1 and "" are hashed like any other key, so padding
    has to be restored afterwards: `np.where(keys == -1, -1, hash_ids(keys, V))`.

    Args:
      keys: array of any integer dtype, of NumPy strings (str or bytes), or of str and bytes
        objects; or (nested) lists of them. NumPy's fixed-width strings drop trailing NUL
        characters; lists and object arrays keep them.
      vocabulary_size: V, the number of ids.
      seed: another seed gives another, independent mapping.

    Returns:
      The ids, in the shape of the keys; int32 if V <= 2³¹ - 1, otherwise int64.

    Raises:
      TypeError: a key is neither a string nor an integer (a float or bool is refused).
      ValueError: `vocabulary_size` or `seed` is outside its range.

    Example:
      >>> hash_ids(["red", "green", "red"], 1000)
      array([834, 574, 834], dtype=int32)

    Reference:
      Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014 (the constants
      of mix: D. Stafford's "variant 13").
    """
    size = _checks.check_int("hash_ids: vocabulary_size", vocabulary_size, minimum=1)
    seed = _checks.check_int("hash_ids: seed", seed, minimum=0)
    if max(seed >> 64, size >> 63):
        expected = "vocabulary_size < 2**63 and seed < 2**64"
        raise ValueError(_checks.message("hash_ids", expected=expected, got=f"{size} and {seed}"))
    array = _as_array(keys)
    state = _mix(np.array([(seed + _GAMMA) % 2**64], np.uint64))
    if array.dtype.kind in "iu":
        # Sign-extend first, so that int8 -1 and int64 -1 are the same key.
        bits = array.ravel().astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        hashes = _mix(bits.view(np.uint64) ^ state)
    else:
        hashes = _hash_strings(*_words(array.ravel()), state)
    ids = hashes % np.uint64(size)
    return ids.astype(np.int32 if size <= _INT32_MAX else np.int64).reshape(array.shape)


def _mix(x: np.ndarray) -> np.ndarray:
    """Return `mix(x)` of uint64, see `hash_ids`; NumPy's products wrap around modulo 2⁶⁴."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _hash_strings(
    words: np.ndarray, starts: np.ndarray, lengths: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """Return the hashes of strings: string i has `lengths[i]` bytes, its words at `starts[i]`."""
    hashes = _mix(lengths.astype(np.uint64) ^ state)
    counts = (lengths + _WORD - 1) // _WORD
    # Word j of all strings at once, for j = 0, 1, …; `active` are the strings that have a word j.
    active = np.flatnonzero(counts)
    column = 0
    while active.size:
        hashes[active] = _mix(hashes[active] ^ words[starts[active] + column])
        column += 1
        active = active[counts[active] > column]
    return hashes


def _as_array(keys: Any) -> np.ndarray:
    """Return integers, fixed-width strings, or an object array of str and bytes."""
    array = np.asarray(keys)
    listed = isinstance(keys, (list, tuple, str, bytes))
    if array.dtype.kind == "T" or (listed and array.dtype.kind not in "iu"):
        # Fixed-width strings would drop trailing NULs, and np.asarray turns a list of integers
        # into floats if one of them exceeds int64.
        array = np.array(keys, dtype=object)
    if array.dtype.kind == "O":
        array = _checked_objects(array)
    if array.dtype.kind not in "iuSUO":
        raise TypeError(_checks.message("hash_ids: keys", expected=_EXPECTED, got=array.dtype))
    return array


_EXPECTED = "strings or integers"


def _checked_objects(array: np.ndarray) -> np.ndarray:
    """Return an object array of strings as it is, and one of integers as uint64.

    Raises:
      TypeError: the objects are neither all strings nor all integers.
      ValueError: an integer has more than 64 bits.
    """
    kinds = set(map(type, array.flat))
    if all(issubclass(kind, (str, bytes)) for kind in kinds):
        return array
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        if all(-(2**63) <= key < 2**64 for key in array.flat):
            # Modulo 2**64, a negative integer becomes its two's complement.
            return np.array([int(key) % 2**64 for key in array.flat], np.uint64).reshape(
                array.shape
            )
        expected = "integers of 64 bits"
        raise ValueError(_checks.message("hash_ids: keys", expected=expected, got="a larger one"))
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise TypeError(
        _checks.message(
            "hash_ids: keys", expected=f"{_EXPECTED}, not both", got=f"objects of {names}"
        )
    )


def _words(strings: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the words of strings `[n]`, each padded with zeros to whole words of 8 bytes.

    Returns:
      words: uint64 `[W]`, of all strings, one after another.
      starts: `[n]`, where the words of each string begin.
      lengths: `[n]`, in bytes, without padding.
    """
    if strings.dtype.kind == "U":
        strings = _utf8(strings)
    if strings.dtype.kind == "O":
        return _words_of_objects(strings)
    # Fixed-width strings all take the same number of words: "S12" takes 2, so starts are 0 2 4 ….
    width = max(1, -(-strings.dtype.itemsize // _WORD))
    lengths = np.strings.str_len(strings)
    padded = np.ascontiguousarray(strings.astype(f"S{width * _WORD}"))
    return padded.view("<u8").astype(np.uint64), np.arange(len(strings)) * width, lengths


def _words_of_objects(strings: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `_words` returns, for an object array of str and bytes."""
    encoded = [
        key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key for key in strings
    ]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    # -len % 8 zero bytes fill the last word: 12 bytes get 4. Words 2 0 1 start at 0 2 2.
    padded = b"".join([key + bytes(-len(key) % _WORD) for key in encoded])
    counts = (lengths + _WORD - 1) // _WORD
    return np.frombuffer(padded, "<u8").astype(np.uint64), np.cumsum(counts) - counts, lengths


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
