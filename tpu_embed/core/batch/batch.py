"""A placed batch: one packed array of ids on the devices, and its static shape.

The ids of all features travel in a single array, because one large transfer is faster than many
small ones. The static shape (`BatchSpec`) says how to take the array apart again; it is part of
the pytree's structure, so a program that has seen it once is not compiled again.

Input: the packed array, sharded over the batch axes. Output: inside a compiled program, the ids of
every stack (`Batch.locate`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tpu_embed._checks import check_live, message
from tpu_embed._types import Array
from tpu_embed.core.batch.located import Located
from tpu_embed.core.batch.packing import parts, unpack
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.layout import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of ids on the devices: a pytree with one array and a static shape.

    Attributes:
      packed: int32 `[replicas, L]`, sharded over the batch axes.
      spec: the static shape; programs are compiled once per spec.
      row_numbers: the layout's checksum of what the row ids mean (`Layout.row_ids_checksum`).
    """

    packed: Array
    spec: BatchSpec = dataclasses.field(metadata={"static": True})
    row_numbers: int = dataclasses.field(metadata={"static": True})

    @property
    def checked(self) -> bool:
        """Whether the ids are known to fit the capacities; True, as the host has counted them."""
        return True

    def check(self, layout: Layout) -> None:
        """Check that the batch was made by an engine with this layout.

        Raises:
          ValueError: it was made by another engine, or its array was reshaped or donated.
        """
        # A spec may only be used with `parts` once its stacks are known to be those of the layout.
        owned = [layout.features_of(g) for g in range(len(layout.stacks))]
        same = [stack.features for stack in self.spec.stacks] == owned
        same = same and self.spec.replicas == layout.axes.replicas
        same = same and self.row_numbers == layout.row_ids_checksum
        expected = (self.spec.replicas, parts(self.spec, layout)[-1].end) if same else None
        if self.packed.shape != expected:
            raise ValueError(
                message(
                    "batch",
                    expected="a Batch of this engine's place, unchanged",
                    got=f"shape {self.packed.shape} of another engine, or changed since",
                    remedy="place it again; a scan takes Batches stacked along a new first axis",
                )
            )
        check_live("batch", [self.packed])

    def locate(self, layout: Layout) -> Located:
        """Return the ids of every stack, inside `shard_map`; the inverse of `pack`."""
        # Inside shard_map, `packed` is this device's line [1, L].
        none_bad = jnp.zeros(len(layout.features), jnp.int32)
        return Located(unpack(self.packed[0], self.spec, layout), none_bad)

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report nothing, because the host has validated the ids.

        A check that can never fail would only keep JAX from its fast path for calling programs.
        """
