"""HSTU attention over sequences that stand one after the other, without padding.

The events of all examples are cut into blocks of W. An event attends to events of its own example
alone, so a block of queries needs the blocks of keys from the one in which its first example begins
up to itself; all other pairs of blocks are skipped. A tile is one pair: scores `[heads, W, W]`.
Nothing of a tile is kept, and the backward pass computes its scores again. So time follows the
pairs, and memory is that of queries, keys, values and results.

Input: queries, keys and values per event, where each example ends, and two tables of biases.
Output: one vector per event.

Reference:
  Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
  Generative Recommendations", 2024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._checks import refuse
from tpu_embed._types import Array
from tpu_embed.core.engine import EmbeddingEngine


def time_bucket(elapsed: Array) -> Array:
    """Return ⌊log₂ elapsed⌋, int32, 0 for times of at most 1; times are integers.

    Example:
      >>> time_bucket(jnp.array([-3, 0, 1, 2, 3, 4, 1000])).tolist()
      [0, 0, 0, 1, 1, 2, 9]
    """
    return 31 - jax.lax.clz(jnp.maximum(elapsed, 1))


def jagged_attention(
    q: Array,
    k: Array,
    v: Array,
    splits: Array,
    *,
    longest: int,
    position_bias: Array | None = None,
    time_bias: Array | None = None,
    times: Array | None = None,
    query_times: Array | None = None,
    candidate: Array | None = None,
    time_bucket: Callable[[Array], Array] = time_bucket,
    block: int = 128,
) -> Array:
    """Return the sum of values, weighted by SiLU(q kᵀ + biases) / L, float `[N, heads, dv]`.

    An event attends to itself and to those before it in its example. Candidates of a request stand
    after its history. Each attends to the history and to itself, and nothing else attends to it;
    all have the position that follows the history. Events beyond the last split get zeros.

    The loops are as long as the events of one device want. With several devices, map the function
    with `jax.shard_map`, under which each runs its own; `jax.vmap` would make all wait for the
    longest.

    Args:
      q, k: float [N, heads, d].
      v: float [N, heads, dv].
      splits: integers [B + 1], where each example begins and the last one ends, from 0 to at most
        N; the row splits of a `Jagged`.
      longest: L, a constant of the model; an example may have more events.
      position_bias: float [heads, P]; pairs that are P or more positions apart take the last.
      time_bias: float [heads, T]; pairs whose bucket is T or more take the last.
      times: int32 [N], for `time_bias`.
      query_times: int32 [N], what takes the place of an event's own time where it is the query,
        such as the time of the event after it. None: `times`.
      candidate: bool [N], which events are candidates. None: none.
      time_bucket: the bucket, an integer of at least 0, of the time from a key to a query; the
        default is ⌊log₂⌋. It is called with int32 [W, W].
      block: W.

    Raises:
      ValueError: there is a `time_bias`, but no `times`.

    Example:
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 1, 4))  # 5 events, one head
      >>> out = jagged_attention(q, k, v, jnp.array([0, 2, 5]), longest=3)  # examples of 2 and 3
      >>> weight = jax.nn.silu(q[0, 0] @ k[0, 0]) / 3
      >>> out.shape, bool(jnp.allclose(out[0], weight * v[0], atol=1e-6))
      ((5, 1, 4), True)
    """
    if time_bias is not None and times is None:
        refuse(
            "jagged_attention: times",
            expected="int32 [N] with a time_bias",
            got="None",
            remedy="give both, or neither",
        )
    if not len(q):
        return v
    splits, zeros = jnp.asarray(splits, jnp.int32), jnp.zeros(len(q), jnp.int32)
    times = zeros if times is None else times
    asked = times if query_times is None else query_times
    flags = zeros if candidate is None else candidate.astype(jnp.int32)
    events = _events(splits, times, asked, flags)
    if (
        position_bias is not None
    ):  # a row of a tile is a piece of it, whatever its distances
        position_bias = jnp.pad(position_bias, ((0, 0), (block, block)), mode="edge")
    q, k, heads_of_v = (_in_blocks(x, block).swapaxes(1, 2) for x in (q, k, v))
    first = _first_blocks(splits, events.segment, block)
    blocks = Events(*(_in_blocks(x, block, fill=-1) for x in events))
    tables, form = Tables(position_bias, time_bias), Form(float(longest), time_bucket)
    out: Array = _attend(form, q, k, heads_of_v, tables, blocks, first)
    return out.swapaxes(1, 2).reshape(-1, *v.shape[1:])[: len(v)].astype(v.dtype)


def _events(splits, times, asked, flags) -> Events:
    """Return the events of the whole batch."""
    index = jnp.arange(len(flags), dtype=jnp.int32)
    # Example e begins at splits[e]: an event's example is how many of splits[1:] it has reached.
    begun = jnp.zeros(len(flags) + 1, jnp.int32).at[splits[1:]].add(1)
    segment = jnp.cumsum(begun)[:-1].astype(jnp.int32)
    segment = jnp.where(segment < len(splits) - 1, segment, -1)
    before = jnp.cumsum(flags) - flags  # candidates before each event, in the batch
    # In the example.
    among = before - before[jnp.minimum(splits[segment], len(flags) - 1)]
    position = index - among.astype(jnp.int32) * flags
    return Events(index, segment, position, flags, times, asked)


def _in_blocks(x: Array, block: int, fill: int = 0) -> Array:
    """Return `[n, W, …]` of `[N, …]`; the last block is filled up with `fill`."""
    padded = jnp.pad(
        x, [(0, -len(x) % block), *[(0, 0)] * (x.ndim - 1)], constant_values=fill
    )
    return padded.reshape(-1, block, *x.shape[1:])


def _first_blocks(splits: Array, segment: Array, block: int) -> Array:
    """Return the first block of keys that each block of queries needs, int32 `[n]`.

    That is where the example of its first event begins. A block without examples needs none.
    """
    own = segment[::block]  # [n], the example of the first event of each block
    none = jnp.arange(1, len(own) + 1)
    return jnp.where(own < 0, none, splits[own] // block).astype(jnp.int32)


def on_each_replica(
    engine: EmbeddingEngine, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of what all replicas share and of arrays `[S, …]`, for use in a jit.

    Args:
      engine: whose devices hold the replicas.
      function: of the shared tree, and of the part `[…]` of one replica of each other argument.

    Returns:
      a function of the same arguments with all parts, `[S, …]`, which returns results `[S, …]`.
    """
    axes = engine.layout.axes
    split = PartitionSpec(axes.batch_axes)

    def of_device(shared, parts):
        results = function(shared, *jax.tree.map(lambda x: x[0], parts))
        return jax.tree.map(lambda x: x[None], results)

    mapped = jax.shard_map(
        of_device,
        mesh=axes.mesh,
        in_specs=(PartitionSpec(), split),
        out_specs=split,
        check_vma=False,  # the gradient of what is shared is then the sum over the replicas
    )

    def of_all(shared, *parts):
        return mapped(axes.reshard(shared, ()), axes.reshard(parts, axes.batch_axes))

    return of_all


class Form(NamedTuple):
    """What a program is compiled for."""

    longest: float  # L
    time_bucket: Callable[[Array], Array]


class Tables(NamedTuple):
    """Learned biases; None stands for none."""

    # [heads, W + P + W], by distance; the first and last W are margins.
    position: Array | None
    time: Array | None  # [heads, T], by the bucket of the time between key and query


class Events(NamedTuple):
    """What is known about each event, int32 `[N]`, or `[n, W]` in blocks."""

    index: Array  # its place in the batch
    segment: Array  # its example; -1 where there is none
    position: Array  # its place, or for a candidate the one after its history
    candidate: Array  # 1 of a candidate, to which only it itself attends
    time: Array  # when it happened
    asked: Array  # the time at which it attends to others


def _position_scores(table: Array, queries: Events, keys: Events) -> Array:
    """Return the biases of a tile by position, `[heads, W, W]`; those of unseen pairs may be any.

    Keys stand side by side, so the distances of a query go down by one from key to key: its row is
    a piece of the reversed table. Pieces that would go beyond an end stop there, in the margin.
    """
    block = len(keys.index)
    backwards = table[:, ::-1]  # place x has the bias of distance P + W - 1 - x
    starts = table.shape[1] - block - 1 - (queries.position - keys.index[0])
    starts = jnp.maximum(starts, 0)  # JAX counts negative ones from the end
    return jax.vmap(
        lambda start: jax.lax.dynamic_slice_in_dim(backwards, start, block, axis=1),
        out_axes=1,
    )(starts)


def _time_scores(form: Form, table: Array, queries: Events, keys: Events) -> Array:
    """Return the biases of a tile by time, `[heads, W, W]`."""
    bucket = form.time_bucket(queries.asked[:, None] - keys.time)
    bucket = jnp.minimum(bucket, table.shape[1] - 1)

    def by_product(
        table,
    ):  # for TPUs, which multiply faster than they read number by number
        chosen = jax.nn.one_hot(bucket.reshape(-1), table.shape[1], dtype=table.dtype)
        return (table @ chosen.T).reshape(-1, *bucket.shape)

    return jax.lax.platform_dependent(
        table, tpu=by_product, default=lambda table: table[:, bucket]
    )


def tile(form: Form, q, k, v, tables: Tables, queries: Events, keys: Events) -> Array:
    """Return what a block of keys adds to the results of a block of queries, `[heads, W, dv]`.

    Args:
      form: L, and the buckets of times.
      q, k, v: float [heads, W, d], v [heads, W, dv].
      tables: the biases.
      queries, keys: the events of the blocks, int32 [W].
    """
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    if tables.position is not None:
        scores += _position_scores(tables.position, queries, keys)
    if tables.time is not None:
        scores += _time_scores(form, tables.time, queries, keys)
    query, key = queries.index[:, None], keys.index
    seen = (queries.segment[:, None] == keys.segment) & (query >= key)
    seen &= (queries.segment[:, None] >= 0) & ((keys.candidate == 0) | (query == key))
    weights = jnp.where(seen, jax.nn.silu(scores), 0) / form.longest
    return jnp.einsum("hqk,hkd->hqd", weights, v, preferred_element_type=jnp.float32)


def _at(tree, i):
    """Return block i of arrays `[n, …]`."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree
    )


def _add_at(x: Array, i, more: Array) -> Array:
    """Return `x` with `more` added to its block i."""
    return jax.lax.dynamic_update_index_in_dim(x, _at(x, i) + more, i, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, q, k, v, tables: Tables, events: Events, first) -> Array:
    """Return the attention of all blocks, float32 `[n, heads, W, dv]`.

    Args:
      form: L, and the buckets of times.
      q, k, v: float [n, heads, W, d], v [n, heads, W, dv].
      tables: the biases.
      events: int32 [n, W].
      first: int32 [n], the first block of keys that each block of queries needs; i + 1 for none.
    """

    def of_queries(i):
        own, queries = _at(q, i), _at(events, i)

        def add(j, out):
            return out + tile(
                form, own, _at(k, j), _at(v, j), tables, queries, _at(events, j)
            )

        return jax.lax.fori_loop(
            first[i], i + 1, add, jnp.zeros(v.shape[1:], jnp.float32)
        )

    return jax.lax.map(of_queries, jnp.arange(len(q), dtype=jnp.int32))


def _forward(form, *inputs):
    return _attend(form, *inputs), inputs


def _backward(form, inputs, given):
    q, k, v, tables, events, first = inputs

    def of_queries(carry, i):
        own, queries, out = _at(q, i), _at(events, i), _at(given, i)

        def add(j, carry):
            dq, dk, dv, dtables = carry
            rule = functools.partial(tile, form, queries=queries, keys=_at(events, j))
            more = jax.vjp(rule, own, _at(k, j), _at(v, j), tables)[1](out)
            dtables = jax.tree.map(jnp.add, dtables, more[3])
            return (
                dq + more[0],
                _add_at(dk, j, more[1]),
                _add_at(dv, j, more[2]),
                dtables,
            )

        dq, *carry = jax.lax.fori_loop(
            first[i], i + 1, add, (jnp.zeros_like(own), *carry)
        )
        return tuple(carry), dq

    zeros = jax.tree.map(jnp.zeros_like, (k, v, tables))
    (dk, dv, dtables), dq = jax.lax.scan(
        of_queries, zeros, jnp.arange(len(q), dtype=jnp.int32)
    )
    return dq, dk, dv, dtables, None, None


_attend.defvjp(_forward, _backward)
