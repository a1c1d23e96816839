"""Ids given inside a user's jit: dense arrays whose values are known only when the program runs.

The host cannot validate such ids. So the program itself resolves bad ids and computes the physical
rows. Features of a stack that have as many ids are treated in one array, so that the size of the
program grows little with their number.

Input: traced arrays of ids. Output: the located ids of every stack, like those of a placed batch,
and the number of bad ids per feature.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_in_program, message, warn_user
from tpu_embed._snapshot import as_array
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch.located import LocalIds
from tpu_embed.core.batch.spec import BatchSpec, StackSpec
from tpu_embed.core.batch.stack_view import view_stacks
from tpu_embed.core.ids import (
    FeatureShape,
    dense_shape,
    gains_in_program,
    is_real,
    narrow_ids,
    shift_rows,
)
from tpu_embed.core.layout import FeatureLayout, Layout, Stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TracedIds:
    """The dense ids of every feature, inside a jit.

    Attributes:
      ids: one integer array `[B, …]` per feature, in flattening order.
      weights: one array of floats or integers per feature, of the ids' shape; or None.
      spec: the static shape of the batch; its stacks have no capacities.
    """

    ids: tuple[Array, ...]
    weights: tuple[Array | None, ...]
    spec: BatchSpec = dataclasses.field(metadata={"static": True})

    def axes(self, layout: Layout) -> tuple[str, ...]:
        """The mesh axes that the first dimension of its arrays is split over."""
        return layout.axes.batch_axes

    def locate(self, layout: Layout) -> tuple[list[LocalIds], Array]:
        """Return the ids of every stack, and bad ids; see `Batch.locate`."""
        located, numbers, counts = [], [], []
        for view in view_stacks(self.spec, layout):
            dtype = view.stack.index_dtype
            given = {
                f: self._in_bags(_signed(self.ids[f], dtype), f, PADDING_ID) for f in view.features
            }
            rows, gains = [], None
            # Features with as many ids are rows of one array: of 2, 2 and 3 ids, the first two are
            # [2, 2] and the third [1, 3]; flattened, they stand one after the other, 4 and 3 ids.
            for _, some in itertools.groupby(view.features, key=lambda f: given[f].size):
                features = tuple(some)
                rules = _FeatureRules.of(features, layout, dtype)
                wide = np.result_type(*(given[f].dtype for f in features))
                ids = jnp.stack([given[f].reshape(-1).astype(wide) for f in features])
                valid, count = _resolve(ids, rules)
                numbers, counts = [*numbers, *features], [*counts, count]
                rows.append(_physical(valid, rules, view.stack).reshape(-1))
            row_ids = _at_least_one(jnp.concatenate(rows), PADDING_ID)
            if view.has_gains:
                each = [self._gains(f, layout, view.stack.compute_dtype) for f in view.features]
                gains = _at_least_one(jnp.concatenate([one.reshape(-1) for one in each]), 1)
                gains = jnp.where(row_ids < 0, jnp.zeros_like(gains), gains)
            located.append(LocalIds(row_ids, view.dense_bags(), gains))
        bad = jnp.zeros(len(layout.features), jnp.int32)
        return located, bad.at[np.array(numbers)].set(jnp.concatenate(counts))

    def row_splits(self, layout: Layout) -> dict[int, Array]:
        """Return the row splits `[1, B/S + 1]` of every jagged feature; see `Batch.row_splits`."""
        found = {}
        for f, (ids, shape) in enumerate(zip(self.ids, self.spec.feature_shapes, strict=True)):
            if shape.capacity is None:
                continue
            dtype = layout.stacks[layout.features[f].stack].index_dtype
            lengths = padded_lengths(_signed(ids, dtype), shape.bags)
            found[f] = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])[None]
        return found

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report the numbers of bad ids, int32 `[F]`; this has an effect only under `checkify`."""
        for f, feature in enumerate(layout.features):
            size = feature.table.vocabulary_size
            what = f"feature {feature.path!r}: {{count}} id(s) outside [0, {size})"
            where = f"of table {feature.table.name!r}"
            check_in_program(bad_ids[f] == 0, f"{what} {where}", count=bad_ids[f])

    def _in_bags(self, values: Array, f: int, fill: int) -> Array:
        """Return a feature's array `[examples, …]`; a sequence is cut or padded to L bags."""
        # Ids of rank 2 that are not combined are a sequence: [examples, H] -> [examples, L].
        shape = self.spec.feature_shapes[f]
        if not shape.combines and values.ndim > 1:
            kept = values[:, : shape.bags]
            missing = ((0, 0), (0, shape.bags - kept.shape[1]))
            values = jnp.pad(kept, missing, constant_values=fill)
        return values

    def _gains(self, f: int, layout: Layout, dtype: np.dtype) -> Array:
        """Return the gains of a feature's ids, of the shape that `_in_bags` gives them."""
        given, config = self.weights[f], layout.features[f].config
        ids = _signed(self.ids[f], layout.stacks[layout.features[f].stack].index_dtype)
        weights = jnp.ones(ids.shape, dtype) if given is None else given.astype(dtype)
        if not self.spec.feature_shapes[f].combines:
            return self._in_bags(weights, f, 0)
        # Padding and dropped ids leave their bag with their weights. With "clip", a bad id becomes
        # a valid one, so only padding is left out.
        kept = ids != PADDING_ID
        if config.on_bad_id != "clip":
            kept = (ids >= 0) & (ids < config.table.vocabulary_size)
        kept_weights = jnp.where(kept, weights, jnp.zeros_like(weights))
        return gains_in_program(kept_weights, config.table.combiner)


class _FeatureRules(NamedTuple):
    """What is needed of the tables of some features: one number per feature, `[features, 1]`.

    If all features have the same number, it is stored once, as an array `[]`: XLA can optimize
    arithmetic with one constant better than with an array of them.

    Attributes:
      last: the last logical row of the feature's table.
      clips: whether bad ids are clipped.
      counts: whether bad ids are counted, that is, are errors.
      offset: the offset of the feature's table in its stack.
      rows_per_shard: the rows per shard of the feature's table.
    """

    last: np.ndarray
    clips: np.ndarray
    counts: np.ndarray
    offset: np.ndarray
    rows_per_shard: np.ndarray

    @classmethod
    def of(cls, numbers: Sequence[int], layout: Layout, dtype: np.dtype) -> _FeatureRules:
        """Return the rules of the features with some numbers."""
        features = [layout.features[f] for f in numbers]

        def each(values: Sequence[int], dtype: Any = dtype) -> np.ndarray:
            same = len(set(values)) == 1
            return np.asarray(values[0] if same else [[value] for value in values], dtype)

        return cls(
            each([feature.table.vocabulary_size - 1 for feature in features]),
            each([feature.config.on_bad_id == "clip" for feature in features], bool),
            each([feature.config.on_bad_id == "error" for feature in features], bool),
            each([feature.table.offset for feature in features]),
            each([feature.table.rows_per_shard for feature in features]),
        )


def make_traced(
    ids: Sequence[Any], weights: Sequence[Any], spec: BatchSpec | None, layout: Layout
) -> TracedIds:
    """Check the shapes of traced ids.

    Args:
      ids: one dense integer array per feature.
      weights: one array or None per feature.
      spec: not used any more; a user who gives one is warned.
      layout: the engine's layout.

    Raises:
      ValueError: a leaf is not an array, shapes do not fit, or weights are not real numbers.
      TypeError: ids are not integers.
    """
    if spec is not None:
        warn_user(
            "spec: ids traced inside a jit need no capacities any more, so it is not used; leave "
            "it out, as a later release will refuse it"
        )
    arrays, scales = _checked_arrays(ids, weights, layout)
    shapes = [
        _feature_shape(feature.path, feature.config, array, scale)
        for feature, array, scale in zip(layout.features, arrays, scales, strict=True)
    ]
    arrays, scales = _after_cuts(arrays, scales, layout)
    stacks = tuple(StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks)))
    own = BatchSpec(layout.axes.replicas, tuple(shapes), stacks)
    own.check_batch([feature.path for feature in layout.features])
    # Of a jagged feature any example may have all its ids, or its first L: C = min(H, L) · B/S.
    shapes = [
        shape.with_capacity(size * shape.bags)
        for shape, size in zip(shapes, own.local_sizes, strict=True)
    ]
    return TracedIds(arrays, scales, dataclasses.replace(own, feature_shapes=tuple(shapes)))


def padded_lengths(ids: Array, longest: int) -> Array:
    """Return the lengths of padded rows of ids, int32 `[B]`.

    A row ends after its last id that is not padding: [7, -1, 3, -1] has length 3.

    Args:
      ids: signed integers `[B, H]`.
      longest: L, to which longer rows are cut.
    """
    ends = jnp.arange(1, ids.shape[1] + 1, dtype=jnp.int32)
    lengths = jnp.max(jnp.where(ids != PADDING_ID, ends, 0), axis=1, initial=0)
    return jnp.minimum(lengths, longest)


def _checked_arrays(ids: Sequence[Any], weights: Sequence[Any], layout: Layout) -> tuple[Any, Any]:
    """Return the arrays of all features, ids and weights; None where there are no weights."""
    paths = [f"feature {feature.path!r}" for feature in layout.features]
    arrays = tuple(_ids(*leaf) for leaf in zip(paths, ids, strict=True))
    return arrays, tuple(_weights(*leaf) for leaf in zip(paths, weights, strict=True))


def _after_cuts(ids: Sequence[Array], weights: Sequence[Any], layout: Layout) -> tuple[Any, Any]:
    """Return ids and weights of all features; see `_after_cut`."""
    given = zip(layout.features, ids, weights, strict=True)
    found = [_after_cut(feature, x, scale, layout) for feature, x, scale in given]
    return tuple(x for x, _ in found), tuple(scale for _, scale in found)


def _after_cut(
    feature: FeatureLayout, ids: Array, weights: Array | None, layout: Layout
) -> tuple[Array, Array | None]:
    """Return ids and weights of a feature, cut at the beginning where it keeps the last ids."""
    config = feature.config
    if config.keep == "first" or ids.ndim != 2 or ids.shape[1] <= config.max_sequence_length:
        return ids, weights
    ids = _signed(ids, layout.stacks[feature.stack].index_dtype)
    return shift_rows(ids, weights, config.max_sequence_length)


def _feature_shape(path: str, config: Any, ids: Array, weights: Array | None) -> FeatureShape:
    """Return the static shape of a feature, after comparing the weights' shape with the ids'."""
    if weights is not None and ids.ndim == 1:
        what = f"weights of feature {path!r}"
        raise ValueError(message(what, expected="None for one id per example", got="an array"))
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
    """Return ids in a signed dtype that can hold -1 and every row.

    The dtype is `dtype`, or the ids' own if that is signed and no narrower. An unsigned id that is
    too large for `dtype` becomes the largest number of `dtype`, which is not a row.
    """
    if jnp.issubdtype(ids.dtype, jnp.signedinteger) and ids.dtype.itemsize >= dtype.itemsize:
        return ids
    return narrow_ids(ids, dtype)


def _resolve(ids: Array, rules: _FeatureRules) -> tuple[Array, Array]:
    """Resolve bad ids: clip them, or turn them into padding.

    Returns:
      The ids `[features, n]`; and int32 `[features]`, the number of bad ids that are errors.
    """
    # An error cannot be raised inside a program: such an id becomes padding, and is counted.
    last = rules.last.astype(ids.dtype)
    bad = (ids < PADDING_ID) | (ids > last)
    instead = jnp.where(rules.clips, jnp.clip(ids, 0, last), PADDING_ID)
    return jnp.where(bad, instead, ids), jnp.sum(bad & rules.counts, axis=1, dtype=jnp.int32)


def _physical(ids: Array, rules: _FeatureRules, stack: Stack) -> Array:
    """Return the physical rows of valid ids `[features, n]`; padding stays padding."""
    ids = ids.astype(stack.index_dtype)
    physical = stack.physical_in(ids, rules.offset, rules.rows_per_shard)
    return jnp.where(ids < 0, jnp.asarray(PADDING_ID, ids.dtype), physical)


def _at_least_one(numbers: Array, padding: int) -> Array:
    """Return numbers `[N]`; one `padding` if there are none."""
    return numbers if numbers.size else jnp.full((1,), padding, numbers.dtype)
