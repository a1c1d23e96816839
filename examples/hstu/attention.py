"""HSTU attention over sequences that stand one after the other, without padding.

The events of all examples are cut into blocks of W. An event attends to events of its own example
alone, so a block of queries needs the blocks of keys from the one in which its first example begins
up to itself; all other pairs of blocks are skipped. A tile is one pair: scores `[heads, W, W]`,
which are computed again in the backward pass. Time follows the pairs, and memory the events.

Input: queries, keys and values per event, where each example ends, and two tables of biases.
Output: one vector per event. The loops are as long as the data wants, so with several devices each
must run its own: map the function with `jax.shard_map`, as `places.py` does, not with `jax.vmap`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import tiles
from tiles import Events, Tables


def jagged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    splits: jax.Array,
    *,
    longest: int,
    position_bias: jax.Array | None = None,
    time_bias: jax.Array | None = None,
    times: jax.Array | None = None,
    query_times: jax.Array | None = None,
    candidate: jax.Array | None = None,
    block: int = 128,
) -> jax.Array:
    """Return the sum of values, weighted by SiLU(q kᵀ + biases) / L, float `[N, heads, dv]`.

    An event attends to itself and to those before it in its example. Candidates of a request stand
    after its history. Each attends to the history and to itself, and nothing else attends to it;
    all have the position that follows the history. Events beyond the last split get zeros.

    Args:
      q, k: float [N, heads, d].
      v: float [N, heads, dv].
      splits: integers [B + 1], where each example begins and the last one ends, from 0 to at most
        N; the row splits of a `Jagged`.
      longest: L, a constant of the model; an example may have more events.
      position_bias: float [heads, P]; pairs that are P or more positions apart take the last.
      time_bias: float [heads, T]; `time_bucket` says which bucket is whose.
      times: int32 [N], for `time_bias`.
      query_times: int32 [N], what takes the place of an event's own time where it is the query,
        such as the time of the event after it. None: `times`.
      candidate: bool [N], which events are candidates. None: none.
      block: W.

    Raises:
      ValueError: there is a `time_bias`, but no `times`.
    """
    if time_bias is not None and times is None:
        raise ValueError("times: expected int32 [N] with a time_bias, got None; give them both")
    if not len(q):
        return v
    splits, zeros = jnp.asarray(splits, jnp.int32), jnp.zeros(len(q), jnp.int32)
    times = zeros if times is None else times
    asked = times if query_times is None else query_times
    flags = zeros if candidate is None else candidate.astype(jnp.int32)
    events = _events(splits, times, asked, flags)
    if position_bias is not None:  # a row of a tile is a piece of it, whatever its distances
        position_bias = jnp.pad(position_bias, ((0, 0), (block, block)), mode="edge")
    q, k, heads_of_v = (_in_blocks(x, block).swapaxes(1, 2) for x in (q, k, v))
    first = _first_blocks(splits, events.segment, block)
    blocks = Events(*(_in_blocks(x, block, fill=-1) for x in events))
    tables = Tables(position_bias, time_bias)
    out: jax.Array = tiles.attend(float(longest), q, k, heads_of_v, tables, blocks, first)
    return out.swapaxes(1, 2).reshape(-1, *v.shape[1:])[: len(v)].astype(v.dtype)


def _events(splits, times, asked, flags) -> Events:
    """Return the events of the whole batch."""
    index = jnp.arange(len(flags), dtype=jnp.int32)
    # Example e begins at splits[e]: an event's example is how many of splits[1:] it has reached.
    begun = jnp.zeros(len(flags) + 1, jnp.int32).at[splits[1:]].add(1)
    segment = jnp.cumsum(begun)[:-1].astype(jnp.int32)
    segment = jnp.where(segment < len(splits) - 1, segment, -1)
    before = jnp.cumsum(flags) - flags  # candidates before each event, in the batch
    among = before - before[jnp.minimum(splits[segment], len(flags) - 1)]  # in the example
    position = index - among.astype(jnp.int32) * flags
    return Events(index, segment, position, flags, times, asked)


def _in_blocks(x: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """Return `[n, W, …]` of `[N, …]`; the last block is filled up with `fill`."""
    padded = jnp.pad(x, [(0, -len(x) % block), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
    return padded.reshape(-1, block, *x.shape[1:])


def _first_blocks(splits: jax.Array, segment: jax.Array, block: int) -> jax.Array:
    """Return the first block of keys that each block of queries needs, int32 `[n]`.

    That is where the example of its first event begins. A block without examples needs none.
    """
    own = segment[::block]  # [n], the example of the first event of each block
    none = jnp.arange(1, len(own) + 1)
    return jnp.where(own < 0, none, splits[own] // block).astype(jnp.int32)
