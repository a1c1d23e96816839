"""The bytes of a training step per device: of arrays, temporary memory, moved in memory, and sent.

All follow from the layout and the shape of a batch, before anything is compiled. A TPU stores
arrays in tiles, which adds padding.

Input: a layout and a `BatchSpec`. Output: bytes by purpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from tpu_embed.core.batch import BatchSpec, StackView, line_length, line_of, view_stacks
from tpu_embed.core.layout import Layout, Stack, round_up
from tpu_embed.core.state import row_formats
from tpu_embed.kernels.formats import LINE, PACKED_ROWS, RowFormat

Size = Callable[[tuple[int, ...], np.dtype], int]
"""A function of shape and dtype that returns the bytes of an array on a device."""

_SUBLANES = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def untiled_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array without padding, as on CPU and GPU.

    Args:
      shape: the shape of the array.
      dtype: the dtype of its elements.
    """
    return math.prod(shape) * np.dtype(dtype).itemsize


def tiled_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array on a TPU.

    The last two axes are padded to tiles of 8 × 128 elements, in the order of the two axes that
    needs less padding; a single axis is padded to a multiple of 1,024 elements.

    Args:
      shape: the shape of the array.
      dtype: the dtype of its elements.

    Example:
      >>> tiled_bytes((1000, 16), np.dtype(np.float32)) // 4, 1024 * 16
      (16384, 16384)
    """
    itemsize = np.dtype(dtype).itemsize
    if len(shape) < 2:
        return round_up(math.prod(shape), LINE * _SUBLANES) * itemsize
    *lead, rows, columns = shape
    # [1000, 16]: row-major [1000, 128] are 128,000 elements, column-major [16, 1024] are 16,384
    elements = min(
        round_up(rows, _SUBLANES) * round_up(columns, LINE),
        round_up(columns, _SUBLANES) * round_up(rows, LINE),
    )
    return math.prod(lead) * elements * itemsize


def readable(size: float) -> str:
    """Return a number of bytes with its unit.

    Example:
      >>> readable(1536), readable(95 * 2**30)
      ('1.5 KiB', '95.0 GiB')
    """
    unit = 0
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def array_bytes(row_format: RowFormat, rows: int, size: Size) -> int:
    """Return the bytes of an array of `rows` stored rows."""
    array = row_format.array(rows)
    return size(array.shape, array.dtype)


def stack_bytes(stack: Stack, rows: int, size: Size) -> tuple[int, int]:
    """Return the bytes of `rows` rows of a stack, and of their slots."""
    table, *slots = (
        array_bytes(one, rows, size) for one in row_formats(stack).values()
    )
    return table, sum(slots)


def wasted_bytes(stack: Stack, rows: int, size: Size) -> tuple[int, int]:
    """Return how many bytes of `rows` rows of a stack, and of their slots, are padding."""
    used = [
        rows * untiled_bytes(one.shape, one.dtype)
        for one in row_formats(stack).values()
    ]
    table, slots = stack_bytes(stack, rows, size)
    return table - used[0], slots - sum(used[1:])


def passing(layout: Layout, spec: BatchSpec, size: Size) -> dict[str, int]:
    """Estimate the temporary memory of a step: ids, activations with their gradients, and exchange.

    Stacks are processed one after the other, so the exchange counts only the largest stage of the
    largest stack.
    """
    views = view_stacks(spec, layout)
    activations = (
        _row_bytes(one.stack, bags, size) for one in views for bags in one.counts
    )
    return {
        "ids": size((line_length(line_of(spec, layout)),), np.dtype(np.int32)),
        "activations": 2 * sum(activations),
        "exchange": max((_fullest_stage(view, size) for view in views), default=0),
    }


def _row_bytes(stack: Stack, rows: int, size: Size) -> int:
    """Return the bytes of rows in the compute dtype; with tiles, each row takes whole lines."""
    line = LINE if size is tiled_bytes else 1
    return size((rows, round_up(stack.dim, line)), stack.compute_dtype)


def _fullest_stage(view: StackView, size: Size) -> int:
    """Return the bytes of the largest stage of one stack: fetching rows, sending, or applying sums.

    SparseCores fetch the rows to update as soon as their row ids are known, so these are held
    while sums are still being sent.
    """
    stack = view.stack
    asked, partials, received, touched = _moving_rows(view)
    # `held`: the rows to update and their full-width slots. `repacked`: on a TPU, rows that do not
    # fill whole lines are copied to packed ones. Sending needs partial sums and those received,
    # then those received and their merged sums.
    rows = functools.partial(_row_bytes, stack, size=size)
    held = sum(rows(touched) for one in row_formats(stack).values() if one.shape)
    repacked = (
        0
        if stack.row_format.words % LINE == 0
        else sum(stack_bytes(stack, touched, size))
    )
    fetching = 2 * array_bytes(stack.row_format, asked, size)
    sending = max(rows(partials) + rows(received), rows(received) + rows(touched))
    if stack.packing == "words":
        return max(fetching, held + repacked + sending, 2 * held + repacked)
    return max(fetching, sending, held + rows(touched))


def _moving_rows(view: StackView) -> tuple[int, int, int, int]:
    """Return how many rows of a stack a device asks for, sends sums of, receives, and updates."""
    stack, axes = view.stack, view.layout.axes
    asked = stack.num_shards * view.room.row_capacity if stack.num_shards > 1 else 0
    if _is_gathered(view):  # the gradients of the bags of all devices
        bags = axes.replicas * sum(view.counts)
        return asked, bags, bags, min(axes.replicas * view.num_ids, stack.num_rows)
    partials = stack.num_shards * view.room.partials
    # Every source sends up to `partials` sums; without an exchange one device sums its own ids.
    sources = axes.size(axes.other_batch_axes(stack.shard_axes))
    received = sources * partials if partials else view.num_ids
    return asked, partials, received, min(received, stack.num_rows)


def sent(layout: Layout, spec: BatchSpec) -> dict[str, int]:
    """Return the bytes that a device sends in a step.

    Of the S parts of an exchange, one stays on the device, so S - 1 are sent. Where a shard has
    copies (on batch axes that do not split the rows), sums are sent on to all copies.
    """
    total = {"ids": 0, "rows": 0, "gradients": 0}
    replicas = layout.axes.replicas
    for view in view_stacks(spec, layout):
        stack, capacity = view.stack, view.room
        others, index = stack.num_shards - 1, stack.index_dtype.itemsize
        width = stack.dim * stack.compute_dtype.itemsize
        # The exact bytes per row, also where several rows share a line: those of many, divided.
        row = (
            array_bytes(stack.sent_rows_format, PACKED_ROWS, untiled_bytes)
            // PACKED_ROWS
        )
        sums = array_bytes(stack.sent_sums_format, PACKED_ROWS, untiled_bytes)
        one_sum = sums // PACKED_ROWS + index
        copies = layout.axes.size(layout.axes.other_batch_axes(stack.shard_axes)) - 1
        total["ids"] += others * capacity.row_capacity * index
        total["rows"] += others * capacity.row_capacity * row
        if _is_gathered(view):
            total["ids"] += (replicas - 1) * view.num_ids * index
            total["gradients"] += (replicas - 1) * sum(view.counts) * width
            continue
        total["gradients"] += others * capacity.partials * one_sum
        if others:
            total["gradients"] += (
                copies * stack.num_shards * capacity.partials * one_sum
            )
        # A replicated table: a psum of the block sums of all rows, or partial sums sent to all
        # replicas, whichever is smaller. Rounded sums are always sent.
        if not others and replicas > 1:
            blocks = max(layout.sum_blocks, replicas)
            partials = replicas * capacity.partials
            whole = min(blocks * stack.num_rows, partials) * width
            total["gradients"] += (
                whole if stack.exchange_dtype is None else partials * one_sum
            )
    return total


def moved(layout: Layout, spec: BatchSpec) -> dict[str, int]:
    """Return the bytes that a step must read and write in a device's memory, at the least.

    Lookup: the owner of a row reads it and writes it to the exchange; the row is read for every id,
    and one activation is written per bag. Exchange: rows and partial sums are read and written.
    Update: a gradient is read for every id; partial sums are written and read; rows and slots of
    the touched rows are read and written.
    """
    total = {"lookup": 0, "update": 0, "exchange": 0}
    for view in view_stacks(spec, layout):
        stack, ids = view.stack, view.num_ids
        asked, partials, _, touched = _moving_rows(view)
        row = stack.dim * stack.compute_dtype.itemsize
        stored = stack.dim * stack.row_format.dtype.itemsize
        # What is read for an id, and sent: if the exchange rounds, it takes fewer bytes.
        sent_row = stack.dim * stack.sent_rows_format.dtype.itemsize
        sent_sum = stack.dim * stack.sent_sums_format.dtype.itemsize
        total["lookup"] += asked * (stored + sent_row) + ids * sent_row
        total["lookup"] += sum(view.counts) * row
        total["exchange"] += 2 * asked * sent_row + 2 * partials * sent_sum
        if stack.optimizer is not None:
            _, slots = stack_bytes(stack, touched, untiled_bytes)
            total["update"] += ids * row + 2 * partials * sent_sum
            total["update"] += 2 * (touched * stored + slots)
    return total


def _is_gathered(view: StackView) -> bool:
    """Whether the owners gather the ids of a stack for an update, which the host does not route."""
    return view.updates and not (view.routes_update or view.is_local or view.by_psum)
