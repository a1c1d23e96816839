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

# jax.sharding.get_mesh cannot be called in a jit.
from jax._src.mesh import get_concrete_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_embed._checks import check_type, refuse
from tpu_embed._types import Array, PyTree
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
        every = enumerate(self.processes_of_parts(names))
        return np.array(
            [i for i, processes in every if self.here in processes], np.int64
        )

    @property
    def here(self) -> int:
        """The number of this process."""
        return jax.process_index()

    @functools.cache  # noqa: B019
    def processes_of_parts(self, names: tuple[str, ...]) -> list[frozenset[int]]:
        """Return which processes hold each part of what is split over the named axes."""
        parts = self.parts_of_devices(names)
        processes = np.array(
            [device.process_index for device in self.mesh.devices.flat]
        )
        return [
            frozenset(processes[parts == i].tolist()) for i in range(self.size(names))
        ]

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
    def processes(self) -> frozenset[int]:
        """The processes that have devices of the mesh."""
        return frozenset(device.process_index for device in self.mesh.devices.flat)

    @functools.cached_property
    def one_process(self) -> bool:
        """Whether one process has all devices, so that its host knows the whole batch."""
        if isinstance(self.mesh, Mesh):
            return len(self.processes) == 1
        # A plan's mesh has no devices yet.
        return self.mesh.size <= CHIPS_PER_HOST

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        if isinstance(self.mesh, Mesh):
            return all(device.platform == "cpu" for device in self.mesh.devices.flat)
        return getattr(self.device, "device_kind", "") == "cpu"

    @functools.cache  # noqa: B019
    def sharding(self, names: tuple[str, ...]) -> NamedSharding:
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
        sharding = self.sharding(
            tuple(n for n in names if kinds[n] == AxisType.Explicit)
        )
        return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return a batch in another shape, with its first dimension split as long as it can be.

        On a mesh with explicit axes JAX refuses to merge or part dimensions that are split. So the
        batch axes split the first dimension alone, or nothing if they do not divide it.
        """
        # On 4 devices [8, 3] -> [24] stays split, and [2, 4] -> [8] is whole on every device.
        even = all(
            size and size[0] % self.replicas == 0 for size in (array.shape, shape)
        )
        return self.reshard(array, self.batch_axes if even else ()).reshape(shape)

    def shard_axes_of(self, name: str, config: TableConfig) -> tuple[str, ...]:
        """Return the axes that split the rows of a table, in mesh order.

        Raises:
          ValueError: the table names an axis that the mesh does not have.
        """
        if config.placement == "replicated":
            return ()
        wanted = (
            self.mesh.axis_names if config.shard_axes is None else config.shard_axes
        )
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
        sources = np.arange(self.size(arrival)).reshape(
            [self.mesh.shape[a] for a in arrival]
        )
        by_mesh = sorted(
            range(len(arrival)), key=lambda i: self.mesh.axis_names.index(arrival[i])
        )
        return sources.transpose(by_mesh).reshape(-1)

    def check_context(self) -> None:
        """Check that a call is outside a user's `shard_map`, and under no other mesh than this one.

        JAX's own errors would name a `shard_map` of this package, which users do not know.

        Raises:
          ValueError: the call is inside a `shard_map`, or `jax.set_mesh` has set another mesh.
        """
        context = jax.sharding.get_abstract_mesh()
        if context.empty or context == self.mesh.abstract_mesh:
            return
        if context.manual_axes:
            expected, got = (
                "outside shard_map",
                f"inside, over the axes {context.manual_axes}",
            )
            remedy = "call it outside: it shards over the engine's mesh by itself"
        else:
            expected = f"without jax.set_mesh or under the engine's mesh {_described(self.mesh)}"
            got = f"under {_described(context)}"
            remedy = "make the engine under the same jax.set_mesh, or give it that mesh (mesh=)"
        refuse(
            "EmbeddingEngine",
            expected=f"calls {expected}",
            got=f"one {got}",
            remedy=remedy,
        )

    def other_batch_axes(self, shard_axes: Sequence[str]) -> tuple[str, ...]:
        """Return the batch axes that do not split the rows.

        Devices along these axes hold copies of the same shard, so the gradients of all of them
        must be gathered.
        """
        return tuple(a for a in self.batch_axes if a not in shard_axes)


def make_axes(mesh: Mesh | None, batch_axes: str | Sequence[str] | None) -> MeshAxes:
    """Return the `MeshAxes` of a mesh, with defaults for what is None.

    Args:
      mesh: None: the mesh of `jax.set_mesh`; without one, one axis, "devices", over all devices.
      batch_axes: None: all axes of the mesh.

    Raises:
      ValueError: `mesh` is not a mesh, or it does not have one of the batch axes; it is None where
        the mesh in use has no devices, as inside a `shard_map`.
    """
    if mesh is None:
        mesh = _mesh_in_use() or Mesh(np.asarray(jax.devices()), ("devices",))
    check_type(
        "mesh", mesh, Mesh, expected="a jax.sharding.Mesh or None", error=ValueError
    )
    wanted = mesh.axis_names if batch_axes is None else batch_axes
    return MeshAxes(mesh, _in_mesh_order("batch_axes", wanted, mesh))


def gather_explicit(array: Array) -> Array:
    """Return an array whole on every device, if the mesh in use has explicit axes.

    For automatic axes the compiler decides by itself what has to be sent.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return array
    return jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim))


def _in_mesh_order(
    what: str, names: str | Sequence[Any], mesh: Mesh
) -> tuple[str, ...]:
    """Return the named axes in mesh order; `what` names the argument in messages."""
    chosen = (
        (names,)
        if isinstance(names, str)
        else tuple(names if np.iterable(names) else [names])
    )
    if len(set(chosen)) != len(chosen) or any(
        name not in mesh.axis_names for name in chosen
    ):
        refuse(
            what,
            expected=f"different axes of the mesh {mesh.axis_names}",
            got=f"{chosen}",
        )
    # In mesh order, so that the parts are numbered in the same way wherever they are numbered.
    return tuple(name for name in mesh.axis_names if name in chosen)


def _mesh_in_use() -> Mesh | None:
    """Return the mesh that `jax.set_mesh` has set, inside a jit too; None if there is none.

    Raises:
      ValueError: the mesh in use is abstract, which only JAX's tracing knows.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return None
    mesh = get_concrete_mesh()
    if mesh.abstract_mesh == context:
        return mesh
    manual = (
        f", inside a shard_map over {context.manual_axes}"
        if context.manual_axes
        else ""
    )
    refuse(
        "mesh",
        expected="the devices of a mesh",
        got=f"the abstract mesh {_described(context)}{manual}",
        remedy="give a mesh (mesh=), or make the engine under jax.set_mesh alone",
    )


def _described(mesh: Mesh | AbstractMesh) -> str:
    """Return sizes and kinds of a mesh's axes: `('x': 4 Auto, 'y': 2 Explicit)`."""
    axes = zip(mesh.shape.items(), [kind.name for kind in mesh.axis_types], strict=True)
    return (
        "(" + ", ".join(f"{name!r}: {size} {kind}" for (name, size), kind in axes) + ")"
    )
