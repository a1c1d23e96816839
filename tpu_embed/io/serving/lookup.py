"""Look up rows for serving, in plain arrays: no mesh, no optimizer, no training state.

Ids are checked, packed and combined by the same code as in training; only the place that rows are
read from differs (`stored.py`). Every table is its own stack on one shard, so no table is copied.

Input: tables by `TableConfig` or name, and features. Output: the activations that
`EmbeddingEngine.lookup` returns for the same tables, with the same bits on CPU; those of an engine
without `exchange_dtype`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree, Tracer
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.batch import (
    Batch,
    BatchSpec,
    TracedIds,
    fields_of,
    line_length,
    line_of,
    make_traced,
    view_stacks,
)
from tpu_embed.core.ids import RaggedIds, SparseIds, Structure, host_ids, structure
from tpu_embed.core.layout import FeatureLayout, Layout, MeshAxes, ResolvedTable, make_stacks
from tpu_embed.core.lookup import (
    by_feature,
    combine,
    not_differentiable,
)
from tpu_embed.core.place import natural_spec, pack_line
from tpu_embed.io.serving.keys import Find, finders, with_rows
from tpu_embed.io.serving.stored import RowSource, Stored, stored_tables
from tpu_embed.kernels.operands import RowsToSum


def serving_lookup(
    tables: Any,
    features: PyTree,
    feature_config: PyTree,
    weights: PyTree | None = None,
    *,
    vocabularies: Any = None,
) -> PyTree:
    """Return the activations of features, looked up in plain arrays.

    Rows are read as they are stored: the `exchange_dtype` of an engine, which rounds them on their
    way between devices, has no counterpart here.

    Outside of a jit, only the rows that the ids name are read from NumPy tables, also from
    memory-mapped ones. Inside a jit, pass the tables as its arguments: an array that a jit closes
    over becomes a constant of the program.

    Args:
      tables: one array `[V, D]` in the table's dtype (NumPy or JAX) or `QuantizedTable` per table,
        by `TableConfig` or by name; declared tables that the features do not use may be missing.
        Of a table on the host (`storage=`), a function that returns the rows of ids: it takes
        int64 `[n]`, all different, and returns `[n, D]` in the table's dtype, such as
        `functools.partial(engine.rows, state, name)`.
      features: arrays, columns of a data set, `SparseIds` or `RaggedIds` in the structure of the
        features, of which mappings may leave out some; inside a jit, dense arrays. Each has a batch
        size of its own.
      feature_config: as for `EmbeddingEngine`; optimizers and placements are ignored.
      weights: one weight per id in the same structure, None for a feature without weights.
      vocabularies: the rows of keys, for tables whose vocabularies live: `engine.vocabularies`, or
        a `FixedVocabulary` by `TableConfig` or by name. Keys without a row have a zero row, or the
        one that unseen keys share. Tables and vocabulary must be of the same step:
        `engine.vocabularies` goes on with the training, so keep a `FixedVocabulary` beside tables
        that you publish.

    Returns:
      One array `[B, …, D]` per given feature in the structure of the features, float32 (float64
      for a float64 table); a `Jagged` of one replica for a jagged feature.

    Raises:
      ValueError: a table is missing, not declared, or has another shape or dtype; ids, weights,
        structure or batch size are bad, as for `EmbeddingEngine.place`.
      TypeError: ids are not integers; a container has another type; the lookup is differentiated
        with respect to the tables.

    Example:
      >>> import numpy as np
      >>> from tpu_embed import FeatureConfig, TableConfig
      >>> films = TableConfig(vocabulary_size=3, dim=2, combiner="sum", name="films")
      >>> table = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
      >>> serving_lookup({films: table}, np.array([[0, 2], [1, -1]]), FeatureConfig(films)).tolist()
      [[6.0, 8.0], [3.0, 4.0]]
    """
    whole = structure.flatten(feature_config)
    declared = whole.part(features)
    stored = stored_tables(tables, whole, declared)
    given, scales = declared.match_weighted(features, weights)
    server = server_of(declared)
    if any(isinstance(leaf, Tracer) for leaf in (*given, *scales)):
        declared.refuse_keys("look up outside the jit, and give it the activations")
        source = server.traced(given, scales)
        arrays = [one for one in stored if isinstance(one, Stored)]  # all: others were refused
        found, bad_ids = server.activations(arrays, source)
        source.report(bad_ids, server.layout)
    else:
        find = finders(vocabularies, whole, declared)
        found = server.placed(stored, given, scales, find)
    return declared.unflatten(found)


def server_of(declared: Structure) -> Server:
    """Return the server of a feature configuration; equal configurations share one."""
    return _server(declared.labels, declared.features, declared.tables, declared.table_names)


@functools.lru_cache(64)
def _server(
    labels: tuple[str, ...],
    features: tuple[FeatureConfig, ...],
    tables: tuple[TableConfig, ...],
    names: tuple[str, ...],
) -> Server:
    resolved = [
        ResolvedTable(name, table, None, None, (), 1)
        for name, table in zip(names, tables, strict=True)
    ]
    stacks = make_stacks(resolved, stack_tables=False)
    located = []
    for label, feature in zip(labels, features, strict=True):
        g = tables.index(feature.table)
        located.append(FeatureLayout(label, feature, stacks[g].tables[0], g))
    nowhere: Any = AbstractMesh((), ())
    return Server(Layout(MeshAxes(nowhere, ()), stacks, tuple(located), sum_blocks=1))


def _rounded(spec: BatchSpec) -> BatchSpec:
    """Return the spec with sizes rounded up to powers of two, so that few programs compile."""
    stacks = tuple(
        dataclasses.replace(stack, ids=_power_of_two(stack.ids)) for stack in spec.stacks
    )
    shapes = tuple(
        shape.with_capacity(_power_of_two(shape.capacity or 0)) for shape in spec.feature_shapes
    )
    return dataclasses.replace(spec, feature_shapes=shapes, stacks=stacks)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


class Server:
    """The lookup of one feature configuration, compiled once per `BatchSpec`.

    Args:
      layout: one stack of one shard per table, in table order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._program = jax.jit(lambda *operands: self.activations(*operands)[0])

    def placed(
        self,
        tables: Sequence[Stored | RowSource],
        ids: Sequence[Any],
        weights: Sequence[Any],
        find: Mapping[str, Find],
    ) -> Any:
        """Return one activation per feature, for ids on the host.

        Args:
          tables: the tables in order.
          ids: one leaf per feature.
          weights: one leaf per feature; None for a feature without weights.
          find: finds the rows of keys, by table.

        Raises:
          ValueError: whatever `host_ids` refuses.
          TypeError: whatever `host_ids` refuses.
        """
        layout = self.layout
        hosts = [
            host_ids(f"feature {feature.path!r}", feature.config, feature.table.name, *leaves)
            for feature, *leaves in zip(layout.features, ids, weights, strict=True)
        ]
        hosts, whole = with_rows(hosts, layout, tables, find)
        spec = _rounded(natural_spec(hosts, layout, layout.axes.replicas))
        stacks, operands = line_of(spec, layout), []
        packed = np.empty((1, line_length(stacks)), np.int32)
        for view, fields, table in zip(view_stacks(spec, layout), stacks, whole, strict=True):
            line = fields_of(packed, fields)
            pack_line(hosts, view, line)
            operands.append(table.operand(line["row_ids"][0]))
        array: Any = packed
        return self._program(tuple(operands), Batch.of(array, spec, layout))

    def traced(self, ids: Sequence[Any], weights: Sequence[Any]) -> TracedIds:
        """Return dense ids inside a jit in the form that `activations` takes.

        Args:
          ids: one leaf per feature.
          weights: one leaf per feature; None for a feature without weights.

        Raises:
          ValueError: a leaf is not an array; whatever `make_traced` refuses.
          TypeError: whatever `make_traced` refuses.
        """
        for feature, *leaves in zip(self.layout.features, ids, weights, strict=True):
            if any(isinstance(leaf, (SparseIds, RaggedIds)) for leaf in leaves):
                raise ValueError(
                    message(
                        f"feature {feature.path!r}",
                        expected="dense arrays beside traced ones",
                        got="SparseIds or RaggedIds",
                        remedy="give bags as an array padded with -1, or look up outside the jit",
                    )
                )
        return make_traced(ids, weights, None, self.layout)

    def activations(
        self, tables: Sequence[Stored], source: Batch | TracedIds
    ) -> tuple[list[Array], Array]:
        """Return one activation per feature, and the counts of bad ids, int32 `[F]`; runs in a jit.

        Args:
          tables: the tables in order.
          source: the ids.
        """
        layout = self.layout
        (located, bad_ids), splits = source.locate(layout), source.row_splits(layout)
        pairs = zip(layout.stacks, jax.tree.map(jnp.asarray, tables), strict=True)
        fixed: dict[str, Any] = not_differentiable({stack.name: table for stack, table in pairs})
        found: dict[int, Any] = {}
        for view, ids in zip(view_stacks(source.spec, layout), located, strict=True):
            stack = view.stack
            with jax.named_scope(f"lookup/{stack.tables[0].name}"):
                values, index = fixed[stack.name].found(ids.index, stack)
                rows = RowsToSum(values, index, ids.bags, ids.gains)
                found |= by_feature(combine(rows, view.sum_layout, stack), view, splits)
        return [found[f] for f in range(len(layout.features))], bad_ids
