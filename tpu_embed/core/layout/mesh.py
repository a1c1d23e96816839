"""The mesh of devices, and what each of its axes splits: the batch, a table's rows, or both.

The parts of the batch are called replicas, the parts of a table's rows shards. On a mesh with the
axes ("data", "model") a user may split the batch over "data" and the rows over both: then every
device is one shard, and the devices along "model" work on the same examples.

Input: a mesh and names of axes. Output: `MeshAxes`, which gives sizes, shardings, and the order in
which contributions from other devices have to be read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.config import TableConfig

CHIPS_PER_HOST = 4
"""The chips of one TPU host, where a mesh is planned that does not exist yet."""


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh, and those of its axes that split the batch.

    Attributes:
      mesh: the devices.
      batch_axes: the axes that split the batch dimension, in mesh order.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]

    def size(self, names: Sequence[str]) -> int:
        """Return the product of the sizes of the named axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def device(self) -> Any:
        """The kind of the devices, an object with a `device_kind`; None if it is not known."""
        return self.mesh.abstract_mesh.abstract_device

    @property
    def replicas(self) -> int:
        """The number of parts the batch is split into."""
        return self.size(self.batch_axes)

    @functools.cache  # noqa: B019, a mesh is kept by JAX as well
    def local_parts(self, names: tuple[str, ...]) -> np.ndarray:
        """Return the indices of the parts that this process's devices hold, int64, ascending.

        Args:
          names: the axes that split an array into these parts.
        """
        # Ask JAX which slice of an array [number of parts] each device of this process holds. The
        # slice starts at the part's index, or at None if there is only one part.
        parts = self.sharding(names).addressable_devices_indices_map((self.size(names),))
        return np.unique(np.asarray([i[0].start or 0 for i in parts.values() if i], np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """All axes of the mesh, in mesh order."""
        return tuple(self.mesh.axis_names)

    @functools.cache  # noqa: B019
    def parts_of_devices(self, names: tuple[str, ...]) -> np.ndarray:
        """Return which part each device holds of what is split over the named axes.

        Returns:
          int64 `[devices]`, the devices in mesh order.
        """
        # Mesh ("a": 2, "b": 3): device 4 is at (1, 1), so over "b" it holds part 1, over "a" and
        # "b" part 4.
        sizes = [self.mesh.shape[name] for name in self.names]
        places = np.unravel_index(np.arange(math.prod(sizes)), sizes or [1])
        part = np.zeros(math.prod(sizes), np.int64)
        for name, place in zip(self.names, places, strict=False):
            part = part * self.mesh.shape[name] + place if name in names else part
        return part

    @functools.cached_property
    def one_process(self) -> bool:
        """Whether one process has all devices, so that its host knows the whole batch."""
        if isinstance(self.mesh, Mesh):
            return len({device.process_index for device in self.mesh.devices.flat}) == 1
        # A plan's mesh has no devices yet.
        return self.mesh.size <= CHIPS_PER_HOST

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        if isinstance(self.mesh, Mesh):
            return all(device.platform == "cpu" for device in self.mesh.devices.flat)
        return getattr(self.device, "device_kind", "") == "cpu"

    def sharding(self, names: Sequence[str]) -> NamedSharding:
        """Return the sharding that splits the first dimension over the named axes."""
        return NamedSharding(self.mesh, self.spec(names))

    def spec(self, names: Sequence[str]) -> PartitionSpec:
        """Return the `PartitionSpec` that splits the first dimension over the named axes."""
        return PartitionSpec(tuple(names)) if names else PartitionSpec()

    def reshard(self, tree: PyTree, names: Sequence[str]) -> PyTree:
        """Split the first dimension of every leaf over the named axes.

        This is needed only on a mesh with explicit axes. For automatic axes the compiler chooses
        the sharding itself.
        """
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if all(kind == AxisType.Auto for kind in kinds.values()):
            return tree
        # Of a mesh with both kinds, a sharding may name only the explicit axes.
        sharding = self.sharding([name for name in names if kinds[name] == AxisType.Explicit])
        return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

    def shard_axes_of(self, name: str, config: TableConfig) -> tuple[str, ...]:
        """Return the axes that split the rows of a table, in mesh order.

        Raises:
          ValueError: the table names an axis that the mesh does not have.
        """
        if config.placement == "replicated":
            return ()
        wanted = self.mesh.axis_names if config.shard_axes is None else config.shard_axes
        return _in_mesh_order(f"table {name!r}: shard_axes", wanted, self.mesh)

    def batch_order(self, shard_axes: Sequence[str]) -> np.ndarray:
        """Return the order in which received contributions must be read to be in batch order.

        The contributions to a shard arrive as `[rest, S]`: from S sources along `shard_axes` (the
        all-to-all), gathered over the other batch axes (the all-gather). The batch, however, is
        split over `batch_axes` in mesh order.

        Returns:
          int `[rest * S]`, a permutation of the sources.
        """
        # Mesh ("a": 2, "b": 2), rows split over "a": contributions arrive by ("b", "a"). Number
        # them [[0, 1], [2, 3]] and transpose to mesh order ("a", "b"): read 0 2 1 3.
        rest = self.other_batch_axes(shard_axes)
        arrival = (*rest, *shard_axes)
        sources = np.arange(self.size(arrival)).reshape([self.mesh.shape[a] for a in arrival])
        by_mesh = sorted(range(len(arrival)), key=lambda i: self.mesh.axis_names.index(arrival[i]))
        return sources.transpose(by_mesh).reshape(-1)

    def other_batch_axes(self, shard_axes: Sequence[str]) -> tuple[str, ...]:
        """Return the batch axes that do not split the rows.

        Devices along these axes hold copies of the same shard, so the gradients of all of them
        must be gathered.
        """
        return tuple(a for a in self.batch_axes if a not in shard_axes)


def make_axes(mesh: Mesh | None, batch_axes: str | Sequence[str] | None) -> MeshAxes:
    """Return the `MeshAxes` of a mesh, with defaults for what is None.

    Args:
      mesh: None: one axis, "devices", over all devices.
      batch_axes: None: all axes of the mesh.

    Raises:
      ValueError: `mesh` is not a mesh, or it does not have one of the batch axes.
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
    """Return the named axes in mesh order; `what` names the argument in messages."""
    chosen = (names,) if isinstance(names, str) else tuple(names if np.iterable(names) else [names])
    if len(set(chosen)) != len(chosen) or any(name not in mesh.axis_names for name in chosen):
        raise ValueError(
            message(what, expected=f"different axes of the mesh {mesh.axis_names}", got=f"{chosen}")
        )
    # In mesh order, so that the parts are numbered in the same way wherever they are numbered.
    return tuple(name for name in mesh.axis_names if name in chosen)


def refuse_manual_axes() -> None:
    """Refuse a call inside a user's own `shard_map`.

    Raises:
      ValueError: the call is inside a `shard_map`.
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
