"""An update comes after every lookup of the same state, or XLA copies the table.

A program that writes rows in the memory of a table must have read what it needs of it first. XLA
knows that order only from data: where the gradients do not depend on the activations (a loss that
is linear in them, a second lookup for a metric), nothing says that the lookup comes first, and XLA
keeps a copy of the whole table to be safe. Barriers do not help: XLA:CPU drops them before it
decides about copies.

Input: the tables of a state while a program is traced, and what lookups of them returned. Output:
for an update, a zero that is known only when those lookups are done.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import Array, Tracer
from tpu_embed.core.layout import Layout

__all__ = ["activations_read", "record_lookup", "zero_after"]

_READS: dict[int, tuple[weakref.ref, list[weakref.ref]]] = {}
"""id of a traced table -> the table, and the activations that were looked up in it. Both are held
weakly: a trace that has ended leaves nothing here. An activation that nobody holds any more is not
part of the program either."""


def record_lookup(
    tables: Mapping[str, Array], activations: Sequence[Array], layout: Layout
) -> None:
    """Remember what was looked up in traced tables; outside of a trace there is nothing to order.

    Args:
      tables: `TableState.tables`.
      activations: what the lookup returned, by feature.
      layout: the engine's.
    """
    for feature, activation in zip(layout.features, activations, strict=True):
        table = tables[layout.stacks[feature.stack].name]
        if not isinstance(table, Tracer):
            return
        number = id(table)
        if number not in _READS:
            forget = functools.partial(_READS.pop, number)
            _READS[number] = weakref.ref(table, lambda _, forget=forget: forget(None)), []
        _READS[number][1].append(weakref.ref(activation))


def activations_read(tables: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return by stack the activations looked up in its table before, in this same trace.

    Args:
      tables: `TableState.tables`.
    """
    return {name: _alive(table) for name, table in tables.items()}


def _alive(table: Any) -> list[Array]:
    _, found = _READS.get(id(table), (None, []))
    read = [one for reference in found if (one := reference()) is not None]
    return [one for one in read if isinstance(one, Tracer) and one._trace is table._trace]


def zero_after(arrays: Sequence[Array]) -> Array:
    """Return int32 `[]` 0 that XLA can only know when all arrays are computed.

    The sign bit of a number's pattern is cleared, so that the least of it and 0 is 0, for NaN too.

    Args:
      arrays: floats of any shape, at least one number each.
    """
    zero = jnp.int32(0)
    for array in arrays:
        first = jax.lax.stop_gradient(array).reshape(-1)[0].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(first, jnp.int32)
        zero += jnp.minimum(bits & 0x7FFFFFFF, 0)
    return zero
