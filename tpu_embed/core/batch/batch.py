"""A placed batch: one packed array of ids on the devices, and its static shape.

The ids of all features travel in a single array, because one large transfer is faster than many
small ones. The static shape (`BatchSpec`) says how to take the array apart again; it is part of
the pytree's structure, so a program that has seen it once is not compiled again.

The array is int32 `[devices, L]`. A line holds, for one stack after another, either the ids,

    row_ids         [N]      the physical rows of the device's ids, feature after feature
    bags            [N]      the bag of each id, unless all features have a width
    gains           [N]      the gain of each id, unless those of all features are 1
    blocks          [N]      the block of each id's example, where gradients are not summed

or, where the host has routed them, instead of the rows:

    index           [N]      where each id's row comes back: its place among the fetched rows
    asked           [S, C]   the local rows that the devices ask this owner for, by source
    bags            [N]      as above
    gains           [N]      as above
    sum_index       [N]      the bag of each id, sorted by the sum that its gradient is added to
    sum_segments    [N]      that sum
    sum_gains       [N]      its gain, unless all are 1
    merge_index     [P]      the partial sums that arrive, sorted by row
    merge_segments  [P]      the merged sum that each is added to
    merged          [U]      the local row of each merged sum

For every jagged feature, by its number, there is

    row_splits/f    [B/S + 1]  where each example's row begins among the feature's places

`asked` and the merge are the owner's only where the host knows the whole batch. With several
processes `asked` is what this device asks of each shard, and instead of the merge there is

    sent            [S, C']  the local row of each partial sum that this device sends

Numbers of 64 bits take two places.

Input: the packed array, one line per device. Output: inside a compiled program, the ids of every
stack or their routes (`Batch.locate`); on the host, views of the fields in a packed array.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_live, refuse
from tpu_embed._types import Array, Tracer
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.stack_view import LocalIds, StackView, view_stacks
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import Layout, PlacedFor, Visits
from tpu_embed.vocabulary import BatchKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of ids on the devices: a pytree with one array and a static shape.

    Attributes:
      packed: int32 `[devices, L]`, sharded over all axes of the mesh: a line per device.
      spec: the static shape; programs are compiled once per spec.
      placed_for: what its numbers depend on (`layout/layout.py`).
      valid_steps: for dynamic vocabularies, int32 `[3]`: the states that it may be looked up in
        (`ValidSteps`). None without them.
      keys: for dynamic vocabularies, what the host knows of the batch until it is admitted.
      visits: of tables on the host, the rows that a batch brings along that is only looked up: the
        number of the last replacement of rows at home (`Homes.replaced`), int32 `[]`, and the rows
        by stack. None if the devices hold all of its rows. A program needs no number.
      visit_rows: the size of its small tables (`Layout.visiting`); 0 without visits.
      admitted: whether lookups and updates may use it, which they check while they are traced.
        False of a training batch with keys until `admit` returns it.
      left_out: paths of the features that it does not have, because `place` was not given them.
    """

    packed: Array
    spec: BatchSpec = dataclasses.field(metadata={"static": True})
    placed_for: PlacedFor = dataclasses.field(metadata={"static": True})
    valid_steps: Array | np.ndarray | None = None
    keys: BatchKeys = dataclasses.field(default=BatchKeys(), metadata={"static": True})
    admitted: bool = dataclasses.field(default=True, metadata={"static": True})
    visits: tuple[Any, dict[str, Visits]] | None = None
    visit_rows: int = dataclasses.field(default=0, metadata={"static": True})
    left_out: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __post_init__(self) -> None:
        """Forget what only the host knows in a batch that is traced.

        The structure of a program's results is that of its first trace, so a batch that a jit
        returns would tell of the batch with which the jit was traced.
        """
        if isinstance(self.packed, Tracer) or isinstance(self.valid_steps, Tracer):
            object.__setattr__(self, "keys", BatchKeys())

    @classmethod
    def of(
        cls, packed: Any, spec: BatchSpec, layout: Layout, valid_steps: Any = None
    ) -> Batch:
        """Return a batch of an engine with this layout.

        Args:
          packed: its array, or the shape of one.
          spec: its static shape.
          layout: the engine's layout.
          valid_steps: see `valid_steps`.
        """
        placed_for = layout.placed_for(updates=spec.routed != "lookup")
        return cls(packed, spec, placed_for, valid_steps)

    def __repr__(self) -> str:
        """Show the size of the batch, and a line per stack of tables: what is looked up in it."""
        spec = self.spec
        low, high = min(spec.sizes, default=0), max(spec.sizes, default=0)
        size = f"{high}" if low == high else f"{low} to {high}"
        lines = [f"Batch of {size} examples for {spec.replicas} replicas"]
        lines += [f"stack {i}: {stack}" for i, stack in enumerate(spec.stacks)]
        return "\n  ".join(lines)

    def layout_in(self, layout: Layout) -> Layout:
        """Return the layout that it is looked up in: that of the engine, or that of its visits."""
        return layout.visiting(self.visit_rows) if self.visit_rows else layout

    def check(self, layout: Layout) -> None:
        """Check that the batch was made by an engine with this layout.

        Raises:
          ValueError: it was made by another engine, or its array was reshaped or donated.
        """
        layout = self.layout_in(layout)
        own = self.of(self.packed, self.spec, layout).placed_for
        if self.placed_for != own:
            refuse(
                "batch",
                expected="a Batch of this engine's place",
                got=own.difference(self.placed_for),
                remedy="place it with this engine, or declare both engines alike",
            )
        # `line_of` takes only a spec whose stacks are known to be those of the layout.
        expected, axes = None, layout.axes
        same = [
            stack.features for stack in self.spec.stacks
        ] == layout.features_by_stack
        if same and self.spec.replicas == axes.replicas:
            expected = axes.size(axes.names), line_length(line_of(self.spec, layout))
        if self.packed.shape != expected:
            refuse(
                "batch",
                expected="a Batch of this engine's place, unchanged",
                got=f"shape {self.packed.shape} of another engine, or changed since",
                remedy="place it again; a scan takes Batches stacked along a new first axis",
            )
        check_live("batch", [self.packed])

    def axes(self, layout: Layout) -> tuple[str, ...]:
        """The mesh axes that the first dimension of its array is split over."""
        return layout.axes.names

    def locate(self, layout: Layout) -> tuple[list[LocalIds], Array]:
        """Return the ids of every stack, inside `shard_map`, and the bad ids of each feature.

        Bad ids are counted on this device, int32 `[F]`, of features whose `on_bad_id` is "error".
        """
        # Inside shard_map, `packed` is this device's line [1, L].
        line = line_of(self.spec, layout)
        ids = [
            _located(read_line(self.packed[0], fields), view) for view, fields in line
        ]
        return ids, jnp.zeros(len(layout.features), jnp.int32)

    def row_splits(self, layout: Layout) -> dict[int, Array]:
        """Return the row splits `[devices, B/S + 1]` of every jagged feature.

        Inside `shard_map` they are those of this device, `[1, B/S + 1]`.
        """
        return {
            int(one.name.removeprefix(ROW_SPLITS)): self.packed[
                :, one.start : one.start + one.words
            ]
            for _, fields in line_of(self.spec, layout)
            for one in fields
            if one.name.startswith(ROW_SPLITS)
        }

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report nothing, because the host has validated the ids.

        A check that can never fail would only keep JAX from its fast path for calling programs.
        """


def _located(fields: dict[str, Array], view: StackView) -> LocalIds:
    """Return the ids of one stack from the fields of a line."""
    given = {name: x for name, x in fields.items() if not name.startswith(ROW_SPLITS)}
    if view.is_dense:
        given["bags"] = view.dense_bags()
    if not view.is_routed:
        given["index"] = given.pop("row_ids")
    # A host that does not know the other processes' ids tells what this device asks for.
    if "asked" in given and not view.layout.axes.one_process:
        given["asked"] = collectives.all_to_all(given["asked"], view.stack.shard_axes)
    return LocalIds(**{"gains": None, **given})


INT32 = np.dtype(np.int32)

ROW_SPLITS = "row_splits/"
"""What the names of fields begin with that end with the number of a jagged feature."""


class LineField(NamedTuple):
    """One array of one stack in a line.

    Attributes:
      name: its name, see above.
      shape: its shape on one device.
      dtype: its dtype.
      start: where it begins in the line, in int32 numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def words(self) -> int:
        """How many int32 numbers it takes."""
        return math.prod(self.shape) * (self.dtype.itemsize // 4)


Line = tuple[tuple[StackView, tuple[LineField, ...]], ...]
"""Every stack, and its fields in a line."""


@functools.lru_cache(256)  # every step asks several times, mostly for the same spec
def line_of(spec: BatchSpec, layout: Layout) -> Line:
    """Return every stack with its fields."""
    stacks, end = [], 0
    for view in view_stacks(spec, layout):
        fields = []
        for name, shape, dtype in _fields(view):
            fields.append(LineField(name, shape, dtype, end))
            end += fields[-1].words
        stacks.append((view, tuple(fields)))
    return tuple(stacks)


def line_length(line: Line) -> int:
    """Return L, the length of a line in int32 numbers."""
    return max(field.start + field.words for _, fields in line for field in fields)


def fields_of(
    packed: np.ndarray, fields: tuple[LineField, ...]
) -> dict[str, np.ndarray]:
    """Return the fields of one stack as views `[devices, …]` into a packed array."""
    return {
        field.name: packed[:, field.start : field.start + field.words]
        .view(field.dtype)
        .reshape(packed.shape[0], *field.shape)
        for field in fields
    }


def read_line(line: Array, fields: tuple[LineField, ...]) -> dict[str, Array]:
    """Return the fields of one stack from one device's line, inside a program."""
    found = {}
    for field in fields:
        piece, words = (
            line[field.start : field.start + field.words],
            field.dtype.itemsize // 4,
        )
        if words > 1:
            piece = piece.reshape(-1, words)
        if field.dtype != INT32:
            piece = jax.lax.bitcast_convert_type(piece, jnp.dtype(field.dtype))
        found[field.name] = piece.reshape(field.shape)
    return found


def _fields(view: StackView) -> list[Any]:
    """Return name, shape and dtype of the fields of a stack."""
    ids, stack, room = (view.num_ids,), view.stack, view.room
    shards, index, gains = stack.num_shards, stack.index_dtype, stack.compute_dtype
    routed, sums, merges = view.is_routed, view.routes_update, view.is_merged
    asks, parcels = routed and shards > 1, sums and not view.by_psum
    # Where the update is not routed, the devices sort the physical rows.
    sorts = asks and view.updates and not view.accumulates
    # Whether a stack has a field; its name, shape and dtype.
    found: list[tuple[bool, str, tuple[int, ...], Any]] = [
        (routed, "index", ids, INT32 if asks else index),
        (asks, "asked", (shards, max(1, room.row_capacity)), index),
        (sorts or not routed, "row_ids", ids, index),
        (not view.is_dense, "bags", ids, INT32),
        (view.has_gains, "gains", ids, gains),
        (view.needs_blocks and not sums, "blocks", ids, INT32),
        (sums, "sum_index", ids, INT32),
        (sums, "sum_segments", ids, INT32),
        (sums and view.has_gains, "sum_gains", ids, gains),
        (parcels and not merges, "sent", (shards, view.parcel_size), index),
        (
            parcels and merges and not view.is_local,
            "merge_index",
            (view.num_partials,),
            INT32,
        ),
        (parcels and merges, "merge_segments", (view.num_partials,), INT32),
        (merges, "merged", (view.num_merged,), index),
    ]
    each = zip(view.features, view.sizes, view.shapes, strict=True)
    found += [
        (own.has_places, f"{ROW_SPLITS}{f}", (n + 1,), INT32) for f, n, own in each
    ]
    return [field for there, *field in found if there]
