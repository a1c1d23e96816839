"""Logical tables and slots as NumPy arrays of the host.

Enters: a `TableState`. Leaves: arrays by name. Called by the stateful API's `retrieve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._types import Array
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import Layout, MeshAxes
from tpu_embed.core.state.checks import check_own
from tpu_embed.core.state.fields import Field, fields
from tpu_embed.core.state.table_state import TableState
from tpu_embed.kernels import storage


def host_arrays(
    state: TableState, layout: Layout
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return the logical tables by name, and slots by table name, then slot name, as NumPy arrays.

    They are put together on the host, shard by shard: no device holds more than it does already,
    and of many processes, which all call this, one shard more.
    """
    check_own(state, layout)
    found: tuple[dict, dict] = ({}, {})
    for f in fields(layout):
        array = _host_array(f.read(state), f, layout.axes)
        if f.slot is None:
            found[0][f.table.name], found[1][f.table.name] = array, {}
        else:
            found[1][f.table.name][f.slot] = array
    return found


def _host_array(stored: Array, f: Field, axes: MeshAxes) -> np.ndarray:
    """Return one logical table or slot as a NumPy array of its own memory."""
    dtype = jnp.dtype(f.shape.dtype)
    if not f.shape.per_row:
        return np.array(stored).view(dtype)
    table, shards = f.table, f.stack.num_shards
    logical = np.empty((table.vocabulary_size, *f.shape.shape), storage.stored_dtype(dtype))
    for shard, local in _all_shards(stored, f, axes):
        first = shard * table.rows_per_shard
        div = f.stack.placement == "div"
        mine = logical[first : first + table.rows_per_shard] if div else logical[shard::shards]
        rows = f.row_format.unpack(f.row_format.by_row(local))
        mine[...] = rows[table.offset : table.offset + len(mine)]
    return logical.view(dtype)


def _all_shards(stored: Array, f: Field, axes: MeshAxes) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the physical rows `[R, …]` of every shard, each once."""
    size = f.row_format.array(f.stack.num_rows).shape[0]
    pieces = {piece.index[0].start or 0: piece.data for piece in stored.addressable_shards}
    if sum(map(len, pieces.values())) < len(stored):
        for shard in range(f.stack.num_shards):
            number = np.int32(shard)
            yield shard, np.asarray(_on_all(stored, number, f.stack.shard_axes, axes))
        return
    if any(first % size or len(piece) % size for first, piece in pieces.items()):
        pieces = {0: stored}  # sharded anew by the user: no piece is a shard
    for first, piece in pieces.items():
        for shard, local in enumerate(np.split(np.asarray(piece), len(piece) // size)):
            yield first // size + shard, local


@partial(jax.jit, static_argnums=(2, 3))
def _on_all(stored: Array, number: Array, shard_axes: tuple[str, ...], axes: MeshAxes) -> Array:
    """Return a copy of one shard on every device, in its bits."""

    def send(local: Array, number: Array) -> Array:
        kind = f"uint{local.dtype.itemsize * 8}"
        cast = jax.lax.convert_element_type if local.dtype == bool else jax.lax.bitcast_convert_type
        mine = collectives.axis_index(shard_axes) == number
        bits = jnp.where(mine, cast(local, kind), jnp.zeros(local.shape, kind))
        return cast(collectives.psum(bits, shard_axes), local.dtype)

    specs = axes.spec(shard_axes), PartitionSpec()
    return jax.shard_map(
        send, mesh=axes.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )(stored, number)
