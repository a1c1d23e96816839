"""Tiles of attention: one block of queries and one of keys at a time, forward and backward.

Block i of W queries needs the blocks of keys from `first[i]` to i. Nothing of a tile is kept: the
backward pass computes its scores again, so memory is that of queries, keys, values and results.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tables(NamedTuple):
    """Learned biases; None stands for none."""

    position: jax.Array | None  # [heads, W + P + W], by distance; the first and last W are margins
    time: jax.Array | None  # [heads, T], by `time_bucket` of the time between key and query


class Events(NamedTuple):
    """What is known about each event, int32 `[N]`, or `[n, W]` in blocks."""

    index: jax.Array  # its place in the batch
    segment: jax.Array  # its example; -1 where there is none
    position: jax.Array  # its place, or for a candidate the one after its history
    candidate: jax.Array  # 1 of a candidate, to which only it itself attends
    time: jax.Array  # when it happened
    asked: jax.Array  # the time at which it attends to others


def time_bucket(elapsed: jax.Array, buckets: int) -> jax.Array:
    """Return ⌊log₂ elapsed⌋, int32: 0 for times of at most 1, and `buckets` - 1 at the most.

    Example:
      >>> time_bucket(jnp.array([-3, 0, 1, 2, 3, 4, 1000]), 8).tolist()
      [0, 0, 0, 1, 1, 2, 7]
    """
    return jnp.minimum(31 - jax.lax.clz(jnp.maximum(elapsed, 1)), buckets - 1)


def position_scores(table: jax.Array, queries: Events, keys: Events) -> jax.Array:
    """Return the biases of a tile by position, `[heads, W, W]`; those of unseen pairs may be any.

    Keys stand side by side, so the distances of a query go down by one from key to key: its row is
    a piece of the reversed table. Pieces that would go beyond an end stop there, in the margin.
    """
    block = len(keys.index)
    backwards = table[:, ::-1]  # place x has the bias of distance P + W - 1 - x
    starts = table.shape[1] - block - 1 - (queries.position - keys.index[0])
    starts = jnp.maximum(starts, 0)  # JAX counts negative ones from the end
    return jax.vmap(
        lambda start: jax.lax.dynamic_slice_in_dim(backwards, start, block, axis=1), out_axes=1
    )(starts)


def time_scores(table: jax.Array, queries: Events, keys: Events) -> jax.Array:
    """Return the biases of a tile by time, `[heads, W, W]`.

    They are a product of matrices, because so is the sum of gradients into the table.
    """
    buckets = table.shape[1]
    bucket = time_bucket(queries.asked[:, None] - keys.time, buckets)
    chosen = jax.nn.one_hot(bucket.reshape(-1), buckets, dtype=table.dtype)
    return (table @ chosen.T).reshape(-1, *bucket.shape)


def tile(longest: float, q, k, v, tables: Tables, queries: Events, keys: Events) -> jax.Array:
    """Return what a block of keys adds to the results of a block of queries, `[heads, W, dv]`.

    Args:
      longest: L.
      q, k, v: float [heads, W, d], v [heads, W, dv].
      tables: the biases.
      queries, keys: the events of the blocks, int32 [W].
    """
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    if tables.position is not None:
        scores += position_scores(tables.position, queries, keys)
    if tables.time is not None:
        scores += time_scores(tables.time, queries, keys)
    query, key = queries.index[:, None], keys.index
    seen = (queries.segment[:, None] == keys.segment) & (query >= key)
    seen &= (queries.segment[:, None] >= 0) & ((keys.candidate == 0) | (query == key))
    weights = jnp.where(seen, jax.nn.silu(scores), 0) / longest
    return jnp.einsum("hqk,hkd->hqd", weights, v, preferred_element_type=jnp.float32)


def at(tree, i):
    """Return block i of arrays `[n, …]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def add_at(x: jax.Array, i, more: jax.Array) -> jax.Array:
    """Return `x` with `more` added to its block i."""
    return jax.lax.dynamic_update_index_in_dim(x, at(x, i) + more, i, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(longest: float, q, k, v, tables: Tables, events: Events, first) -> jax.Array:
    """Return the attention of all blocks, float32 `[n, heads, W, dv]`.

    Args:
      longest: L.
      q, k, v: float [n, heads, W, d], v [n, heads, W, dv].
      tables: the biases.
      events: int32 [n, W].
      first: int32 [n], the first block of keys that each block of queries needs; i + 1 for none.
    """

    def of_queries(i):
        own, queries = at(q, i), at(events, i)

        def add(j, out):
            return out + tile(longest, own, at(k, j), at(v, j), tables, queries, at(events, j))

        return jax.lax.fori_loop(first[i], i + 1, add, jnp.zeros(v.shape[1:], jnp.float32))

    return jax.lax.map(of_queries, jnp.arange(len(q), dtype=jnp.int32))


def _forward(longest, *inputs):
    return attend(longest, *inputs), inputs


def _backward(longest, inputs, given):
    q, k, v, tables, events, first = inputs

    def of_queries(carry, i):
        own, queries, out = at(q, i), at(events, i), at(given, i)

        def add(j, carry):
            dq, dk, dv, dtables = carry
            rule = functools.partial(tile, longest, queries=queries, keys=at(events, j))
            more = jax.vjp(rule, own, at(k, j), at(v, j), tables)[1](out)
            dtables = jax.tree.map(jnp.add, dtables, more[3])
            return dq + more[0], add_at(dk, j, more[1]), add_at(dv, j, more[2]), dtables

        dq, *carry = jax.lax.fori_loop(first[i], i + 1, add, (jnp.zeros_like(own), *carry))
        return tuple(carry), dq

    zeros = jax.tree.map(jnp.zeros_like, (k, v, tables))
    (dk, dv, dtables), dq = jax.lax.scan(of_queries, zeros, jnp.arange(len(q), dtype=jnp.int32))
    return dq, dk, dv, dtables, None, None


attend.defvjp(_forward, _backward)
