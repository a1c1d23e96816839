"""The routes of a placed batch, read from its lines as the devices read them."""

import dataclasses

import jax
import numpy as np

from tpu_embed._types import PADDING_ID


def way_of(view):
    """Return how the gradients of a stack come to the owners of its rows, in a word."""
    if view.by_psum:
        return "psum"
    return "local" if view.is_local else "exchange"


def located_by_device(engine, batch):
    """Return, by stack, what each device finds of it in its line, as NumPy arrays."""
    layout, packed = engine.layout, np.asarray(batch.packed)
    lines = [
        dataclasses.replace(batch, packed=packed[device : device + 1]).locate(layout)[0]
        for device in range(len(packed))
    ]
    return [jax.tree.map(np.asarray, list(found)) for found in zip(*lines, strict=True)]


def coordinates(axes):
    """Return where each device is in the mesh, by axis: `[devices]` each."""
    shape = [axes.mesh.shape[name] for name in axes.names]
    places = np.unravel_index(np.arange(np.prod(shape, dtype=int)), shape)
    return dict(zip(axes.names, places, strict=True))


def part_of(axes, names, device):
    """Return which part a device holds of what is split over the named axes."""
    part = 0
    for name in names:
        part = part * axes.mesh.shape[name] + int(coordinates(axes)[name][device])
    return part


def owner_of(axes, stack, device, shard):
    """Return the device that a device asks for the rows of a shard."""
    where = coordinates(axes)
    elsewhere = [name for name in axes.names if name not in stack.shard_axes]
    (owner,) = [
        other
        for other in range(axes.size(axes.names))
        if part_of(axes, stack.shard_axes, other) == shard
        and all(where[name][other] == where[name][device] for name in elsewhere)
    ]
    return owner


def physical_rows(axes, stack, found, device):
    """Return the physical row of every id of a device, `[N]`; `PADDING_ID` for an absent id.

    A routed id has a place among the rows that come back from all shards. What is there is what the
    shard's owner was asked for by this device.

    Args:
      axes: the mesh.
      stack: the stack.
      found: what every device found, the stack's part of `located_by_device`.
      device: the device.
    """
    ids = found[device]
    if ids.asked is None:
        return ids.index
    source = part_of(axes, stack.shard_axes, device)
    back = []
    for shard in range(stack.num_shards):
        asked = found[owner_of(axes, stack, device, shard)].asked[source]
        present = asked[asked >= 0]
        assert (asked[present.size :] == PADDING_ID).all()
        assert (np.diff(present) > 0).all()  # each row once
        back.append(np.where(asked < 0, PADDING_ID, asked + shard * stack.num_rows))
    # An absent id has the place after the last one.
    rows = np.append(np.concatenate(back), PADDING_ID)[ids.index]
    assert set(rows.tolist()) | {PADDING_ID} == {int(r) for b in back for r in b} | {PADDING_ID}
    return rows
