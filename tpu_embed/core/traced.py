"""Ids given inside a user's jit: dense arrays, whose values nobody knows before the program runs.

Enters: traced arrays of ids. Leaves: the ids of every stack, located as those of a placed batch,
with the ids that no policy allows counted per feature. Called by the engine. Exchange capacities
are the worst case unless the user gives a `BatchSpec`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import GroupIds, Located
from tpu_embed.core.batch_spec import BatchSpec, GroupSpec, worst_case
from tpu_embed.core.ids import FeatureForm, dense_form
from tpu_embed.core.layout import Columns, Group, Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TracedIds:
    """Dense ids of every feature, inside a jit.

    Attributes:
      ids: integers `[B, …]` a feature, in flattening order.
      weights: floats of the same shapes, or None.
      spec: forms and capacities.
      checked: the capacities suffice for any ids.
    """

    ids: tuple[Array, ...]
    weights: tuple[Array | None, ...]
    spec: BatchSpec = dataclasses.field(metadata={"static": True})
    checked: bool = dataclasses.field(metadata={"static": True})

    def locate(self, layout: Layout) -> Located:
        """Return the physical rows of all ids; see `Batch.locate`."""
        located, bad = [], []
        for g, group in enumerate(layout.groups):
            ids, weights, wrong = self._columns(layout, g)
            located.append(GroupIds(self._rows(ids, group, layout, g), None, weights))
            bad += zip(self.spec.groups[g].features, wrong, strict=True)
        counts = jnp.stack([count for _, count in sorted(bad, key=lambda pair: pair[0])])
        return Located(tuple(located), self.spec, self.checked, counts)

    def _columns(self, layout: Layout, g: int) -> tuple[Array, Array | None, list[Array]]:
        """Return ids `[B, columns]` of a stack with bad ones resolved, weights, bad ids a feature."""
        columns, weights, wrong = [], [], []
        for f in self.spec.groups[g].features:
            feature, form = layout.features[f], self.spec.forms[f]
            shape = (form.batch, form.bags, form.width or 0)
            ids, count = _resolve(_fit(self.ids[f], shape, PADDING_ID), layout, f)
            columns.append(ids.astype(layout.groups[g].index_dtype).reshape(form.batch, -1))
            wrong.append(count)
            given = self.weights[f]
            if given is None:
                given = jnp.ones(self.ids[f].shape, layout.groups[g].compute_dtype)
            given = given.astype(layout.groups[g].compute_dtype)
            weights.append(_fit(given, shape, 0).reshape(form.batch, -1))
            checkify.debug_check(
                count == 0,
                f"feature {feature.path!r}: {{count}} ids outside [0, {feature.table.vocabulary_size})",
                count=count,
            )
        joined = self._by_device(weights, 1) if self.spec.is_weighted(g) else None
        return jnp.concatenate(columns, axis=1), joined, wrong

    def _rows(self, ids: Array, group: Group, layout: Layout, g: int) -> Array:
        columns = self.spec.columns(g)
        tables = [layout.features[f].table for f in self.spec.groups[g].features]

        def by_column(field: str) -> np.ndarray:
            values = np.array([getattr(table, field) for table in tables], group.index_dtype)
            return np.repeat(values, columns)

        physical = group.physical(ids, Columns(by_column("offset"), by_column("rows_per_shard")))
        rows = jnp.where(ids < 0, jnp.asarray(PADDING_ID, ids.dtype), physical)
        return self._by_device([rows], PADDING_ID)

    def _by_device(self, columns: list[Array], padding: int) -> Array:
        """Return `[replicas, N]` from pieces `[B, columns]`."""
        joined = jnp.concatenate(columns, axis=1)
        if joined.size == 0:
            return jnp.full((self.spec.replicas, 1), padding, joined.dtype)
        return joined.reshape(self.spec.replicas, -1)


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
      ValueError: a leaf that is no array, shapes that do not fit, a spec of another batch.
      TypeError: ids that are no integers, weights that are no floats.
    """
    arrays = tuple(
        _array(f"feature {feature.path!r}", leaf, jnp.integer)
        for feature, leaf in zip(layout.features, ids, strict=True)
    )
    scales = tuple(
        None if leaf is None else _array(f"weights of feature {feature.path!r}", leaf, jnp.floating)
        for feature, leaf in zip(layout.features, weights, strict=True)
    )
    forms = [
        _form(feature.path, feature.config, array, scale)
        for feature, array, scale in zip(layout.features, arrays, scales, strict=True)
    ]
    groups = tuple(GroupSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.groups)))
    own = BatchSpec(layout.axes.replicas, tuple(forms), groups)
    own.check_batch([feature.path for feature in layout.features])
    enough = worst_case(own, layout)
    if spec is None:
        return TracedIds(arrays, scales, enough, checked=True)
    groups = tuple(
        dataclasses.replace(
            one, rows=min(one.rows, most.rows), partials=min(one.partials, most.partials)
        )
        for one, most in zip(BatchSpec.union(spec, own).groups, enough.groups, strict=True)
    )
    return TracedIds(arrays, scales, dataclasses.replace(own, groups=groups), checked=False)


def _form(path: str, config: Any, ids: Array, weights: Array | None) -> FeatureForm:
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            message(
                f"weights of feature {path!r}",
                expected=f"shape {ids.shape}",
                got=f"{weights.shape}",
            )
        )
    return dense_form(path, config, ids.shape, weighted=weights is not None)


def _array(what: str, value: Any, kind: Any) -> Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(
            message(
                what,
                expected="an array inside jit",
                got=type(value).__name__,
                remedy="call engine.place outside the jitted function and pass its Batch in",
            )
        )
    if not jnp.issubdtype(value.dtype, kind):
        raise TypeError(message(what, expected=f"dtype {kind.__name__}", got=f"{value.dtype}"))
    return jnp.asarray(value)


def _fit(values: Array, shape: tuple[int, int, int], fill: int) -> Array:
    """Return `[B, bags, width]` from an input of a feature: a sequence is cut or padded to L bags."""
    batch, bags, width = shape
    if values.size == batch * bags * width:
        return values.reshape(shape)
    kept = values[:, :bags]
    missing = bags - kept.shape[1]
    return jnp.pad(kept, ((0, 0), (0, missing)), constant_values=fill).reshape(shape)


def _resolve(ids: Array, layout: Layout, f: int) -> tuple[Array, Array]:
    """Return ids with bad ones clipped or made padding, and how many an "error" feature had."""
    feature = layout.features[f]
    last = feature.table.vocabulary_size - 1
    bad = (ids < PADDING_ID) | (ids > last)
    count = jnp.sum(bad, dtype=jnp.int32)
    if feature.config.on_bad_id == "clip":
        return jnp.where(bad, jnp.clip(ids, 0, last), ids), jnp.int32(0)
    counted = count if feature.config.on_bad_id == "error" else jnp.int32(0)
    return jnp.where(bad, jnp.asarray(PADDING_ID, ids.dtype), ids), counted
