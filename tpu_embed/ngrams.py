"""Hash the n-grams of tokens to the rows of one table: a memory of what was just read.

Input: tokens, on the host or traced. Output: ids, several for each token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PADDING_ID

_MODULUS = 2**32
_GAMMA = 0x9E3779B9


def ngram_ids(
    tokens: Any,
    orders: Iterable[int] = (2, 3),
    *,
    heads: int,
    vocabulary_size: int,
    seed: int = 0,
    segments: Any = None,
) -> Any:
    """Map the n-grams that end at each token to ids of one table.

    Of an order n, the n-gram at place i is tokens[i - n + 1 … i]. Each order has several heads,
    which hash it independently: two n-grams that share the row of one head hardly ever share those
    of the others. The pairs (order, head) are the C columns of the result, head after head of one
    order after the other. Each column has rows of its own, as many as its prime p: these are the C
    largest primes up to vocabulary_size // C, the largest first, and the rows of a column begin
    where those of the column before it end.

    All arithmetic is unsigned, modulo 2³², so that the ids are the same in NumPy, in a traced
    program, and on every platform. With

        mix(x): x ^= x >> 16; x *= 0x85EBCA6B
                x ^= x >> 13; x *= 0xC2B2AE35
                x ^= x >> 16

    the hash of column c, counted from 0, begins as h = mix(mix(seed + 0x9E3779B9) + c + 1); then
    h = mix(h ^ t) for each token t of the n-gram in order. The id is the beginning of the column's
    rows + h mod p.

    Args:
      tokens: integers `[..., L]`, usually `[B, L]`, below 2³²: lists or NumPy's give ids on the
        host, JAX's give ids on the devices. A negative token is padding, and so is a masked one.
      orders: the lengths n of the n-grams, each once, at least 1.
      heads: how many ids each order has.
      vocabulary_size: V of the table, at most 2³¹ - 1. A few of its rows stay unused.
      seed: another one, below 2³², gives another, independent mapping.
      segments: integers in the shape of the tokens, which name the text that each token is from,
        where several texts stand one after the other in a row; None: each row is one text.

    Returns:
      int32 `[..., L, C]`, of `len(orders) * heads` columns; -1, which is padding, where the n-gram
      would begin before the row or its segment, or has padding in it. A feature whose last axis is
      to be no bag takes `ids[..., None]`, and its activation is `[..., L, C, D]`.

    Raises:
      TypeError: tokens or segments that are no integers.
      ValueError: tokens of 2³² or more (where they are known); segments of another shape; orders,
        heads, vocabulary_size or seed outside their range; a table too small for the columns.

    Example:
      >>> ngram_ids([[5, 6, 5, 6]], orders=(2,), heads=2, vocabulary_size=100)
      array([[[-1, -1],
              [23, 85],
              [ 2, 79],
              [23, 85]]], dtype=int32)

    References:
      Austin Appleby, MurmurHash3, 2011 (the constants of mix: "fmix32").
      Cheng et al., "Conditional memory via scalable lookup", 2026 (several heads, prime sizes).
    """
    tokens = _integers("tokens", tokens)
    if not isinstance(orders, Iterable):
        _refuse("orders", "lengths of n-grams, such as (2, 3)", repr(orders))
    orders = [
        check_int(f"ngram_ids: orders[{i}]", n, minimum=1) for i, n in enumerate(orders)
    ]
    heads = check_int("ngram_ids: heads", heads, minimum=1)
    if len(set(orders)) < max(len(orders), 1):
        _refuse("orders", "at least one length, each once", orders)
    size = check_int("ngram_ids: vocabulary_size", vocabulary_size, minimum=1)
    if size >= 2**31:
        _refuse("vocabulary_size", "at most 2**31 - 1", size)
    if not 0 <= check_int("ngram_ids: seed", seed, minimum=0) < _MODULUS:
        _refuse("seed", "at most 2**32 - 1", seed)
    if segments is not None:
        segments = _integers("segments", segments)
        if segments.shape != tokens.shape:
            expected = f"the shape of the tokens, {tokens.shape}"
            _refuse("segments", expected, segments.shape)

    traced = any(isinstance(one, jax.Array) for one in (tokens, segments))
    xp: ModuleType = jnp if traced else np
    primes = _primes(size, len(orders) * heads)
    starts = np.cumsum(primes, dtype=np.uint32) - primes
    numbers = np.arange(1, len(primes) + 1, dtype=np.uint32)
    states = _mix(_mix(np.array([(seed + _GAMMA) % _MODULUS], np.uint32)) + numbers)

    bits, present = tokens.astype(np.uint32), tokens >= 0
    ids = []
    for first, order in zip(range(0, len(primes), heads), orders, strict=True):
        # [heads], then [..., L, heads].
        hashes = xp.asarray(states[first : first + heads])
        whole = present
        for back in reversed(range(order)):
            hashes = _mix(hashes ^ _moved(xp, bits, back)[..., None])
            whole = whole & _moved(xp, present, back)
            if segments is not None:
                # Places without a token that long ago have a zero here, but are not whole.
                whole = whole & (_moved(xp, segments, back) == segments)
        column = slice(first, first + heads)
        rows = (hashes % primes[column] + starts[column]).astype(np.int32)
        ids.append(xp.where(whole[..., None], rows, np.int32(PADDING_ID)))
    return xp.concatenate(ids, axis=-1)


def _refuse(
    what: str, expected: str, got: Any, error: type[Exception] = ValueError
) -> NoReturn:
    refuse(f"ngram_ids: {what}", expected=expected, got=got, error=error)


def _integers(what: str, given: Any) -> Any:
    """Return an array of integers `[..., L]`, as it is or from a list; masked places are -1.

    Raises:
      TypeError: it holds something else.
      ValueError: it has no axis, or a known token does not fit 32 bits.
    """
    array = (
        given if isinstance(given, jax.Array | np.ma.MaskedArray) else np.asarray(given)
    )
    if not isinstance(array, jax.Array) and not array.size:
        array = np.zeros(array.shape, np.int32)  # a list without tokens
    if array.dtype.kind not in "iu":
        _refuse(what, "integers", f"{array.dtype}", TypeError)
    if not array.ndim:
        _refuse(what, "an array [..., L]", "a number")
    if isinstance(array, np.ndarray) and array.size and array.max() >= _MODULUS:
        _refuse(what, "integers below 2**32", array.max())
    if isinstance(array, np.ma.MaskedArray):
        array = np.where(np.ma.getmaskarray(array), -1, array.data.astype(np.int64))
    return array


def _moved(xp: ModuleType, array: Any, places: int) -> Any:
    """Return `[..., L]` moved to the right, with zeros where it has come from."""
    begin = xp.zeros_like(array[..., :places])
    return xp.concatenate(
        [begin, array[..., : max(array.shape[-1] - places, 0)]], axis=-1
    )


def _mix(x: Any) -> Any:
    """Return `mix(x)` of uint32, see `ngram_ids`; products of arrays wrap around modulo 2³²."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@functools.lru_cache
def _primes(size: int, columns: int) -> np.ndarray:
    """Return the largest distinct primes, one for each column, that are at most size // columns.

    Raises:
      ValueError: there are not as many.
    """
    found, candidate = [], size // columns
    while len(found) < columns and candidate >= 2:
        if (
            candidate == 2
            or (candidate % np.arange(2, math.isqrt(candidate) + 1)).all()
        ):
            found.append(candidate)
        candidate -= 1
    if len(found) < columns:
        expected = f"room for {columns} columns with different prime numbers of rows"
        _refuse("vocabulary_size", expected, size)
    return np.array(found, np.uint32)
