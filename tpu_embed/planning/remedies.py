"""What would help if a plan does not fit: more devices, fewer bytes per row, or tables on the host.

Each is planned. The largest tables go to the host first, and no more of them than must. As many of
their rows stay on the devices as have room there; at least those of the batches whose rows stay
together, and of one more, which is placed ahead.

Input: a request for a plan. Output: the changes in words, with the bytes that each would need.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tpu_embed.core.layout import Stack
from tpu_embed.core.state import slot_shapes
from tpu_embed.initializers import wants_shard_info
from tpu_embed.optimizers import RowWiseAdagrad
from tpu_embed.planning.costs import readable
from tpu_embed.planning.host import row_bytes
from tpu_embed.planning.request import Request, distinct_rows
from tpu_embed.storage import HostStorage

Changes = dict[str, dict[str, Any]]
"""Table -> field of `TableConfig` -> new value."""

_STEPS = 2**14
"""In how many parts the share of rows that stay on the devices is found."""
_NAMED = 5
_MOST_ROWS = 3 * 2**28
"""As many as a map can have places for."""


def find_remedies(request: Request, batch: int) -> tuple[str, ...]:
    """Return changes that would make a plan fit, or come nearest, in words.

    Args:
      request: what does not fit.
      batch: what divides the batch sizes of all features.
    """
    changes = _changes_of_tables(request)
    on_host = _moved_to_host(request)
    changes |= {_words(on_host): on_host} if on_host else {}
    found = [_describe_change(what, request.changed(new))[0] for what, new in changes.items()]
    return tuple(text for text in (_more_devices(request, batch), *found) if text)


def _changes_of_tables(request: Request) -> dict[str, Changes]:
    """Return changes in words, and as they are."""
    tables = dict(zip(request.declared.table_names, request.declared.tables, strict=True))
    replicated = [name for name, table in tables.items() if table.placement == "replicated"]
    wider = [name for name, table in tables.items() if table.dtype != "bfloat16"]
    slotted = [t.name for g in request.layout.stacks if _has_wide_slots(g) for t in g.tables]
    changes: dict[str, Changes] = {
        'no replicated tables (placement="mod")': {n: {"placement": "mod"} for n in replicated},
        "bfloat16 tables": {name: {"dtype": "bfloat16"} for name in wider},
        "row-wise slots (RowWiseAdagrad)": {n: {"optimizer": RowWiseAdagrad()} for n in slotted},
    }
    changes = {what: new for what, new in changes.items() if new}
    if len(changes) > 1:
        everything: Changes = {name: {} for name in tables}
        for new in changes.values():
            for name, fields in new.items():
                everything[name] |= fields
        changes["all changes of tables"] = everything
    return changes


def _has_wide_slots(stack: Stack) -> bool:
    """Return whether the optimizer of a stack keeps more than one number per row."""
    return any(slot.per_row and slot.shape for slot in slot_shapes(stack).values())


def _more_devices(request: Request, batch: int) -> str:
    """Return the fewest devices of the same kind that would hold it, in words, or the most."""
    text, memory = "", request.target.memory  # what the user gave, if anything
    for target in request.target.larger(batch):
        devices = f"{target.axes.mesh.size} devices"
        name = f"{target.name} ({devices})" if target.topology else devices
        larger = dataclasses.replace(request, target=target._replace(memory=memory))
        text, fits = _describe_change(f"{name}, the same global batch", larger)
        if fits:
            break
    return text


def _describe_change(what: str, request: Request) -> tuple[str, bool]:
    """Return the bytes that a remedy needs, in words, and whether it fits; "" if impossible."""
    try:
        held = sum(request.held.values())
        if held > request.memory:  # planning the batch takes longer, and is not needed
            return f"{what}: {readable(held)} of tables and slots alone, still too much", False
        needed = held + sum(request.passing.values())
    except ValueError:  # for example more padded rows than int32 can number
        return "", False
    fits = needed <= request.memory
    return f"{what}: {readable(needed)}, {'would fit' if fits else 'still too much'}", fits


class _Candidate(NamedTuple):
    """A table that could be at home on the host; the rows are those that the devices hold."""

    name: str
    storage: HostStorage | None
    rows: int
    least: int
    row_bytes: int


def _moved_to_host(request: Request) -> Changes:
    """Return the tables that would have to be on the host; none if that would not help."""
    some = _candidates(request)
    if not some:
        return {}
    room = request.memory - sum(request.passing.values())

    def fit(changes: Changes) -> bool:
        return sum(request.changed(changes).held.values()) <= room

    # The fewest tables that fit with as few rows as may be, or all; then the most rows of these.
    enough = bisect_left(range(1, len(some)), True, key=lambda n: fit(_changes(some[:n], 0)))
    chosen = some[: enough + 1]
    parts = range(1, _STEPS)
    most = bisect_left(parts, True, key=lambda n: not fit(_changes(chosen, n / _STEPS)))
    return _changes(chosen, most / _STEPS)


def _candidates(request: Request) -> list[_Candidate]:
    """Return the tables that may have fewer rows on the devices, the largest first."""
    declared, _ = request.placed
    configs = dict(zip(declared.table_names, declared.tables, strict=True))
    pairs = [(s, t) for s in request.layout.stacks for t in s.tables]
    fit = [(s, t) for s, t in pairs if _may_be_on_host(s, configs[t.name])]
    # What a batch has is counted as if they were there with all of their rows.
    here = [t for _, t in fit if not t.is_on_host]
    counted = request.changed(
        {t.name: {"storage": _storage(None, min(t.vocabulary_size, _MOST_ROWS))} for t in here}
    )
    on_host = [table for _, table in counted.layout.on_host]
    batch_rows = distinct_rows(counted.placed[0], counted.layout, request.batch, on_host)
    found = []
    for stack, table in fit:
        rows = table.vocabulary_size
        least = min(rows, max(1, (request.lookahead + 2) * batch_rows[table.name]))
        found.append(_Candidate(table.name, table.storage, rows, least, row_bytes(stack)))
    fewer = (one for one in found if one.least < one.rows)
    return sorted(fewer, key=lambda one: -one.rows * one.row_bytes)


def _may_be_on_host(stack: Stack, config: Any) -> bool:
    """Return whether a table of a stack, with its config, is or could be at home on the host."""
    rule, initializer = stack.optimizer, config.initializer
    return (
        stack.placement != "replicated"
        and not (rule is not None and rule.updates_every_row)
        and not (initializer is not None and wants_shard_info(initializer))
    )


def _changes(some: Iterable[_Candidate], part: float) -> Changes:
    """Return the changes that leave a part of the rows of tables, but not too few."""
    changes = {}
    for one in some:
        rows = int(part * one.rows)
        unit = 10 ** max(0, len(str(rows)) - 2)  # 8_765_432 -> 8_700_000
        rows = min(_MOST_ROWS, max(one.least, rows // unit * unit))
        changes[one.name] = {"storage": _storage(one.storage, rows)}
    return changes


def _storage(storage: HostStorage | None, rows: int) -> HostStorage:
    if storage is None:
        return HostStorage(device_rows=rows)
    return dataclasses.replace(storage, device_rows=rows)


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
