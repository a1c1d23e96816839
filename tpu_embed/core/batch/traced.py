"""Ids given inside a user's jit: dense arrays, whose values nobody knows before the program runs.

Enters: traced arrays of ids. Leaves: the ids of every stack, located as those of a placed batch,
with the ids that no policy allows counted per feature. Called by the engine. A stack's ids are
judged and located together, so that programs grow with stacks. Exchange capacities are the worst
case unless the user gives a `BatchSpec`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch.located import LocalIds, Located, dense_bags
from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_case
from tpu_embed.core.ids import FeatureShape, dense_shape, is_real, rescale_bags
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.kernels import dispatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TracedIds:
    """Dense ids of every feature, inside a jit.

    Attributes:
      ids: integers `[B, …]` a feature, in flattening order.
      weights: floats or integers of the same shapes, or None.
      spec: forms and capacities.
      checked: the capacities suffice for any ids.
    """

    ids: tuple[Array, ...]
    weights: tuple[Array | None, ...]
    spec: BatchSpec = dataclasses.field(metadata={"static": True})
    checked: bool = dataclasses.field(metadata={"static": True})

    def locate(self, layout: Layout) -> Located:
        """Return the ids of every stack, inside `shard_map`; see `Batch.locate`."""
        located, bad = [], jnp.zeros(len(layout.features), jnp.int32)
        for g, stack in enumerate(layout.stacks):
            given = [_signed(self.ids[f], stack.index_dtype) for f in layout.features_of(g)]
            tables = _ColumnTables.of(layout, g, self.spec.columns(g))
            valid, counts = _resolve(self._joined(given, g, PADDING_ID), tables)
            bad += dispatch.segment_sum(counts, jnp.asarray(tables.feature), len(layout.features))
            rows, weights = _physical(valid, tables, stack), None
            if self.spec.is_weighted(g):
                numbers = zip(layout.features_of(g), given, strict=True)
                scales = [self._scale(f, ids, layout, stack.compute_dtype) for f, ids in numbers]
                weights = _in_batch_order(self._joined(scales, g, 0), 1)
            rows = _in_batch_order(rows, PADDING_ID)
            located.append(LocalIds(rows, dense_bags(self.spec, g), weights))
        return Located(tuple(located), bad)

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report bad ids, int32 `[F]` by feature, where that can be done: under `checkify`."""
        for f, feature in enumerate(layout.features):
            size = feature.table.vocabulary_size
            what = f"feature {feature.path!r}: {{count}} id(s) outside [0, {size})"
            where = f"of table {feature.table.name!r}"
            checkify.debug_check(bad_ids[f] == 0, f"{what} {where}", count=bad_ids[f])

    def _joined(self, values: Sequence[Array], g: int, fill: int) -> Array:
        """Return a stack's `[examples, columns]`, from an array a feature, in the widest dtype."""
        dtype = np.result_type(*(array.dtype for array in values))
        columns = [
            self._columns(array.astype(dtype), f, fill)
            for f, array in zip(self.spec.stacks[g].features, values, strict=True)
        ]
        return jnp.concatenate(columns, axis=1)

    def _columns(self, values: Array, f: int, fill: int) -> Array:
        """Return a feature's `[examples, columns]`, a sequence cut or padded to L bags."""
        form = self.spec.feature_shapes[f]
        if not form.combines and values.ndim > 1:
            kept = values[:, : form.bags]
            missing = ((0, 0), (0, form.bags - kept.shape[1]))
            values = jnp.pad(kept, missing, constant_values=fill)
        return values.reshape(self.spec.local_batch, form.bags * (form.width or 0))

    def _scale(self, f: int, ids: Array, layout: Layout, dtype: np.dtype) -> Array:
        """Return the weights of a feature's ids, in their shape."""
        given, config = self.weights[f], layout.features[f].config
        if given is None:
            return jnp.ones(ids.shape, dtype)
        weights = given.astype(dtype)
        if not self.spec.feature_shapes[f].combines or config.table.combiner == "sum":
            return weights
        kept = ids != PADDING_ID
        if config.on_bad_id != "clip":
            kept = (ids >= 0) & (ids < config.table.vocabulary_size)
        return rescale_bags(jnp.where(kept, weights, jnp.zeros_like(weights)))


class _ColumnTables(NamedTuple):
    """The tables that the columns of a stack's ids are rows of: a number a column.

    One number for all columns where they have the same, so that XLA knows it.

    Attributes:
      feature: the column's feature; always one a column.
      last: the last row.
      clips: whether a bad id is clipped.
      counts: whether it is counted.
      offset: the table's, in its stack.
      rows_per_shard: likewise.
    """

    feature: np.ndarray
    last: np.ndarray
    clips: np.ndarray
    counts: np.ndarray
    offset: np.ndarray
    rows_per_shard: np.ndarray

    @classmethod
    def of(cls, layout: Layout, g: int, columns: tuple[int, ...]) -> _ColumnTables:
        """Return those of stack g, whose features have so many columns."""
        numbers, dtype = layout.features_of(g), layout.stacks[g].index_dtype
        features = [layout.features[f] for f in numbers]

        def by_column(values: Sequence[int], dtype: Any = dtype) -> np.ndarray:
            if len(set(values)) == 1:
                return np.asarray(values[0], dtype)
            return np.repeat(np.asarray(values, dtype), columns)

        return cls(
            np.repeat(np.asarray(numbers, np.int32), columns),
            by_column([feature.table.vocabulary_size - 1 for feature in features]),
            by_column([feature.config.on_bad_id == "clip" for feature in features], bool),
            by_column([feature.config.on_bad_id == "error" for feature in features], bool),
            by_column([feature.table.offset for feature in features]),
            by_column([feature.table.rows_per_shard for feature in features]),
        )


def make_traced(
    ids: Sequence[Any], weights: Sequence[Any], spec: BatchSpec | None, layout: Layout
) -> TracedIds:
    """Check the shapes of traced ids, and choose their capacities.

    Args:
      ids: a leaf a feature; dense integer arrays.
      weights: a leaf a feature, or None.
      spec: the user's capacities, or None: the worst case.
      layout: the engine's.

    Raises:
      ValueError: a leaf that is no array, shapes that do not fit, weights that are no real numbers,
        a spec of another batch.
      TypeError: ids that are no integers.
    """
    paths = [f"feature {feature.path!r}" for feature in layout.features]
    arrays = tuple(_ids(*leaf) for leaf in zip(paths, ids, strict=True))
    scales = tuple(_weights(*leaf) for leaf in zip(paths, weights, strict=True))
    forms = [
        _form(feature.path, feature.config, array, scale)
        for feature, array, scale in zip(layout.features, arrays, scales, strict=True)
    ]
    stacks = tuple(StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks)))
    own = BatchSpec(layout.axes.replicas, tuple(forms), stacks)
    own.check_batch([feature.path for feature in layout.features])
    enough = worst_case(own, layout)
    if spec is None:
        return TracedIds(arrays, scales, enough, checked=True)
    stacks = tuple(
        dataclasses.replace(
            one,
            row_capacity=min(one.row_capacity, most.row_capacity),
            partials=min(one.partials, most.partials),
        )
        for one, most in zip(BatchSpec.union(spec, own).stacks, enough.stacks, strict=True)
    )
    return TracedIds(arrays, scales, dataclasses.replace(own, stacks=stacks), checked=False)


def _form(path: str, config: Any, ids: Array, weights: Array | None) -> FeatureShape:
    if weights is not None and ids.ndim == 1:
        what = f"weights of feature {path!r}"
        raise ValueError(message(what, expected="None for one id an example", got="an array"))
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            message(
                f"weights of feature {path!r}",
                expected=f"shape {ids.shape}",
                got=f"{weights.shape}",
            )
        )
    return dense_shape(f"feature {path!r}", config, ids.shape, weighted=weights is not None)


def _ids(path: str, value: Any) -> Array:
    ids = _array(path, value)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(message(path, expected="ids of an integer dtype", got=f"{ids.dtype}"))
    return ids


def _weights(path: str, value: Any) -> Array | None:
    what = f"weights of {path}"
    weights = None if value is None else _array(what, value)
    if weights is not None and not is_real(weights.dtype):
        raise ValueError(message(what, expected="real numbers", got=f"{weights.dtype}"))
    return weights


def _array(what: str, value: Any) -> Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(
            message(
                what,
                expected="an array inside jit",
                got=type(value).__name__,
                remedy="call engine.place outside the jitted function and pass its Batch in",
            )
        )
    return as_array(value)


def _signed(ids: Array, dtype: np.dtype) -> Array:
    """Return ids in a signed dtype that holds -1 and every row: `dtype`, or a wider one of theirs.

    An unsigned id beyond `dtype` becomes its largest number, which is no row.
    """
    if ids.dtype.itemsize < dtype.itemsize:
        return ids.astype(dtype)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        return jnp.minimum(ids, jnp.asarray(np.iinfo(dtype).max, ids.dtype)).astype(dtype)
    return ids


def _resolve(ids: Array, tables: _ColumnTables) -> tuple[Array, Array]:
    """Return ids `[examples, columns]`, bad ones clipped or made padding; counts `[columns]`."""
    last = tables.last.astype(ids.dtype)
    bad = (ids < PADDING_ID) | (ids > last)
    instead = jnp.where(tables.clips, jnp.clip(ids, 0, last), PADDING_ID)
    return jnp.where(bad, instead, ids), jnp.sum(bad & tables.counts, axis=0, dtype=jnp.int32)


def _physical(ids: Array, tables: _ColumnTables, stack: Stack) -> Array:
    """Return the physical rows of valid ids `[examples, columns]`; padding stays padding."""
    ids = ids.astype(stack.index_dtype)
    physical = stack.physical_in(ids, tables.offset, tables.rows_per_shard)
    return jnp.where(ids < 0, jnp.asarray(PADDING_ID, ids.dtype), physical)


def _in_batch_order(columns: Array, padding: int) -> Array:
    """Return `[N]` from a stack's `[examples, columns]`; N is at least 1."""
    return columns.reshape(-1) if columns.size else jnp.full((1,), padding, columns.dtype)
