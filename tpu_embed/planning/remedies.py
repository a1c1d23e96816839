"""What would help if a plan does not fit: more devices, fewer bytes per row, or tables on the host.

Each is planned.

Input: a request for a plan. Output: the changes in words, with the bytes that each would need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tpu_embed.core.layout import Stack
from tpu_embed.core.state import slot_shapes
from tpu_embed.optimizers import RowWiseAdagrad
from tpu_embed.planning.onto_host import move_to_host
from tpu_embed.planning.request import Request
from tpu_embed.planning.sizes import readable


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
    found = move_to_host(request)
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
