"""What a step takes on one device: bytes that it needs for a while, moves, and sends.

Enters: a layout and the shape of a batch. Leaves: bytes by what they are. Called by `plan.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from tpu_embed.core.batch import parts
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.tables import slot_form, slot_shapes
from tpu_embed.kernels.forms import LINE, PACKED_ROWS, RowForm
from tpu_embed.planning.sizes import untiled_bytes

__all__ = ["Size", "array_bytes", "moved", "passing", "sent", "slot_bytes"]

Size = Callable[[tuple[int, ...], np.dtype], int]
"""Bytes of an array of a shape and a dtype on a device."""


def array_bytes(form: RowForm, rows: int, size: Size) -> int:
    """Return the bytes of the array of so many rows; bfloat16 has the tiles of uint16."""
    array = form.array(rows)
    return size(array.shape, np.dtype(array.dtype))


def slot_bytes(group: Group, rows: int, size: Size) -> int:
    """Return the bytes of the slots of so many rows."""
    slots = [slot for slot in slot_shapes(group).values() if slot.per_row]
    return sum(array_bytes(slot_form(group, slot), rows, size) for slot in slots)


def passing(layout: Layout, spec: BatchSpec, size: Size) -> dict[str, int]:
    """Estimate what a step needs beside the tables; the fullest stage of the fullest stack."""
    activations = 0
    for form, feature in zip(spec.forms, layout.features, strict=True):
        group = layout.groups[feature.group]
        activations += _row_bytes(group, spec.local_batch * form.bags, size)
    stacks = range(len(layout.groups))
    return {
        "ids": size((parts(spec, layout)[-1].end,), np.dtype(np.int32)),
        "activations": 2 * activations,
        "exchange": max([_fullest_stage(layout, spec, g, size) for g in stacks], default=0),
    }


def _row_bytes(group: Group, rows: int, size: Size) -> int:
    """Return the bytes of rows to calculate with; on a TPU each takes whole lines."""
    line = 1 if group.packing == "none" else LINE
    return size((rows, -(-group.dim // line) * line), group.compute_dtype)


def _fullest_stage(layout: Layout, spec: BatchSpec, g: int, size: Size) -> int:
    """Return the bytes of the fullest stage of one stack: fetching rows, sending, applying sums.

    SparseCores fetch the rows to update as soon as their numbers are known.
    """
    group = layout.groups[g]
    asked, partials, received, touched = _moving_rows(layout, spec, g)
    rows = functools.partial(_row_bytes, group, size=size)
    wide = [slot for slot in slot_shapes(group).values() if slot.per_row and slot.shape]
    held = (1 + len(wide)) * rows(touched)
    contiguous = array_bytes(group.form, touched, size) + slot_bytes(group, touched, size)
    repacked = 0 if group.form.words % LINE == 0 else contiguous
    fetching = 2 * array_bytes(group.form, asked, size)
    sending = max(rows(partials) + rows(received), rows(received) + rows(touched))
    if group.packing == "words":
        return max(fetching, held + repacked + sending, 2 * held + repacked)
    return max(fetching, sending, held + rows(touched))


def _moving_rows(layout: Layout, spec: BatchSpec, g: int) -> tuple[int, int, int, int]:
    """Return the rows of a stack that a device asks for, sends sums of, receives, and updates."""
    group, capacity = layout.groups[g], spec.groups[g]
    sources = layout.axes.size(layout.axes.other_batch_axes(group.shard_axes))
    asked = group.num_shards * capacity.rows if group.num_shards > 1 else 0
    partials = group.num_shards * capacity.partials
    received = sources * partials if partials else spec.ids(g)
    return asked, partials, received, min(received, group.rows)


def sent(layout: Layout, spec: BatchSpec) -> dict[str, int]:
    """Return the bytes that a device sends in a step: an exchange keeps one part in S at home.

    Sums that reach one shard's copies, on axes that do not split the rows, go on to all of them.
    """
    total = {"ids": 0, "rows": 0, "gradients": 0}
    for group, capacity in zip(layout.groups, spec.groups, strict=True):
        others, index = group.num_shards - 1, group.index_dtype.itemsize
        width = group.dim * group.compute_dtype.itemsize
        row = array_bytes(group.form, PACKED_ROWS, untiled_bytes) // PACKED_ROWS
        one_sum = array_bytes(group.sums_form, PACKED_ROWS, untiled_bytes) // PACKED_ROWS + index
        copies = layout.axes.size(layout.axes.other_batch_axes(group.shard_axes)) - 1
        total["ids"] += others * capacity.rows * index
        total["rows"] += others * capacity.rows * row
        total["gradients"] += others * capacity.partials * one_sum
        if others:
            total["gradients"] += copies * group.num_shards * capacity.partials * one_sum
        if not others and layout.axes.replicas > 1:
            blocks = max(layout.sum_blocks, layout.axes.replicas)
            total["gradients"] += (
                min(blocks * group.rows, layout.axes.replicas * capacity.partials) * width
            )
    return total


def moved(layout: Layout, spec: BatchSpec) -> dict[str, int]:
    """Return the bytes that a step must move in a device's memory, every row once a pass.

    A row that is looked up elsewhere is read and written there, exchanged (read and written), and
    read for the sum of its bag. A gradient is read for every id and written for every partial sum;
    sums are exchanged, read and written as whole ones; a row to update, and its slots, are read and
    written, and its sum read.
    """
    total = {"lookup": 0, "update": 0, "exchange": 0}
    for g, group in enumerate(layout.groups):
        asked, partials, _, touched = _moving_rows(layout, spec, g)
        row = group.dim * group.compute_dtype.itemsize
        stored = group.dim * _stored(group).itemsize
        bags = sum(spec.local_batch * spec.forms[f].bags for f in spec.groups[g].features)
        total["lookup"] += 2 * asked * stored + spec.ids(g) * stored + bags * row
        total["exchange"] += 2 * asked * stored + 2 * partials * row
        if group.optimizer is not None:
            slots = slot_bytes(group, touched, untiled_bytes)
            total["update"] += (spec.ids(g) + 2 * partials + 2 * touched) * row
            total["update"] += 2 * (touched * stored + slots)
    return total


def _stored(group: Group) -> np.dtype:
    return jnp.dtype(group.dtype)
