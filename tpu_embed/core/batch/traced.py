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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_in_program, check_integers, refuse, warn_user
from tpu_embed._types import PADDING_ID, Array, as_array
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.stack_view import LocalIds, view_stacks
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
      ids: one array `[B, …]` of signed integers per feature, in flattening order.
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
            given = {
                f: self._in_bags(self.ids[f], f, PADDING_ID) for f in view.features
            }
            rows, gains = [], None
            # Features with as many ids are rows of one array: of 2, 2 and 3 ids, the first two are
            # [2, 2] and the third [1, 3]; flattened, they stand one after the other, 4 and 3 ids.
            for _, some in itertools.groupby(
                view.features, key=lambda f: given[f].size
            ):
                features = tuple(some)
                wide = np.result_type(*(given[f].dtype for f in features))
                ids = jnp.stack([given[f].reshape(-1).astype(wide) for f in features])
                found, count = _resolve(
                    ids, [layout.features[f] for f in features], view.stack
                )
                rows.append(found.reshape(-1))
                numbers, counts = [*numbers, *features], [*counts, count]
            row_ids = _at_least_one(jnp.concatenate(rows), PADDING_ID)
            if view.has_gains:
                each = [
                    self._gains(f, layout, view.stack.compute_dtype)
                    for f in view.features
                ]
                gains = _at_least_one(
                    jnp.concatenate([one.reshape(-1) for one in each]), 1
                )
                gains = jnp.where(row_ids < 0, jnp.zeros_like(gains), gains)
            located.append(LocalIds(row_ids, view.dense_bags(), gains))
        bad = jnp.zeros(len(layout.features), jnp.int32)
        return located, bad.at[np.array(numbers)].set(jnp.concatenate(counts))

    def row_splits(self, layout: Layout) -> dict[int, Array]:
        """Return the row splits `[1, B/S + 1]` of every jagged feature; see `Batch.row_splits`."""
        found = {}
        for f, (ids, shape) in enumerate(
            zip(self.ids, self.spec.feature_shapes, strict=True)
        ):
            if shape.capacity is None:
                continue
            lengths = padded_lengths(ids, shape.bags)
            found[f] = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])[
                None
            ]
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
        ids, given, config = self.ids[f], self.weights[f], layout.features[f].config
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
    given = zip(layout.features, ids, weights, strict=True)
    checked = [_checked(*one, layout.stacks[one[0].stack].index_dtype) for one in given]
    arrays, scales, shapes = zip(*checked, strict=True)
    # Of a jagged feature any example may have all its ids, or its first L: C = min(H, L) · B/S.
    replicas = layout.axes.replicas
    shapes = [one.with_capacity(one.batch // replicas * one.bags) for one in shapes]
    return TracedIds(arrays, scales, BatchSpec.bare(shapes, layout, replicas))


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


def _checked(
    feature: FeatureLayout, ids: Any, weights: Any, dtype: np.dtype
) -> tuple[Array, Array | None, FeatureShape]:
    """Return ids, weights and static shape of a feature; see `make_traced`.

    The ids are in a signed dtype, which holds -1 and every row: in `dtype`, or in their own if that
    is signed and no narrower. Where the feature keeps the last ids, they are at the beginning.
    """
    what, config = f"feature {feature.path!r}", feature.config
    ids = _array(what, ids)
    check_integers(what, ids.dtype, expected="ids of an integer dtype")
    if weights is not None:
        scales = f"weights of {what}"
        weights = _array(scales, weights)
        if not is_real(weights.dtype):
            refuse(scales, expected="real numbers", got=f"{weights.dtype}")
        if ids.ndim == 1 or weights.shape != ids.shape:
            one_each = "None for one id per example"
            refuse(
                scales,
                expected=one_each if ids.ndim == 1 else f"shape {ids.shape}",
                got=f"{weights.shape}",
            )
    shape = dense_shape(what, config, ids.shape, weighted=weights is not None)
    # An unsigned id that is too large becomes the largest number of the dtype, which is not a row.
    if not (
        jnp.issubdtype(ids.dtype, jnp.signedinteger)
        and ids.dtype.itemsize >= dtype.itemsize
    ):
        ids = narrow_ids(ids, dtype)
    length = config.max_sequence_length
    if config.keep != "first" and ids.ndim == 2 and ids.shape[1] > length:
        ids, weights = shift_rows(ids, weights, length)
    return ids, weights, shape


def _array(what: str, value: Any) -> Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        refuse(
            what,
            expected="an array inside jit",
            got=type(value).__name__,
            remedy="call engine.place outside the jitted function and pass its Batch in",
        )
    return as_array(value)


def _resolve(
    ids: Array, features: Sequence[FeatureLayout], stack: Stack
) -> tuple[Array, Array]:
    """Clip bad ids, or turn them into padding, and compute the physical rows of all others.

    Args:
      ids: of some features of the stack, `[features, n]`.
      features: these features.
      stack: the stack.

    Returns:
      the physical rows `[features, n]`; and int32 `[features]`, the number of bad ids that are
      errors.
    """

    def each(values, dtype: Any = stack.index_dtype):
        # A number per feature, [features, 1]; if all are the same, one []: XLA can optimize
        # arithmetic with one constant better than with an array of them.
        same = len(set(values)) == 1
        return np.asarray(values[0] if same else [[value] for value in values], dtype)

    tables, policies = zip(
        *((one.table, one.config.on_bad_id) for one in features), strict=True
    )
    # An error cannot be raised inside a program: such an id becomes padding, and is counted.
    last = each([table.vocabulary_size - 1 for table in tables]).astype(ids.dtype)
    bad = (ids < PADDING_ID) | (ids > last)
    clips, errors = (
        each([p == one for p in policies], bool) for one in ("clip", "error")
    )
    instead = jnp.where(clips, jnp.clip(ids, 0, last), PADDING_ID)
    count = jnp.sum(bad & errors, axis=1, dtype=jnp.int32)
    ids = jnp.where(bad, instead, ids).astype(stack.index_dtype)
    offsets = each([table.offset for table in tables])
    rows = stack.physical_in(
        ids, offsets, each([table.rows_per_shard for table in tables])
    )
    return jnp.where(ids < 0, jnp.asarray(PADDING_ID, ids.dtype), rows), count


def _at_least_one(numbers: Array, padding: int) -> Array:
    """Return numbers `[N]`; one `padding` if there are none."""
    return numbers if numbers.size else jnp.full((1,), padding, numbers.dtype)
