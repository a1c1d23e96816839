"""Copy logical tables and slots to NumPy arrays on the host.

The host takes one shard after the other from the devices and puts its rows in their logical places,
so no device ever needs memory for a whole table.

Input: a `TableState`. Output: NumPy arrays by name.
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
    """Return the logical tables by name, and the slots by table name, then slot name.

    They are assembled on the host, shard by shard. With one process, no device needs extra memory;
    with several, which must all call this, each device receives one shard at a time.
    """
    layout.refuse_on_host("retrieve")
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
    """Return one logical table or slot as a NumPy array that shares no memory with the state."""
    dtype = jnp.dtype(f.shape.dtype)
    # bfloat16 is stored as uint16; `view` only renames the dtype, the bits stay.
    if not f.shape.per_row:
        return np.array(stored).view(dtype)
    table = f.table
    logical = np.empty((table.vocabulary_size, *f.shape.shape), storage.stored_dtype(dtype))
    for shard, local in _all_shards(stored, f, axes):
        # The places of this shard's rows: a view of `logical`, without the padding past its end.
        mine = logical[f.stack.logical_slice(shard, table)]
        rows = f.row_format.unpack(f.row_format.by_row(local))
        mine[...] = rows[table.offset : table.offset + len(mine)]
    return logical.view(dtype)


def _all_shards(stored: Array, f: Field, axes: MeshAxes) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the physical rows `[R, …]` of every shard, each once."""
    size = f.row_format.array(f.stack.num_rows).shape[0]
    # By first row, so that of several devices with copies of one shard a single copy is read.
    pieces = {piece.index[0].start or 0: piece.data for piece in stored.addressable_shards}
    # Some shards are on devices of other processes: each shard is sent to all devices in turn.
    if sum(map(len, pieces.values())) < len(stored):
        for shard in range(f.stack.num_shards):
            number = np.int32(shard)
            yield shard, np.asarray(_on_all(stored, number, f.stack.shard_axes, axes))
        return
    # The user has sharded the array in another way, and its pieces are no whole shards.
    if any(first % size or len(piece) % size for first, piece in pieces.items()):
        pieces = {0: stored}
    for first, piece in pieces.items():
        for shard, local in enumerate(np.split(np.asarray(piece), len(piece) // size)):
            yield first // size + shard, local


@partial(jax.jit, static_argnums=(2, 3))
def _on_all(stored: Array, number: Array, shard_axes: tuple[str, ...], axes: MeshAxes) -> Array:
    """Return a copy of one shard on every device, bit for bit."""

    def send(local: Array, number: Array) -> Array:
        # A broadcast as a sum: all shards but one contribute zeros. It adds the bits as unsigned
        # integers, because a float sum would change NaN patterns and the sign of -0.0.
        kind = f"uint{local.dtype.itemsize * 8}"
        cast = jax.lax.convert_element_type if local.dtype == bool else jax.lax.bitcast_convert_type
        mine = collectives.axis_index(shard_axes) == number
        bits = jnp.where(mine, cast(local, kind), jnp.zeros(local.shape, kind))
        return cast(collectives.psum(bits, shard_axes), local.dtype)

    specs = axes.spec(shard_axes), PartitionSpec()
    return jax.shard_map(
        send, mesh=axes.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )(stored, number)
