"""The ids of all features packed into one array a batch, with NumPy on the host.

Enters: `HostIds` a feature, validated. Leaves: one int32 array `[replicas, L]`, which `place.py`
makes a `Batch`, sent in one transfer. Called by `place.py`; `Batch.locate` is the inverse, inside a
compiled program.

A device's line holds, stack after stack: the physical rows of its ids in batch order, then, where
the features are not all dense, the bag of each id, then, where any feature has weights, the
weights.
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
    """A batch of ids on the devices: a pytree of one array, with its static shape.

    Attributes:
      packed: int32 `[replicas, L]`, sharded over the batch axes.
      spec: the static shape; programs are compiled once a spec.
      row_numbers: the layout's checksum of what its rows mean.
    """

    packed: Array
    spec: BatchSpec = dataclasses.field(metadata={"static": True})
    row_numbers: int = dataclasses.field(metadata={"static": True})

    @property
    def checked(self) -> bool:
        """Whether the ids are known to fit the capacities: the host has counted them."""
        return True

    def check(self, layout: Layout) -> None:
        """Check that an engine of this layout made the batch.

        Raises:
          ValueError: another engine did, or the array was reshaped.
        """
        owned = [layout.features_of(g) for g in range(len(layout.stacks))]
        same = [stack.features for stack in self.spec.stacks] == owned
        same = same and self.spec.replicas == layout.axes.replicas
        same = same and self.row_numbers == layout.row_numbers
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
        none_bad = jnp.zeros(len(layout.features), jnp.int32)
        return Located(unpack(self.packed[0], self.spec, layout), none_bad)

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report nothing: the host has judged the ids.

        A check that can never fail would keep JAX from its fast way of calling the program.
        """
