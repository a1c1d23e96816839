"""What a placed batch depends on: everything static of an engine that `place` reads.

A batch holds numbers: rows, bags, routes. They mean something only together with the declarations
for which they were made. With another combiner, say, its gains are wrong; with another number of
blocks, the order of its sums. So a batch carries what it was placed for, and an engine for which
anything of it differs refuses the batch.

Every field of a config, and every option of an engine, is listed here, with the decision whether
`place` reads it. A new one without a decision fails a test.

Input: a layout. Output: a `PlacedFor`, a static field of `Batch`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence

from tpu_embed.core.layout.features import FeatureLayout
from tpu_embed.core.layout.mesh import MeshAxes
from tpu_embed.core.layout.stacks import Stack

FEATURE_FIELDS = {
    "table": True,  # its name
    "max_sequence_length": True,
    "output_shape": True,
    "on_bad_id": True,
    "name": True,  # a part of its path
    "jagged": True,
    "keep": True,
}
"""Whether `place` reads the fields of a `FeatureConfig`."""

TABLE_FIELDS = {
    # The name of a table's stack tells these of all its tables.
    "vocabulary_size": True,
    "dim": True,
    "name": True,
    "dtype": True,
    "placement": True,
    "shard_axes": True,
    "combiner": True,
    "vocabulary": True,
    "storage": True,
    # Whether there is an optimizer, and whether it accumulates, decides what is routed.
    "optimizer": True,
    "trainable": True,
    # These are about values of rows, of which a batch has none.
    "initializer": False,
    "quantization_config": False,
    "rounding": False,
}
"""Whether `place` reads the fields of a `TableConfig`."""

ENGINE_OPTIONS = {
    "feature_config": True,
    "optimizer": True,
    "mesh": True,
    "batch_axes": True,
    "sum_blocks": True,
    "stack_tables": True,
    "exchange_dtype": True,  # it decides how gradients come to their owners
    "on_bad_gradient": False,  # it looks at gradients
    # Batches with keys carry the history of the maps, which says more.
    "lookahead": False,
    "vocabularies": False,
}
"""Whether `place` reads the arguments of an `EmbeddingEngine`."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedFor:
    """What a batch was placed for; equal by value, with a hash that is computed once.

    Args:
      facts: (what, its value) of everything that `place` reads.
    """

    facts: tuple[tuple[str, str], ...]

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, PlacedFor):
            return self is other
        return hash(self) == hash(other) and self.facts == other.facts

    def __hash__(self) -> int:
        return self._checksum

    @functools.cached_property
    def _checksum(self) -> int:
        # A CRC, because Python's `hash` of a string differs from process to process.
        return zlib.crc32(repr(self.facts).encode())

    def __repr__(self) -> str:
        return f"PlacedFor({self._checksum:08x})"

    def difference(self, other: PlacedFor) -> str:
        """Return in words what differs first in a batch that was placed for something else."""
        mine, theirs = dict(self.facts), dict(other.facts)
        for what in (*mine, *theirs):
            if mine.get(what) != theirs.get(what):
                return f"one placed for {what} {theirs.get(what)}, not {mine.get(what)}"
        return "the same"


def placed_for(
    axes: MeshAxes,
    stacks: Sequence[Stack],
    features: Sequence[FeatureLayout],
    *,
    blocks: int | None,
) -> PlacedFor:
    """Return what the batches of an engine are placed for.

    Args:
      axes: the engine's mesh.
      stacks: its stacks.
      features: its features.
      blocks: G, of batches that are routed for updates, too. None: they are only looked up, and
        depend neither on G nor on whether tables are trained.
    """
    facts = [("mesh", f"{[(name, axes.size((name,))) for name in axes.names]}")]
    facts.append(("batch_axes", f"{axes.batch_axes}"))
    if blocks is not None:
        facts.append(("sum_blocks", f"{blocks}"))
    for feature in features:
        what, config = f"feature {feature.path!r}", feature.config
        facts.append((f"{what}: table", f"{feature.table.name!r}"))
        read = [
            name
            for name, is_read in FEATURE_FIELDS.items()
            if is_read and name not in ("table", "name")
        ]
        facts += [(f"{what}: {name}", f"{getattr(config, name)!r}") for name in read]
        table = f"table {feature.table.name!r}"
        facts.append((f"{table}: combiner", f"{config.table.combiner!r}"))
        facts.append((f"{table}: vocabulary", f"{config.table.vocabulary!r}"))
        facts.append((f"{table}: storage", f"{config.table.storage!r}"))
    for stack in stacks:
        what, optimizer = f"stack {stack.label!r}", stack.optimizer
        facts.append((f"{what}: layout", stack.name))
        facts.append((f"{what}: shard_axes", f"{stack.shard_axes}"))
        accumulates = optimizer is None or optimizer.use_gradient_accumulation
        facts.append((f"{what}: use_gradient_accumulation", f"{accumulates}"))
        if blocks is not None:
            facts.append((f"{what}: trained", f"{optimizer is not None}"))
            # Batches that were pickled before there was this option have no such fact.
            if stack.exchange_dtype is not None:
                facts.append((f"{what}: exchange_dtype", stack.exchange_dtype))
    return PlacedFor(tuple(facts))
