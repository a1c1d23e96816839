"""The rows that a placed batch looks up, as its packed lines on the devices have them.

Input: a batch that `place` returned. Output: physical rows; the step of the maps that it is.
"""

from __future__ import annotations

import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Tracer
from tpu_embed.core.batch import Batch, StackView, fields_of, line_of, view_stacks
from tpu_embed.core.layout import Layout


def physical_rows(batch: Batch, layout: Layout) -> list[np.ndarray]:
    """Return the physical rows of this process's ids, one array per stack, with duplicates.

    Raises:
      ValueError: it is another engine's batch, or inside a jit.
    """
    batch.check(layout)
    lines, numbers = _lines(batch)
    views = zip(view_stacks(batch.spec, layout), line_of(batch.spec, layout), strict=True)
    every = [_rows_of(fields_of(lines, fields), view, numbers) for view, fields in views]
    return [rows[rows >= 0] for rows in every]


def step_of(batch: Batch) -> int:
    """Return the step of the maps that a batch is, or whose rows it has; 0 without maps."""
    if batch.keys.steps is not None:
        return batch.keys.steps.first
    return 0 if batch.valid_steps is None else int(np.asarray(batch.valid_steps)[0])


def _lines(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed lines on this process's devices, and the devices' numbers in the mesh."""
    if isinstance(batch.packed, Tracer):
        remedy = "record outside the jitted function"
        raise ValueError(message("batch", expected="a Batch", got="a tracer", remedy=remedy))
    # By first line; without a split of the lines all devices hold the same.
    pieces = {s.index[0].start or 0: s.data for s in batch.packed.addressable_shards}
    numbers = [first + np.arange(len(piece)) for first, piece in pieces.items()]
    return np.concatenate([np.asarray(p) for p in pieces.values()]), np.concatenate(numbers)


def _rows_of(fields: dict[str, np.ndarray], view: StackView, devices: np.ndarray) -> np.ndarray:
    """Return the physical rows of one stack in packed lines, with duplicates; absent ones are -1.

    Args:
      fields: the stack's fields, `[devices, …]`.
      view: the stack.
      devices: the number of each line's device in the mesh.
    """
    stack, axes = view.stack, view.layout.axes
    if "row_ids" in fields:
        return fields["row_ids"]
    if stack.num_shards == 1:
        return fields["index"]
    # Local rows that are asked for: of this owner, where one host knows all; else of each shard.
    asked = fields["asked"]
    owner = np.arange(stack.num_shards)[:, None]
    if axes.one_process:
        owner = axes.parts_of_devices(stack.shard_axes)[devices][:, None, None]
    return np.where(asked < 0, PADDING_ID, owner * stack.num_rows + asked)
