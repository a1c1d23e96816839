"""Exact top-k by inner product or cosine over a sharded table, where it lies.

Every shard finds the best of its own rows (`scan_shard`), and the candidates of all shards are
merged: S · k per query. No device ever holds the product of all queries and all rows, or rows of
others.

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

Of several processes, each has its own copy of what lies on the host. A search runs on the devices
of all of them, each of which would search with its own copy. So the copies are compared first.

Input: a state, queries. Output: scores and row ids; which rows have keys, and the keys of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._calls import call
from tpu_embed._checks import check_int, check_integers, refuse, refuse_derivatives
from tpu_embed._types import PADDING_ID, Array, ArrayLike, Tracer
from tpu_embed.core.engine import EmbeddingEngine, check_engine
from tpu_embed.core.exchange import axis_index, collectives
from tpu_embed.core.layout import Layout, MeshAxes, Stack, TableSlice, round_up
from tpu_embed.core.lookup import record_read
from tpu_embed.core.state import (
    TableState,
    check_arrays,
    check_not_donated,
    read_rows,
    row_unit,
)
from tpu_embed.processes import gather_from_all, raise_on_all
from tpu_embed.retrieval.scores import (
    Score,
    as_given,
    check_score,
    check_temperature,
    scored,
)

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
    if (
        exclude is not None
    ):  # by local row of the stack: those of other shards are outside of it
        exclude -= axis_index(stack.shard_axes).astype(dtype) * stack.num_rows
    if (
        allowed is not None
    ):  # by local row of the stack, with room for the last block's last bundle
        after = stack.num_rows - table.offset - table.rows_per_shard + BUNDLE_ROWS
        allowed = jnp.pad(allowed, (table.offset, after))

    def read_block(number, found):
        # The last block begins earlier, so that it fits: of 10 rows in blocks of 4 it has rows 6
        # to 9, of which 6 and 7 are masked, because the block before has them.
        first = begin + number * size
        start = jnp.minimum(first, stack.num_rows - size)
        rows = read_rows(physical, start, size, stack.row_format)
        local = start + jnp.arange(round_up(size, BUNDLE_ROWS), dtype=dtype)
        # A block that is no whole number of bundles ends with the stack, so this is False after it.
        usable = (local >= jnp.maximum(first, table.offset)) & (
            local < table.offset + here
        )
        if allowed is not None:
            usable &= jax.lax.dynamic_slice_in_dim(allowed, start, len(local))
        scores = _product(queries, scored(rows, score), len(usable) // BUNDLE_ROWS)
        if exclude is not None:
            scores = _hide(scores, exclude, start, count)
        return merge_block(found, scores, usable, start - table.offset)

    shape = len(queries), kept
    nothing = Found(
        jnp.full(shape, -jnp.inf, queries.dtype), jnp.full(shape, PADDING_ID, dtype)
    )
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

    def hide_some(flat_and_begin):
        flat, begin = flat_and_begin
        places = begin[:, None] + np.arange(most, dtype=begin.dtype)
        local = jnp.take_along_axis(rows, places, axis=1, mode="clip") - first
        # Of `[G, n]`, flat.
        within = local % BUNDLE_ROWS * bundles + local // BUNDLE_ROWS
        # Outside: nothing is written.
        within = jnp.where(places < end[:, None], within, size)
        hide = jax.vmap(lambda of_query, at: of_query.at[at].set(-jnp.inf, mode="drop"))
        return hide(flat, within), begin + most

    flat = scores.reshape(len(scores), size)  # [B, G, n] -> [B, G * n]
    flat, _ = jax.lax.while_loop(lambda x: (x[1] < end).any(), hide_some, (flat, begin))
    return flat.reshape(scores.shape)


def merge_block(
    found: Found, scores: Array, usable: Array, first_index: Array
) -> Found:
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
    widths = [width for width in FEW_BUNDLES if width < min(kept, bundles)] + [
        min(kept, bundles)
    ]
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
    by_place = (
        rows.reshape(bundles, BUNDLE_ROWS, -1).swapaxes(0, 1).reshape(len(rows), -1)
    )
    # HIGHEST: float32 products everywhere, so that integers are exact.
    scores = jnp.matmul(queries, by_place.T, precision=jax.lax.Precision.HIGHEST)
    return scores.reshape(len(queries), BUNDLE_ROWS, bundles)


def _masked(scores: Array, usable: Array) -> Array:
    """Return scores as they are compared: -inf for NaN and where not usable, and no -0.0."""
    # Else 0.0 is above -0.0.
    scores = jnp.where(scores == 0, jnp.zeros((), scores.dtype), scores)
    return jnp.where(usable & (scores > -jnp.inf), scores, -jnp.inf)


def _merge_bundles(width: int) -> Callable[[Found, _Block], Found]:
    """Return the function that merges the `width` bundles with the largest maxima."""

    def merge(found, block):
        if not width:
            return found
        _, chosen = jax.lax.top_k(block.maxima, width)
        # [B, w]; by index again, so that ties stay in order.
        chosen = jnp.sort(chosen, axis=1)
        scores = _take(block.scores, chosen[:, None], axis=2)  # [B, G, w]
        scores = _masked(scores.swapaxes(1, 2), block.usable[chosen])  # [B, w, G]
        places = chosen.astype(block.first_index.dtype) * BUNDLE_ROWS
        indices = (
            block.first_index
            + places[..., None]
            + np.arange(BUNDLE_ROWS, dtype=places.dtype)
        )
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


_not_differentiable = refuse_derivatives(
    "top_k",
    expected="a search that is not differentiated",
    got="a gradient through it",
    remedy="look the ids up, and differentiate the products with what the lookup returns",
)


@jax.custom_batching.custom_vmap
def _not_mapped(queries: Array) -> Array:
    """Return queries as they are; a `vmap` over them is refused."""
    return queries


@_not_mapped.def_vmap
def _refuse_map(size: int, mapped: list[bool], queries: Array) -> NoReturn:
    refuse(
        "top_k",
        expected="a call outside of jax.vmap",
        got=f"one that is mapped over {size} queries",
        remedy="give all of them at once: queries are a batch, [B, D]",
        error=TypeError,
    )


class TopK(NamedTuple):
    """The rows with the largest scores, the largest first; the lower id first if scores are equal.

    Attributes:
      scores: `[B, k]`, float32 (float64 of a float64 table); -inf where there are fewer rows.
      ids: int32 `[B, k]`, row ids (int64 of a table with more than 2³¹ rows); -1 where there are
        fewer rows.
    """

    scores: Array
    ids: Array


def top_k(
    engine: EmbeddingEngine,
    state: TableState,
    table: str,
    queries: ArrayLike,
    k: int,
    *,
    exclude: ArrayLike | None = None,
    allowed: ArrayLike | None = None,
    score: Score = "dot",
    temperature: float | ArrayLike = 1.0,
) -> TopK:
    """Return the k rows of a table with the largest scores for each query.

    scores[b, i] = score(queries[b], rows[ids[b, i]]) / temperature, in float32 for bfloat16 tables
    too. The result is exact: no row is left out. Call it inside a jit or outside; memory beyond the
    table is in proportion to B (k + E) and to one block of rows, not to V. Scores that are NaN or
    -inf do not count.

    With several processes all of them call this with the same arguments, and each gets the whole
    answer. Outside a jit, what lies on the host is compared first, so a call waits for the others.

    Args:
      engine: the engine.
      state: its state; outside a jit, with a dynamic vocabulary, the newest one.
      table: the table's name.
      queries: floats `[B, D]`.
      k: how many rows; where fewer can be had, the rest of the answer is -1 with score -inf.
      exclude: int `[B, E]`, ids that a query's answer must not have, such as those that a user has
        seen; -1 is padding, and ids outside the table are ignored.
      allowed: bool `[V]`, which rows may be found; None: all of them. Of a dynamic vocabulary only
        rows that have a key are found; inside a jit, that is for the caller to say: give what
        `keyed_rows` returned for this state.
      score: `"dot"`, the inner product; or `"cosine"`, that of vectors of length one, which is 0
        for a row of zeros.
      temperature: by what scores are divided, one number above 0; it changes no order.

    Returns:
      Scores and row ids, `[B, k]` each. Of a dynamic vocabulary, `keys_of` turns ids into keys.

    Raises:
      ValueError: an unknown table, or one at home on the host; queries, exclude or allowed of a
        wrong shape, or on other devices than the table; arguments that differ between processes;
        k < 1; another score; a temperature that is not above 0; the state of another engine; a
        dynamic vocabulary inside a jit without `allowed`.
      TypeError: no engine; queries that are not floats, ids that are not integers, `allowed` that
        is not bool; differentiation, or `jax.vmap` over queries.

    Example:
      >>> import jax, jax.numpy as jnp, tpu_embed
      >>> table = tpu_embed.TableConfig(8, 2, name="film")
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.load_arrays(state, {"film": [[i, i % 3] for i in range(8)]})
      >>> top_k(engine, state, "film", jnp.array([[1.0, 0.0], [0.0, 1.0]]), 3).ids.tolist()
      [[7, 6, 5], [2, 5, 1]]
      >>> top_k(engine, state, "film", jnp.array([[1.0, 0.0]]), 2, exclude=[[7, -1]]).ids.tolist()
      [[6, 5]]
    """
    check_engine("top_k: engine", engine)
    layout = engine.layout
    traced = _is_traced((state, queries, exclude, allowed, temperature))

    def checked():
        """Return the table as it lies, and what is searched for."""
        check_int("top_k: k", k, minimum=1)
        check_score("top_k", score)
        stack, part = layout.table(table)
        layout.check_on_devices("top_k", [table])
        check_not_donated(state, tables_alone=True)
        layout.axes.check_context()
        check_arrays(state, layout, slots=False)
        found = check_queries(queries, stack, table)
        given = {
            "queries": found,
            "exclude": None
            if exclude is None
            else check_exclude(exclude, len(found), stack, part),
            "allowed": None if allowed is None else check_allowed(allowed, part),
            "temperature": check_temperature("top_k", temperature, found.dtype),
        }
        if not traced:
            check_devices(layout.axes, given)
        elif part.vocabulary is not None and allowed is None:
            refuse(
                "top_k",
                expected=f"allowed= inside a jit, as the vocabulary of table {table!r} is dynamic",
                got="none",
                remedy="give the jit what retrieval.keyed_rows"
                f"(engine, state, {table!r}) returns outside",
            )
        return state.tables[stack.name], given

    if traced or layout.axes.one_process:
        stored, given = checked()
    else:
        stored, given = raise_on_all("top_k", Path("search"), checked)
    if not traced:
        check_same(f"{table} {k} {score}", layout.axes, given)
        if layout.table(table)[1].vocabulary is not None:
            keyed, besides = keyed_rows(engine, state, table), given["allowed"]
            given["allowed"] = keyed if besides is None else keyed & besides
    search = partial(_search, layout=layout, table=table, k=k, score=score)
    found = call(search, stored, *given.values())
    # An update later in the same trace must wait until the rows have been read.
    for result in found if found.ids.size else ():
        record_read(stored, result)
    return found


@partial(jax.jit, static_argnames=("layout", "table", "k", "score"))
def _search(
    stored: Array,
    queries: Array,
    exclude: Array | None,
    allowed: Array | None,
    temperature: Array,
    *,
    layout: Layout,
    table: str,
    k: int,
    score: Score,
) -> TopK:
    """Search the shards, and merge what they found; `allowed` is bool `[V]`."""
    stored, queries = _not_differentiable((stored, queries))
    queries = scored(_not_mapped(queries), score)
    (stack, part), axes, size = layout.table(table), layout.axes, len(queries)
    # Devices that hold the same rows divide the queries among them.
    query_axes = tuple(axis for axis in axes.names if axis not in stack.shard_axes)
    pad = round_up(size, axes.size(query_axes)) - size
    queries = axes.reshard(jnp.pad(queries, ((0, pad), (0, 0))), query_axes)
    operands = {"stored": stored, "queries": queries}
    specs = {"stored": axes.spec(stack.shard_axes), "queries": axes.spec(query_axes)}
    if exclude is not None:
        given = jnp.pad(exclude, ((0, pad), (0, 0)), constant_values=PADDING_ID)
        operands["exclude"] = axes.reshard(given, query_axes)
        specs["exclude"] = axes.spec(query_axes)
    if allowed is not None:
        operands["allowed"] = axes.reshard(
            _by_shard(allowed, stack, part), stack.shard_axes
        )
        specs["allowed"] = axes.spec(stack.shard_axes)

    def search_shard(operands):
        """Return the best k rows of all shards, `[B, k]` each."""
        found = scan_shard(
            operands["stored"],
            operands["queries"],
            operands.get("exclude"),
            operands.get("allowed"),
            stack=stack,
            table=part,
            kept=min(k, part.rows_per_shard),
            score=score,
        )
        shard = axis_index(stack.shard_axes).astype(found.indices.dtype)
        ids = stack.logical_in(shard, found.indices, part.rows_per_shard)
        found = Found(found.scores, jnp.where(found.indices < 0, PADDING_ID, ids))
        # [B, k] -> [S, B, k] -> [B, S * k]: the candidates of all shards, then the best k of them.
        scores, ids = (
            jnp.moveaxis(collectives.all_gather(x, stack.shard_axes), 0, 1).reshape(
                len(x), -1
            )
            for x in found
        )
        if stack.shard_axes:
            # Equal scores by id.
            falling, ids = jax.lax.sort((-scores, ids), num_keys=2)
            scores = -falling
        missing = ((0, 0), (0, max(0, k - scores.shape[1])))
        scores = jnp.pad(scores[:, :k], missing, constant_values=-jnp.inf)
        return scores, jnp.pad(ids[:, :k], missing, constant_values=PADDING_ID)

    with jax.named_scope(f"top_k {stack.label}"):
        scores, ids = jax.shard_map(
            search_shard,
            mesh=axes.mesh,
            in_specs=(specs,),
            out_specs=axes.spec(query_axes),
            check_vma=False,
        )(operands)
    # Every device gets all answers, so that each of several processes can read them.
    whole = axes.sharding(())
    answers = (axes.reshard(x, ())[:size] for x in (scores / temperature, ids))
    return TopK(*(jax.lax.with_sharding_constraint(x, whole) for x in answers))


def _by_shard(allowed: Array, stack: Stack, table: TableSlice) -> Array:
    """Return a flag per local row of a table, `[S * rows_per_shard]`, from one per row id `[V]`."""
    shards, rows = stack.num_shards, table.rows_per_shard
    padded = jnp.pad(allowed, (0, shards * rows - len(allowed)))
    # MOD: shard s has the rows s, s + S, s + 2 S, …, which is column s of [rows_per_shard, S].
    return (
        padded
        if stack.placement == "div"
        else padded.reshape(rows, shards).T.reshape(-1)
    )


def check_queries(queries: Any, stack: Stack, table: str) -> Array:
    """Return queries `[B, D]` in the stack's compute dtype."""
    array = as_given(queries)
    what = "top_k: queries"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        refuse(
            what,
            expected="floats",
            got=f"{array.dtype}",
            remedy="give them as float32",
            error=TypeError,
        )
    if array.ndim != 2 or array.shape[1] != stack.dim:
        refuse(
            what,
            expected=f"shape [B, {stack.dim}], as table {table!r} has rows of {stack.dim}",
            got=f"{list(array.shape)}",
        )
    return jnp.asarray(array, stack.compute_dtype)


def check_exclude(exclude: Any, queries: int, stack: Stack, table: TableSlice) -> Array:
    """Return the physical rows of ids to leave out, `[B, E]`, in each line ascending.

    Ids outside the table become -1, so these come first.
    """
    array = as_given(exclude)
    what = "top_k: exclude"
    if isinstance(array, np.ndarray) and not array.size:
        array = np.zeros(array.shape, np.int32)  # [[], []] would be floats
    check_integers(what, array.dtype)
    if array.ndim != 2 or len(array) != queries:
        refuse(
            what,
            expected=f"shape [{queries}, E], a line per query",
            got=f"{list(array.shape)}",
        )
    # NumPy sorts ten times as fast as XLA's CPU.
    on = jnp if isinstance(array, jax.Array) else np
    # Ids of 64 bits must not become others that are in the table when they are cut to 32. Beside
    # those of 8 bits, V = 300 would be 44.
    last = min(table.vocabulary_size - 1, np.iinfo(array.dtype).max)
    inside = (array >= 0) & (array <= last)
    rows = stack.physical(on.where(inside, array, 0).astype(stack.index_dtype), table)
    return jnp.asarray(on.sort(on.where(inside, rows, PADDING_ID), axis=1))


def check_allowed(allowed: Any, table: TableSlice) -> Array:
    """Return which rows may be found, bool `[V]`."""
    array = as_given(allowed)
    if array.dtype != bool:
        refuse("top_k: allowed", expected="bool", got=f"{array.dtype}", error=TypeError)
    if array.shape != (table.vocabulary_size,):
        refuse(
            "top_k: allowed",
            expected=f"shape [{table.vocabulary_size}], a flag per row",
            got=f"{list(array.shape)}",
        )
    return jnp.asarray(array)


def check_devices(axes: MeshAxes, arrays: dict[str, Array | None]) -> None:
    """Check that arrays lie on all devices of the mesh, or where JAX may move them from.

    JAX moves what was made without saying where, such as `jnp.zeros(3)`, and nothing else.

    Raises:
      ValueError: an array was put on other devices.
    """
    devices = axes.sharding(()).device_set
    for name, array in arrays.items():
        if array is None or not array.committed or array.sharding.device_set == devices:
            continue
        refuse(
            f"top_k: {name}",
            expected=f"an array on the host, or on all {len(devices)} devices of the engine's mesh",
            got=f"one on {sorted(map(str, array.sharding.device_set))}",
            remedy="np.asarray brings it to the host",
        )


def check_same(call: str, axes: MeshAxes, arrays: dict[str, Array | None]) -> None:
    """Check that all processes of a mesh search for the same; all must call this.

    Arrays on devices of several processes are the same to all of them, and nothing is read of them.

    Args:
      call: the other arguments, as text.
      axes: of the engine; the devices of one process need nobody to agree with.
      arrays: what a search is given.

    Raises:
      ValueError: another process gives others; raised by every process.
    """
    if axes.one_process:
        return
    digest = hashlib.sha256(call.encode())
    for array in arrays.values():
        digest.update(
            str(array if array is None else (array.shape, array.dtype)).encode()
        )
        if array is not None and array.is_fully_addressable:
            digest.update(np.asarray(array).tobytes())
    if len(set(gather_from_all("top_k", digest.hexdigest()))) > 1:
        refuse(
            "top_k",
            expected="the same arguments in every process",
            got="others in one of them",
            remedy="search for the queries of all processes in each, such as one global array",
        )


# -- tables with a dynamic vocabulary --------------------------------------------------------------

# Such a table has rows without a key: nobody has looked them up, and they are no answer. Which ones
# these are is known to the map on the host.


def keyed_rows(engine: EmbeddingEngine, state: TableState, table: str) -> Array:
    """Return which rows of a table with a dynamic vocabulary have a key, bool `[V]`.

    Give it to a jit as an operand, and there to `top_k` as `allowed`. It is that of one state: rows
    may get other keys with every batch that is admitted. With `unseen="shared"`, the shared row has
    no key.

    Args:
      engine: the engine.
      state: its newest state.
      table: the table's name.

    Raises:
      ValueError: the table has no dynamic vocabulary, or is at home on the host; the state is not
        the newest one; a call inside a jit.

    Example:
      >>> import tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(4, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=["red", "blue"], values=[[1, 2], [3, 4]])
      >>> keyed_rows(engine, state, "word").tolist()
      [True, True, False, False]
    """
    _, rows, capacity = _keys("keyed_rows", engine, state, table)
    found = np.zeros(capacity, bool)
    found[rows] = True
    return jax.device_put(found, engine.layout.axes.sharding(()))


def keys_of(
    engine: EmbeddingEngine, state: TableState, table: str, ids: ArrayLike
) -> np.ma.MaskedArray:
    """Return the keys of rows, uint64 in the shape of the ids.

    Keys that were strings are their hashes, as `hash_ids` returns them.

    Args:
      engine: the engine.
      state: its newest state, in which the rows were found.
      table: the table's name.
      ids: integers of any shape, such as `TopK.ids`.

    Returns:
      A NumPy masked array: an id that has no key, such as -1, is masked.

    Raises:
      ValueError: as for `keyed_rows`.
      TypeError: ids that are not integers.

    Example:
      >>> import tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(4, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=[700, 900], values=[[1, 2], [3, 4]])
      >>> keys_of(engine, state, "word", [[1, 0], [-1, 0]]).tolist()
      [[900, 700], [None, 700]]
    """
    keys, rows, capacity = _keys("keys_of", engine, state, table)
    _refuse_traced("keys_of", ids)
    numbers = np.asarray(ids)
    numbers = numbers if numbers.size else np.zeros(numbers.shape, int)  # such as []
    check_integers("keys_of: ids", numbers.dtype)
    by_row, has_key = np.zeros(capacity + 1, np.uint64), np.zeros(capacity + 1, bool)
    by_row[rows], has_key[rows] = keys, True
    inside = np.where((numbers >= 0) & (numbers < capacity), numbers, capacity)
    return np.ma.masked_array(by_row[inside], ~has_key[inside])


def _is_traced(given: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given))


def _refuse_traced(what: str, given: Any) -> None:
    """Raise `ValueError` inside a jit: the keys are on the host, which does not run then."""
    if _is_traced(given):
        refuse(
            what,
            expected="a call outside a jit",
            got="one inside",
            remedy="give the jit what keyed_rows returned, and keys_of what the jit returns",
        )


def _keys(
    what: str, engine: Any, state: TableState, table: str
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the keys of a table, their rows, and the number of its rows."""
    check_engine(f"{what}: engine", engine)
    _refuse_traced(what, state)
    _, part = engine.layout.table(table)
    engine.layout.check_on_devices(what, [table])
    if part.vocabulary is None:
        refuse(
            f"{what}: table",
            expected="a table with a dynamic vocabulary",
            got=f"{table!r}, whose ids are its rows",
        )
    with engine.vocabularies.lock:  # so that no batch is admitted in between
        engine.vocabularies.check_newest(state)
        return *engine.vocabularies.keys(table), part.vocabulary_size
