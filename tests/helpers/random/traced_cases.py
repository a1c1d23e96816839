"""Random cases of ids inside a jit, on any number of devices, with any number of blocks.

`draw_case(seed)` depends on its seed alone. Tables are small and batches full of duplicates, so
that the static capacities of the exchange are met or nearly met: the worst case is common here.

Gradients are whole numbers, weights are halves or whole: in a "sum" every float32 sum is exact, and
has the same bits in any order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from random_cases import Known
from random_optimizers import choose

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o

MESHES = {4: ((2, 2),), 6: ((2, 3), (3, 2)), 8: ((2, 4), (4, 2))}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Features, where their tables live, and one batch of them.

    Attributes:
      mesh_shape: the sizes of the axes p and q, or of d alone.
      sum_blocks: G.
    """

    seed: int
    mesh_shape: tuple[int, ...]
    batch_axes: tuple[str, ...]
    sum_blocks: int
    optimizer: Any
    features: tuple[FeatureConfig, ...]
    ids: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray | None, ...]
    gradients: tuple[np.ndarray, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh."""
        return ("p", "q") if len(self.mesh_shape) == 2 else ("d",)

    @property
    def replicas(self) -> int:
        """Into how many parts the batch is split."""
        sizes = dict(zip(self.axes, self.mesh_shape, strict=True))
        return math.prod(sizes[axis] for axis in self.batch_axes)

    @property
    def blocks(self) -> int:
        """Into how many blocks sums are cut."""
        return max(self.sum_blocks, self.replicas)

    @property
    def keeps_bits(self) -> bool:
        """Whether sums have the same bits however they are cut: they are exact, or cut alike."""
        sums = all(feature.table.combiner == "sum" for feature in self.features)
        return sums or self.blocks % self.replicas == 0

    def engine(self) -> tpu_embed.EmbeddingEngine:
        """Return its engine, on the first devices."""
        count = math.prod(self.mesh_shape)
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(self.mesh_shape), self.axes)
        return tpu_embed.EmbeddingEngine(
            list(self.features),
            self.optimizer,
            mesh=mesh,
            batch_axes=self.batch_axes,
            sum_blocks=self.sum_blocks,
        )


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    rng = np.random.default_rng(seed)
    devices, shape, batch_axes = int(rng.integers(1, 9)), None, ("d",)
    if devices in MESHES and rng.random() < 0.4:
        shape = choose(rng, MESHES[devices])
        batch_axes = choose(rng, (("p",), ("q",), ("p", "q")))
    optimizer = _draw_optimizer(rng)
    features = _draw_features(rng, optimizer, on_two_axes=shape is not None)
    case = Case(
        seed,
        shape or (devices,),
        batch_axes,
        int(rng.integers(1, 25)),
        optimizer,
        features,
        *((),) * 3,
    )
    sizes = _draw_sizes(rng, case.replicas, len(features))
    drawn = [_draw_ids(rng, *pair) for pair in zip(features, sizes, strict=True)]
    ids, weights, gradients = zip(*drawn, strict=True)
    return dataclasses.replace(case, ids=ids, weights=weights, gradients=gradients)


def _draw_optimizer(rng: np.random.Generator) -> Any:
    accumulate = bool(rng.random() < 0.85)
    if rng.random() < 0.6:
        return o.SGD(1.0, use_gradient_accumulation=accumulate)
    return o.Adagrad(0.5, use_gradient_accumulation=accumulate)


def _draw_features(
    rng: np.random.Generator, optimizer: Any, *, on_two_axes: bool
) -> tuple[FeatureConfig, ...]:
    """Return one or two features of one table or of two, which may share a stack."""
    placements = ("mod", "mod", "div", "replicated")
    if not optimizer.use_gradient_accumulation:
        placements = placements[:3]
    kind = {
        "dim": int(rng.integers(1, 4)),
        "placement": choose(rng, placements),
        "shard_axes": choose(rng, (None, "p", "q")) if on_two_axes else None,
    }
    largest = choose(rng, (1, 3, 9, 50))
    tables = [
        TableConfig(
            int(rng.integers(1, largest + 1)),
            combiner=choose(rng, ("sum", "sum", "mean", "sqrtn")),
            initializer=Known(int(rng.integers(1000))),
            name=name,
            **kind,
        )
        for name in "ab"
    ]
    used = choose(rng, (tables[:1], [tables[0], tables[0]], tables))
    lengths = [2 if rng.random() < 0.15 else 0 for _ in used]
    return tuple(map(FeatureConfig, used, lengths))


def _draw_sizes(rng: np.random.Generator, replicas: int, count: int) -> list[int]:
    """Return the batch size of each feature; that of the first is 50 at most."""
    first = int(rng.integers(1, max(1, 50 // replicas) + 1))
    factors = [1, *(choose(rng, (1, 1, 2, 3)) for _ in range(count - 1))]
    return [replicas * first * factor for factor in factors]


def _draw_ids(
    rng: np.random.Generator, feature: FeatureConfig, size: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return the ids, weights and gradients of a feature."""
    table, width = feature.table, int(rng.integers(1, 4))
    shapes = ((size,), (size, width), (size, width), (size, width), (size, 2, width))
    shape = (size, width) if feature.max_sequence_length else choose(rng, shapes)
    few = min(table.vocabulary_size, choose(rng, (1, 2, 50, 50)))
    ids = rng.integers(0, few, shape)
    absent = rng.random(shape) < choose(rng, (0.0, 0.0, 0.3))
    ids = np.where(absent, -1, ids).astype(np.int32)
    weights = None
    if ids.ndim > 1 and rng.random() < 0.4:
        weights = rng.choice(np.float32([0.5, 1, 2]), shape)
    inner = shape[1:-1]
    if feature.max_sequence_length:
        inner = (feature.max_sequence_length,)
    numbers = rng.integers(1, 5, (size, *inner, table.dim))
    signs = rng.choice([-1, 1], numbers.shape) if rng.random() < 0.5 else 1
    return ids, weights, (numbers * signs).astype(np.float32)
