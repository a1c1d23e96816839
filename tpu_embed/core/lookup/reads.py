"""Make an update wait for the lookups of the same state; otherwise XLA copies the table.

An update that writes into a table's own memory must come after every lookup of the old rows. XLA
derives that order from data dependencies alone. If the gradients do not depend on the activations
(the loss is linear in them, or a second lookup only feeds a metric), nothing tells XLA that the
lookup comes first, and it copies the whole table to be safe. So the update adds a zero to its row
ids that is computed from the activations (`kernels/waits.py`).

Input: the traced tables of a state, and the activations that lookups of them returned. Output: the
activations that an update must wait for.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from tpu_embed._types import Array, Tracer
from tpu_embed.core.layout import Layout

_READS: dict[int, tuple[weakref.ref, list[weakref.ref]]] = {}
"""`id` of a traced table -> the table, and the activations that were looked up in it.

Both are weak references, so a trace that has ended leaves nothing here. An activation that has been
garbage-collected is not used by the program, so the update need not wait for it."""


def record_lookup(
    tables: Mapping[str, Array], activations: Sequence[Array], layout: Layout
) -> None:
    """Remember what was looked up in traced tables; outside a trace there is nothing to order.

    Args:
      tables: `TableState.tables`.
      activations: what the lookup returned, one array per feature.
      layout: the engine's layout.
    """
    for feature, activation in zip(layout.features, activations, strict=True):
        record_read(tables[layout.stacks[feature.stack].name], activation)


def record_read(table: Array, result: Array) -> None:
    """Remember what was computed from a traced table; outside a trace there is nothing to order.

    Args:
      table: one of `TableState.tables`.
      result: numbers that were computed from it, at least one.
    """
    if not isinstance(table, Tracer):
        return
    number = id(table)
    # Python may give the `id` of a table that is gone to a new one, so its entry goes with it.
    if number not in _READS:
        forget = _READS.pop
        _READS[number] = weakref.ref(table, lambda _: forget(number)), []
    _READS[number][1].append(weakref.ref(result))


def activations_read(tables: Mapping[str, Array], replicas: int) -> dict[str, list[Array]]:
    """Return, by stack, what this trace has looked up in its table, or searched, so far.

    Args:
      tables: `TableState.tables`.
      replicas: how many parts the first axis of each of these arrays can be split into.
    """
    return {name: _alive(table, replicas) for name, table in tables.items()}


def _alive(table: Any, replicas: int) -> list[Array]:
    """Return the results of one table that still exist and belong to the table's trace."""
    _, found = _READS.get(id(table), (None, []))
    read = [one for reference in found if (one := reference()) is not None]
    of_trace = [one for one in read if isinstance(one, Tracer) and one._trace is table._trace]
    # Of a search for 3 queries on 2 replicas, one number is enough to wait for.
    return [
        one if one.shape[0] % replicas == 0 else jnp.full(replicas, one.reshape(-1)[0])
        for one in of_trace
    ]
