"""Make the small tables of a batch that brings rows of tables on the host along.

Input: the tables of a state, and what the small ones are made of. Output: the tables that the batch
is looked up in; runs in a program.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import Layout, Stack, Visits, open_rows
from tpu_embed.core.state.new_rows import draw_rows, open_keyed, random_key
from tpu_embed.kernels import dispatch, storage


def visiting_tables(
    tables: Mapping[str, Array],
    vocabulary: Mapping[str, Array],
    visits: Mapping[str, Visits],
    layout: Layout,
    small: Layout,
) -> dict[str, Array]:
    """Return the tables of a state with those on the host replaced by small ones.

    Args:
      tables: `TableState.tables`.
      vocabulary: `TableState.vocabulary`, which holds the random key.
      visits: what the small ones are made of, by stack.
      layout: the engine's layout.
      small: that of the small tables.
    """
    axes, made = layout.axes, dict(tables)
    kind, data = random_key(vocabulary)
    for large, stack in zip(layout.stacks, small.stacks, strict=True):
        if stack.is_on_host:
            split = axes.spec(stack.shard_axes)
            shard = functools.partial(_small_table, large, stack, kind)
            made[stack.name] = jax.shard_map(
                shard,
                mesh=axes.mesh,
                in_specs=(split, PartitionSpec(), split),
                out_specs=split,
                check_vma=False,
            )(tables[stack.name], data, visits[stack.name])
    return made


def _small_table(
    large: Stack, small: Stack, kind: str, table: Array, data: Array, all_visits: Visits
) -> Array:
    """Return this device's shard of a small stack, from its line `[1, …]` of what it is made of."""
    visits: Visits = jax.tree.map(lambda line: line[0], all_visits)
    lies, whole = small.row_format, small.row_format.array(small.num_rows)
    array = jnp.zeros(whole.shape, whole.dtype)
    held = lies.unpack(dispatch.read_rows(table, visits.cached, large.row_format))
    rows = jnp.arange(small.num_rows, dtype=small.index_dtype)
    rows = jnp.where(visits.cached >= 0, rows, PADDING_ID)
    array = dispatch.write_ascending_rows(array, rows, held, lies)
    places = open_rows(visits.places, small)
    array = dispatch.write_ascending_rows(array, places, visits.stored, lies)
    new = open_keyed(visits.drawn, small)
    drawn, _ = draw_rows(jax.random.wrap_key_data(data, impl=kind), new, small)
    stored = storage.encode(drawn, small.dtype)
    return dispatch.write_ascending_rows(array, new.rows, stored, lies)
