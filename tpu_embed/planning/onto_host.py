"""Which tables would fit if they were at home on the host, and how many of their rows stay.

The largest tables go first, and no more of them than must. As many of their rows stay on the
devices as have room there; at least those of the batches whose rows stay together, and of one more,
which is placed ahead.

Input: a request for a plan that does not fit. Output: changes of tables, with their words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tpu_embed.core.layout import Stack
from tpu_embed.core.state import row_fields
from tpu_embed.initializers import wants_shard_info
from tpu_embed.planning.demand import distinct_rows
from tpu_embed.planning.request import Request
from tpu_embed.storage import HostStorage

Changes = dict[str, dict[str, Any]]
"""Table -> field of `TableConfig` -> new value."""

_STEPS = 14  # of a search for a factor, which is then right to a few of its thousandths
_NAMED = 5
_MOST_ROWS = 3 * 2**28  # as many as a map can have places for


class _Candidate(NamedTuple):
    """A table that could be at home on the host; the rows are those that the devices hold.

    Attributes:
      name: of the table.
      storage: that it has already, or None.
      rows: at present.
      least: the fewest that there must be.
      size: bytes of a row, times `rows`.
    """

    name: str
    storage: HostStorage | None
    rows: int
    least: int
    size: int


def move_to_host(request: Request) -> tuple[str, Changes] | None:
    """Return the tables that would have to be on the host, in words and as changes.

    Args:
      request: what does not fit.

    Returns:
      None if no table can be there with fewer rows than the devices hold now.
    """
    some = _candidates(request)
    if not some:
        return None
    room = _room(request)
    count = _first(len(some), lambda n: _held(request, _changes(some[:n], 0.0)) <= room)
    chosen, low, high = some[:count], 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = _held(request, _changes(chosen, middle)) <= room
        low, high = (middle, high) if fits else (low, middle)
    changes = _changes(chosen, low)
    return _words(changes), changes


def _candidates(request: Request) -> list[_Candidate]:
    """Return the tables that may have fewer rows on the devices, the largest first."""
    declared, _ = request.placed
    configs = dict(zip(declared.table_names, declared.tables, strict=True))
    pairs = [(s, t) for s in request.layout.stacks for t in s.tables]
    fit = [(s, t) for s, t in pairs if _may_be_on_host(s, configs[t.name])]
    # What a batch has is counted as if they were there with all of their rows.
    here = [(t.name, min(t.vocabulary_size, _MOST_ROWS)) for _, t in fit if not t.is_on_host]
    counted = request.changed({name: {"storage": _on_host(None, rows)} for name, rows in here})
    batch_rows = distinct_rows(counted.placed[0], counted.layout, request.batch)
    found = []
    for stack, table in fit:
        least = min(table.vocabulary_size, max(1, (request.lookahead + 2) * batch_rows[table.name]))
        width = sum(field.nbytes for field in row_fields(stack).values())
        rows = table.vocabulary_size
        found.append(_Candidate(table.name, table.storage, rows, least, rows * width))
    return sorted((one for one in found if one.least < one.rows), key=lambda one: -one.size)


def _may_be_on_host(stack: Stack, config: Any) -> bool:
    """Return whether a table of a stack, with its config, is or could be at home on the host."""
    rule, initializer = stack.optimizer, config.initializer
    return (
        stack.placement != "replicated"
        and not (rule is not None and rule.updates_every_row)
        and not (initializer is not None and wants_shard_info(initializer))
    )


def _room(request: Request) -> int:
    """Return the bytes of a device that are left for tables and slots."""
    memory = request.target.memory
    assert memory is not None, "without a memory everything fits"
    return memory - sum(request.passing.values())


def _held(request: Request, changes: Changes) -> int:
    """Return the bytes of tables and slots of a changed request."""
    return sum(request.changed(changes).held.values())


def _changes(some: Iterable[_Candidate], factor: float) -> Changes:
    """Return the changes that leave a share of the rows of tables, but not too few."""
    rows = {one: min(_MOST_ROWS, max(one.least, _round(factor * one.rows))) for one in some}
    return {one.name: {"storage": _on_host(one.storage, n)} for one, n in rows.items()}


def _on_host(storage: HostStorage | None, rows: int) -> HostStorage:
    if storage is None:
        return HostStorage(device_rows=rows)
    return dataclasses.replace(storage, device_rows=rows)


def _round(rows: float) -> int:
    """Return at most so many rows, in two digits."""
    # 8_765_432 -> 8_700_000
    unit = 10 ** max(0, len(str(int(rows))) - 2)
    return int(rows) // unit * unit


def _first(most: int, holds: Any) -> int:
    """Return the first number in [1, most] for which something holds, if it holds from there on."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _words(changes: Changes) -> str:
    """Return what to declare, such as `storage=HostStorage(device_rows=8_700_000) for a, b`."""
    by_rows: dict[int, list[str]] = {}
    for name, fields in changes.items():
        by_rows.setdefault(fields["storage"].device_rows, []).append(name)
    parts = [
        f"storage=HostStorage(device_rows={rows:_}) for {_listed(names)}"
        for rows, names in sorted(by_rows.items(), reverse=True)
    ]
    return _listed(parts)


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])
