"""The arguments of `plan`, and the bytes that follow from them.

Input: features, an optimizer, a target and a batch. Output: layout, spec and bytes per device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tpu_embed._types import PyTree
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.layout import ExchangeDtype, Layout, MeshAxes, Stack, make_layout
from tpu_embed.core.state import check_rule, slot_shapes
from tpu_embed.kernels.formats import packing_of
from tpu_embed.planning import costs
from tpu_embed.planning.demand import distinct_rows, spec_of
from tpu_embed.planning.host import HitRate, HostPlan, host_plans, moving_bytes, read_use
from tpu_embed.planning.placement import placements, with_placements, with_tables
from tpu_embed.planning.sizes import Size, tiled_bytes, untiled_bytes
from tpu_embed.planning.target import Target

MISSES = "misses"
"""The name in `passing` of rows that come from home and go there."""

AHEAD = "ahead"
"""The name in `passing` of the batches that wait for their update while another is trained on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan`, and what is computed from them on demand.

    Each remedy is another request, so that its plan is computed in the same way.
    """

    target: Target
    declared: Structure
    optimizer: Any
    batch: PyTree
    hit_rates: HitRate | Mapping[str, HitRate] | None = None
    touched_rows: Mapping[str, int] | None = None
    exchange_dtype: ExchangeDtype | None = None
    lookahead: int = 0

    @property
    def axes(self) -> MeshAxes:
        """The mesh."""
        return self.target.axes

    @functools.cached_property
    def placed(self) -> tuple[Structure, dict[str, str]]:
        """The features without "auto", and table -> reason for each chosen placement."""
        chosen = placements(self.declared, self.optimizer, devices=self.axes.mesh.size)
        where = {table: placement for table, (placement, _) in chosen.items()}
        why = {table: reason for table, (_, reason) in chosen.items()}
        return structure.flatten(with_placements(self.declared, where)), why

    @functools.cached_property
    def layout(self) -> Layout:
        """Where each row lives."""
        declared, _ = self.placed
        layout = make_layout(
            declared,
            self.optimizer,
            self.axes,
            sum_blocks=8,
            stack_tables=True,
            exchange_dtype=self.exchange_dtype,
        )
        for pair in layout.on_host:
            check_rule(*pair)
        return layout

    @property
    def size(self) -> Size:
        """The function that returns the bytes of an array on such a device."""
        return untiled_bytes if packing_of(self.axes.device) == "none" else tiled_bytes

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """Bytes that a device always holds, independent of the batch."""
        stacks = self.layout.stacks
        return {
            "tables": sum(costs.array_bytes(g.row_format, g.num_rows, self.size) for g in stacks),
            "slots": sum(_slots(g, self.size) for g in stacks),
        }

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The shape of the batch, for which a step is compiled."""
        declared, _ = self.placed
        return spec_of(declared, self.layout, self.batch)

    @functools.cached_property
    def host(self) -> dict[str, HostPlan]:
        """What tables on the host have there, and what they move, by table."""
        declared, _ = self.placed
        use = read_use(self.layout, self.hit_rates, self.touched_rows)
        if not self.layout.on_host:
            return {}
        return host_plans(self.layout, distinct_rows(declared, self.layout, self.batch), use)

    @functools.cached_property
    def passing(self) -> dict[str, int]:
        """Bytes that a device needs during a step."""
        return self._passing(self.size)

    def _passing(self, size: Size) -> dict[str, int]:
        step = costs.passing(self.layout, self.spec, size)
        if self.lookahead:
            # They have been placed, and perhaps looked up; their gradients come later.
            step[AHEAD] = self.lookahead * (step["ids"] + step["activations"] // 2)
        if any(one.hit_rate is not None for one in self.host.values()):
            return step | {MISSES: moving_bytes(self.layout, self.host, size)}
        return step

    @property
    def wasted(self) -> dict[str, int]:
        """How many bytes of `held` and `passing` are padding of a TPU's tiles."""
        held = {"tables": 0, "slots": 0}
        for stack in self.layout.stacks:
            table, slots = costs.stack_bytes(stack, stack.num_rows, self.size)
            used_by_table, used_by_slots = costs.used_bytes(stack, stack.num_rows)
            held["tables"] += table - used_by_table
            held["slots"] += slots - used_by_slots
        used = self._passing(untiled_bytes)
        return held | {name: size - used[name] for name, size in self.passing.items()}

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Request:
        """Return the request with some fields of some tables changed."""
        feature_config = with_tables(self.declared, changes)
        return dataclasses.replace(self, declared=structure.flatten(feature_config))


def _slots(stack: Stack, size: Size) -> int:
    """Return the bytes of all slots of a stack, with and without rows."""
    whole = [slot for slot in slot_shapes(stack).values() if not slot.per_row]
    return costs.slot_bytes(stack, stack.num_rows, size) + sum(
        size(slot.shape, np.dtype(slot.dtype)) for slot in whole
    )
