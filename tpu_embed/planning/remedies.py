"""What would help if a plan does not fit: more devices, fewer bytes per row, or tables on the host.

Each is planned. The largest tables go to the host first, and no more of them than must. As many of
their rows stay on the devices as have room there; at least those of the batches whose rows stay
together, and of one more, which is placed ahead.

Input: a request for a plan. Output: the changes in words, with the bytes that each would need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tpu_embed.core.layout import Stack
from tpu_embed.core.state import row_fields, slot_shapes
from tpu_embed.initializers import wants_shard_info
from tpu_embed.optimizers import RowWiseAdagrad
from tpu_embed.planning.costs import readable
from tpu_embed.planning.demand import distinct_rows
from tpu_embed.planning.plan import Request
from tpu_embed.storage import HostStorage

def find_remedies(request: Request, batch: int) -> tuple[str, ...]:
    """Return changes that would make a plan fit, or come nearest, in words.

    Args:
      request: what does not fit.
      batch: what divides the batch sizes of all features.
    """
    changes = _changes_of_tables(request)
    found = [_describe_change(what, request.changed(new))[0] for what, new in changes.items()]
    on_host = _on_host(request)
    return tuple(text for text in (_more_devices(request, batch), *found, on_host) if text)


def _changes_of_tables(request: Request) -> dict[str, dict[str, dict[str, Any]]]:
    """Return change in words -> table -> field of `TableConfig` -> new value."""
    tables = dict(zip(request.declared.table_names, request.declared.tables, strict=True))
    replicated = [name for name, table in tables.items() if table.placement == "replicated"]
    wider = [name for name, table in tables.items() if table.dtype != "bfloat16"]
    slotted = [t.name for g in request.layout.stacks if _has_wide_slots(g) for t in g.tables]
    changes: dict[str, dict[str, dict[str, Any]]] = {
        'no replicated tables (placement="mod")': {n: {"placement": "mod"} for n in replicated},
        "bfloat16 tables": {name: {"dtype": "bfloat16"} for name in wider},
        "row-wise slots (RowWiseAdagrad)": {n: {"optimizer": RowWiseAdagrad()} for n in slotted},
    }
    changes = {what: new for what, new in changes.items() if new}
    if len(changes) > 1:
        parts = list(changes.values())
        changes["all changes of tables"] = {
            name: {field: value for part in parts for field, value in part.get(name, {}).items()}
            for name in tables
        }
    return changes


def _has_wide_slots(stack: Stack) -> bool:
    """Return whether the optimizer of a stack keeps more than one number per row."""
    return any(slot.per_row and slot.shape for slot in slot_shapes(stack).values())


def _on_host(request: Request) -> str:
    """Return which tables would fit with their rows on the host, in words."""
    found = _moved_to_host(request)
    return "" if found is None else _describe_change(found[0], request.changed(found[1]))[0]


def _more_devices(request: Request, batch: int) -> str:
    """Return the fewest devices of the same kind that would hold it, in words, or the most."""
    text = ""
    for name, larger in _larger(request, batch):
        text, fits = _describe_change(f"{name}, the same global batch", larger)
        if fits:
            break
    return text


def _larger(request: Request, batch: int) -> Iterator[tuple[str, Request]]:
    """Yield requests for more devices, with their names."""
    for target in request.target.larger(batch):
        devices = f"{target.axes.mesh.size} devices"
        name = f"{target.name} ({devices})" if target.topology else devices
        memory = request.target.memory  # what the user gave, if anything
        yield name, dataclasses.replace(request, target=target._replace(memory=memory))


def _describe_change(what: str, request: Request) -> tuple[str, bool]:
    """Return the bytes that a remedy needs, in words, and whether it fits; "" if impossible."""
    memory = request.target.memory
    assert memory is not None, "without a memory everything fits"
    try:
        held = sum(request.held.values())
        if held > memory:  # planning the batch takes longer, and is not needed
            return f"{what}: {readable(held)} of tables and slots alone, still too much", False
        needed = held + sum(request.passing.values())
    except ValueError:  # for example more padded rows than int32 can number
        return "", False
    fits = needed <= memory
    return f"{what}: {readable(needed)}, {'would fit' if fits else 'still too much'}", fits


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


def _moved_to_host(request: Request) -> tuple[str, Changes] | None:
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
