"""Find the rows of one shard with the largest inner products, one block of rows after the other.

The product of all queries and all rows would be `[B, V]`. A block's product is `[B, n * G]`, for n
bundles of G rows each, and of it only what can be among the best is looked at closely:

1. The largest score of each bundle, `[B, n]`, is cheap: a maximum of G numbers, n at a time.
2. A bundle matters only if its largest score is above the K-th best score so far. There are few
   such bundles once some blocks have been read.
3. The K best scores of the block lie in the K bundles with the largest maxima. So the expensive
   `jax.lax.top_k` runs on n maxima, then on the scores of few bundles, never on the whole product.

Rows are read in the order of their ids, and `jax.lax.top_k` puts the first of equal numbers first,
so among equal scores those of the lower ids stay. For that, a bundle is G consecutive rows: if two
bundles have the same maximum, all ids of the first one are lower.

What a query must not find is hidden in the product before all that. Its E rows ascend, so those of
a block stand together, and over all blocks each of them is written once: no product of K and E.

Input: one shard of a stack, and queries. Output: K scores and indices per query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.exchange import axis_index
from tpu_embed.core.layout import Stack, TableSlice, round_up
from tpu_embed.core.state import read_rows, row_unit
from tpu_embed.retrieval.scores import Score, scored

PRODUCT_NUMBERS = 2**21
"""How many numbers the product of one block has, about; 8 MiB of float32 stay in a CPU's cache."""

LEAST_ROWS = 1024
"""A block has at least so many rows, however many queries there are."""

BUNDLE_ROWS = 16
"""G, the rows of a bundle."""

FEW_BUNDLES = (0, 4, 16, 64)
"""Numbers of bundles for which a program has a branch of its own, besides all that may matter."""


LEAST_HIDDEN = 8
"""Of so many rows that a query must not find the scores are hidden together, or of more."""


class Found(NamedTuple):
    """The best K rows so far, best first: the lower index first where scores are equal.

    Attributes:
      scores: `[B, K]`, -inf where there is no row.
      indices: int `[B, K]`, rows of this shard, counted from the table's first one; -1 for none.
    """

    scores: Array
    indices: Array


def plan_blocks(stack: Stack, table: TableSlice, queries: int) -> tuple[int, int, int]:
    """Return which local rows are read together: blocks that cover a table.

    The products of a block's rows with the queries are not too many numbers.

    Returns:
      begin: the first local row of the first block, at or before the table's first one.
      count: the number of blocks.
      size: the rows of a block.
    """
    # Packed rows can only be read from a multiple of 128 on. A table that begins at local row 300
    # is read from row 256 on, and the rows before 300 are masked.
    unit = row_unit(stack.row_format)
    begin = table.offset // unit * unit
    rows = table.offset + table.rows_per_shard - begin
    most = max(PRODUCT_NUMBERS // max(queries, 1), LEAST_ROWS)
    count = -(-rows // most)
    size = round_up(-(-rows // count), math.lcm(unit, BUNDLE_ROWS))
    return begin, count, min(size, stack.num_rows)


def scan_shard(
    physical: Array,
    queries: Array,
    exclude: Array | None,
    allowed: Array | None,
    *,
    stack: Stack,
    table: TableSlice,
    kept: int,
    score: Score,
) -> Found:
    """Return the best rows of this shard; to be called inside `shard_map`.

    Args:
      physical: the shard's array of R local rows.
      queries: `[B, D]`, in the stack's compute dtype.
      exclude: int `[B, E]`, the physical rows that a query must not find, ascending; None: none.
      allowed: bool `[rows_per_shard]`, which of the table's rows may be found; None: all.
      stack: the stack.
      table: the table.
      kept: K.
      score: what the rows are made ready for; the queries are.
    """
    begin, count, size = plan_blocks(stack, table, len(queries))
    dtype = stack.index_dtype
    here = _rows_here(stack, table)
    if exclude is not None:  # by local row of the stack: those of other shards are outside of it
        exclude -= axis_index(stack.shard_axes).astype(dtype) * stack.num_rows
    if allowed is not None:  # by local row of the stack, with room for the last block's last bundle
        after = stack.num_rows - table.offset - table.rows_per_shard + BUNDLE_ROWS
        allowed = jnp.pad(allowed, (table.offset, after))

    def read_block(number: Array, found: Found) -> Found:
        # The last block begins earlier, so that it fits: of 10 rows in blocks of 4 it has rows 6
        # to 9, of which 6 and 7 are masked, because the block before has them.
        first = begin + number * size
        start = jnp.minimum(first, stack.num_rows - size)
        rows = read_rows(physical, start, size, stack.row_format)
        local = start + jnp.arange(round_up(size, BUNDLE_ROWS), dtype=dtype)
        # A block that is no whole number of bundles ends with the stack, so this is False after it.
        usable = (local >= jnp.maximum(first, table.offset)) & (local < table.offset + here)
        if allowed is not None:
            usable &= jax.lax.dynamic_slice_in_dim(allowed, start, len(local))
        scores = _product(queries, scored(rows, score), len(usable) // BUNDLE_ROWS)
        if exclude is not None:
            scores = _hide(scores, exclude, start, count)
        return merge_block(found, scores, usable, start - table.offset)

    shape = len(queries), kept
    nothing = Found(jnp.full(shape, -jnp.inf, queries.dtype), jnp.full(shape, PADDING_ID, dtype))
    first, end = np.array([0, count], dtype)
    return jax.lax.fori_loop(first, end, read_block, nothing)


def _rows_here(stack: Stack, table: TableSlice) -> Array:
    """Return how many rows of a table this shard has, without the padding at its end."""
    shard = axis_index(stack.shard_axes).astype(stack.index_dtype)
    size, rows = table.vocabulary_size, table.rows_per_shard
    if stack.placement == "div":
        return jnp.clip(size - shard * rows, 0, rows)
    # MOD: 5 rows on 2 shards are 0 2 4 and 1 3.
    return (size - shard + stack.num_shards - 1) // stack.num_shards


def _hide(scores: Array, rows: Array, first: Array, blocks: int) -> Array:
    """Return the scores of a block, -inf where a query must not find the row.

    Args:
      scores: `[B, G, n]`; the row G * c + g is in bundle c.
      rows: int `[B, E]`, local rows of the stack, ascending; others than the block's are ignored.
      first: int `[]`, the first local row of the block.
      blocks: how many there are.
    """
    # A block's share of E at once; where a query has more of its rows here, the rest in rounds.
    most = max(rows.shape[1] // blocks, LEAST_HIDDEN)
    size, bundles = BUNDLE_ROWS * scores.shape[2], scores.shape[2]
    # A query's rows 3 5 8 9 17 and a block of rows 8 to 15: the places 2 and 3, from 2 up to 4.
    ends = jnp.stack([first, first + size])
    begin, end = jax.vmap(jnp.searchsorted, (0, None), 1)(rows, ends)  # [B] each

    def hide_some(flat_and_begin: tuple[Array, Array]) -> tuple[Array, Array]:
        flat, begin = flat_and_begin
        places = begin[:, None] + np.arange(most, dtype=begin.dtype)
        local = jnp.take_along_axis(rows, places, axis=1, mode="clip") - first
        within = local % BUNDLE_ROWS * bundles + local // BUNDLE_ROWS  # of `[G, n]`, flat
        within = jnp.where(places < end[:, None], within, size)  # outside: nothing is written
        hide = jax.vmap(lambda of_query, at: of_query.at[at].set(-jnp.inf, mode="drop"))
        return hide(flat, within), begin + most

    flat = scores.reshape(len(scores), size)  # [B, G, n] -> [B, G * n]
    flat, _ = jax.lax.while_loop(lambda x: (x[1] < end).any(), hide_some, (flat, begin))
    return flat.reshape(scores.shape)


def merge_block(found: Found, scores: Array, usable: Array, first_index: Array) -> Found:
    """Return the best rows of those found before and those of one more block.

    Args:
      found: the best K rows of the blocks before, whose indices are all lower.
      scores: `[B, G, n]`, the block's product; the row G * c + g is in bundle c.
      usable: bool `[n * G]`: which rows count.
      first_index: int `[]`, the index of the first row.
    """
    bundles, kept = scores.shape[2], found.scores.shape[1]
    usable = usable.reshape(bundles, BUNDLE_ROWS)
    maxima = _masked(scores, usable.T).max(axis=1)  # [B, n]
    above = (maxima > found.scores[:, -1:]).sum(axis=1, dtype=jnp.int32).max()
    block = _Block(scores, usable, maxima, first_index)
    widths = [width for width in FEW_BUNDLES if width < min(kept, bundles)] + [min(kept, bundles)]
    # If 10 bundles matter and the widths are 0, 4, 16, 64 and 100, this takes branch 2, which is
    # more than 0 and more than 4.
    branch = sum((above > width).astype(jnp.int32) for width in widths[:-1])
    branches = [_merge_bundles(width) for width in widths]
    return jax.lax.switch(branch, branches, found, block)


class _Block(NamedTuple):
    """One block of n bundles of G rows.

    Attributes:
      scores: `[B, G, n]`; the row G * c + g is in bundle c.
      usable: bool `[n, G]`.
      maxima: `[B, n]`.
      first_index: int `[]`, the index of row 0.
    """

    scores: Array
    usable: Array
    maxima: Array
    first_index: Array


def _product(queries: Array, rows: Array, bundles: int) -> Array:
    """Return the inner products of queries `[B, D]` and rows `[m, D]` as `[B, G, n]`."""
    # [m, D] -> [n, G, D] -> [G, n, D]: with the bundles last, their maxima are taken n at a time.
    rows = jnp.pad(rows, ((0, bundles * BUNDLE_ROWS - len(rows)), (0, 0)))
    by_place = rows.reshape(bundles, BUNDLE_ROWS, -1).swapaxes(0, 1).reshape(len(rows), -1)
    # HIGHEST: float32 products everywhere, so that integers are exact.
    scores = jnp.matmul(queries, by_place.T, precision=jax.lax.Precision.HIGHEST)
    return scores.reshape(len(queries), BUNDLE_ROWS, bundles)


def _masked(scores: Array, usable: Array) -> Array:
    """Return scores as they are compared: -inf for NaN and where not usable, and no -0.0."""
    scores = jnp.where(scores == 0, jnp.zeros((), scores.dtype), scores)  # else 0.0 is above -0.0
    return jnp.where(usable & (scores > -jnp.inf), scores, -jnp.inf)


def _merge_bundles(width: int) -> Callable[[Found, _Block], Found]:
    """Return the function that merges the `width` bundles with the largest maxima."""

    def merge(found: Found, block: _Block) -> Found:
        if not width:
            return found
        _, chosen = jax.lax.top_k(block.maxima, width)
        chosen = jnp.sort(chosen, axis=1)  # [B, w]; by index again, so that ties stay in order
        scores = _take(block.scores, chosen[:, None], axis=2)  # [B, G, w]
        scores = _masked(scores.swapaxes(1, 2), block.usable[chosen])  # [B, w, G]
        places = chosen.astype(block.first_index.dtype) * BUNDLE_ROWS
        indices = block.first_index + places[..., None] + np.arange(BUNDLE_ROWS, dtype=places.dtype)
        flat = (len(scores), width * BUNDLE_ROWS)
        together = jnp.concatenate([found.scores, scores.reshape(flat)], axis=1)
        indices = jnp.concatenate([found.indices, indices.reshape(flat)], axis=1)
        best, at = jax.lax.top_k(together, found.scores.shape[1])
        indices = jnp.where(best > -jnp.inf, _take(indices, at, axis=1), PADDING_ID)
        return Found(best, indices)

    return merge


def _take(array: Array, places: Array, *, axis: int) -> Array:
    """Return the elements at places along an axis, all of which are in the array."""
    return jnp.take_along_axis(array, places, axis=axis, mode="promise_in_bounds")
