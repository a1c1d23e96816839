"""What a search is given, checked: queries, ids to leave out, rows that may be found.

Of several processes, each has its own copy of what lies on the host. A search runs on the devices
of all of them, each of which would search with its own copy. So the copies are compared first.

Input: what the user gave. Output: JAX arrays of the right shapes and dtypes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import MeshAxes, Stack, TableSlice
from tpu_embed.processes import gather_from_all


def check_queries(queries: Any, stack: Stack, table: str) -> Array:
    """Return queries `[B, D]` in the stack's compute dtype."""
    array = queries if isinstance(queries, jax.Array) else np.asarray(queries)
    what = "top_k: queries"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        remedy = "give them as float32"
        raise TypeError(message(what, expected="floats", got=f"{array.dtype}", remedy=remedy))
    if array.ndim != 2 or array.shape[1] != stack.dim:
        expected = f"shape [B, {stack.dim}], as table {table!r} has rows of {stack.dim}"
        raise ValueError(message(what, expected=expected, got=f"{list(array.shape)}"))
    return jnp.asarray(array, stack.compute_dtype)


def check_exclude(exclude: Any, queries: int, stack: Stack, table: TableSlice) -> Array:
    """Return the physical rows of ids to leave out, `[B, E]`, in each line ascending.

    Ids outside the table become -1, so these come first.
    """
    array = exclude if isinstance(exclude, jax.Array) else np.asarray(exclude)
    what = "top_k: exclude"
    if isinstance(array, np.ndarray) and not array.size:
        array = np.zeros(array.shape, np.int32)  # [[], []] would be floats
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(message(what, expected="integers", got=f"{array.dtype}"))
    if array.ndim != 2 or len(array) != queries:
        expected = f"shape [{queries}, E], a line per query"
        raise ValueError(message(what, expected=expected, got=f"{list(array.shape)}"))
    on = jnp if isinstance(array, jax.Array) else np  # NumPy sorts ten times as fast as XLA's CPU
    # Ids of 64 bits must not become others that are in the table when they are cut to 32. Beside
    # those of 8 bits, V = 300 would be 44.
    last = min(table.vocabulary_size - 1, np.iinfo(array.dtype).max)
    inside = (array >= 0) & (array <= last)
    rows = stack.physical(on.where(inside, array, 0).astype(stack.index_dtype), table)
    return jnp.asarray(on.sort(on.where(inside, rows, PADDING_ID), axis=1))


def check_allowed(allowed: Any, table: TableSlice) -> Array:
    """Return which rows may be found, bool `[V]`."""
    array = allowed if isinstance(allowed, jax.Array) else np.asarray(allowed)
    if array.dtype != bool:
        raise TypeError(message("top_k: allowed", expected="bool", got=f"{array.dtype}"))
    if array.shape != (table.vocabulary_size,):
        expected, got = f"shape [{table.vocabulary_size}], a flag per row", f"{list(array.shape)}"
        raise ValueError(message("top_k: allowed", expected=expected, got=got))
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
        expected = f"an array on the host, or on all {len(devices)} devices of the engine's mesh"
        got = f"one on {sorted(map(str, array.sharding.device_set))}"
        remedy = "np.asarray brings it to the host"
        raise ValueError(message(f"top_k: {name}", expected=expected, got=got, remedy=remedy))


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
        digest.update(str(array if array is None else (array.shape, array.dtype)).encode())
        if array is not None and array.is_fully_addressable:
            digest.update(np.asarray(array).tobytes())
    if len(set(gather_from_all("top_k", digest.hexdigest()))) > 1:
        expected, got = "the same arguments in every process", "others in one of them"
        remedy = "search for the queries of all processes in each, such as one global array"
        raise ValueError(message("top_k", expected=expected, got=got, remedy=remedy))
