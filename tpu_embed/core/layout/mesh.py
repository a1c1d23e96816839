"""The mesh, what its axes do (split the batch, split a table's rows), and the collectives.

Enters: a mesh and names of axes; inside `shard_map`, arrays local to one device. Leaves: the axes'
roles; the arrays, exchanged. Called by all that knows of several devices, `route.py` above all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh, and the axes that split the batch.

    Attributes:
      mesh: the devices.
      batch_axes: axes that split the batch dimension, in mesh order.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]

    def size(self, names: Sequence[str]) -> int:
        """Return the product of the sizes of the named axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def device(self) -> Any:
        """What the devices are, with a `device_kind`; None where nobody knows."""
        return self.mesh.abstract_mesh.abstract_device

    @property
    def replicas(self) -> int:
        """The number of parts the batch is split into."""
        return self.size(self.batch_axes)

    def local_parts(self, names: Sequence[str]) -> np.ndarray:
        """Return the numbers of the parts that devices of this process hold, int64 ascending.

        Args:
          names: the axes that split something into these parts.
        """
        parts = self.sharding(names).addressable_devices_indices_map((self.size(names),))
        return np.unique(np.asarray([i[0].start or 0 for i in parts.values() if i], np.int64))

    def sharding(self, names: Sequence[str]) -> NamedSharding:
        """Return the sharding that splits the first dimension over the named axes."""
        return NamedSharding(self.mesh, self.spec(names))

    def spec(self, names: Sequence[str]) -> PartitionSpec:
        """Return the partition of a first dimension over the named axes."""
        return PartitionSpec(tuple(names)) if names else PartitionSpec()

    def reshard(self, tree: PyTree, names: Sequence[str]) -> PyTree:
        """Split the first dimension of every leaf over the named axes.

        Only a mesh of explicit axes asks for it; on automatic axes the compiler does so itself.
        """
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if all(kind == AxisType.Auto for kind in kinds.values()):
            return tree
        sharding = self.sharding([name for name in names if kinds[name] == AxisType.Explicit])
        return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

    def shard_axes_of(self, name: str, config: TableConfig) -> tuple[str, ...]:
        """Return the axes that split the rows of a table, in mesh order.

        Raises:
          ValueError: the table names an axis the mesh lacks.
        """
        if config.placement == "replicated":
            return ()
        wanted = self.mesh.axis_names if config.shard_axes is None else config.shard_axes
        return _in_mesh_order(f"table {name!r}: shard_axes", wanted, self.mesh)

    def batch_order(self, shard_axes: Sequence[str]) -> np.ndarray:
        """Return the order in which gathered contributions must be read to be in batch order.

        The contributions to a shard arrive as `[rest, S]`: S sources along `shard_axes` (the
        all-to-all), gathered over the other batch axes (the all-gather). The batch is split over
        `batch_axes`, in mesh order.

        Returns:
          int `[rest * S]`, a permutation of the sources.
        """
        rest = self.other_batch_axes(shard_axes)
        arrival = (*rest, *shard_axes)
        sources = np.arange(self.size(arrival)).reshape([self.mesh.shape[a] for a in arrival])
        by_mesh = sorted(range(len(arrival)), key=lambda i: self.mesh.axis_names.index(arrival[i]))
        return sources.transpose(by_mesh).reshape(-1)

    def other_batch_axes(self, shard_axes: Sequence[str]) -> tuple[str, ...]:
        """Return the batch axes that do not split the rows: an all-gather joins gradients there."""
        return tuple(a for a in self.batch_axes if a not in shard_axes)


def make_axes(mesh: Mesh | None, batch_axes: str | Sequence[str] | None) -> MeshAxes:
    """Return the mesh (one axis over all devices if None), and its batch axes.

    Raises:
      ValueError: a batch axis that the mesh lacks.
    """
    if mesh is None:
        mesh = Mesh(np.asarray(jax.devices()), ("devices",))
    if not isinstance(mesh, Mesh):
        raise ValueError(
            message("mesh", expected="a jax.sharding.Mesh or None", got=type(mesh).__name__)
        )
    wanted = mesh.axis_names if batch_axes is None else batch_axes
    return MeshAxes(mesh, _in_mesh_order("batch_axes", wanted, mesh))


def _in_mesh_order(what: str, names: str | Sequence[Any], mesh: Mesh) -> tuple[str, ...]:
    chosen = (names,) if isinstance(names, str) else tuple(names if np.iterable(names) else [names])
    if len(set(chosen)) != len(chosen) or any(name not in mesh.axis_names for name in chosen):
        raise ValueError(
            message(what, expected=f"different axes of the mesh {mesh.axis_names}", got=f"{chosen}")
        )
    return tuple(name for name in mesh.axis_names if name in chosen)


def refuse_manual_axes() -> None:
    """Refuse a call inside a user's own `shard_map`.

    Raises:
      ValueError: always there.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise ValueError(
            message(
                "EmbeddingEngine",
                expected="a call of lookup or update outside shard_map",
                got=f"one inside, over the axes {tuple(manual)}",
                remedy="call it outside: it shards over the engine's mesh by itself",
            )
        )
