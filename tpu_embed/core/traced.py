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
from tpu_embed.core.batch_spec import BatchSpec, GroupSpec, worst_case
from tpu_embed.core.ids import FeatureForm, dense_form
from tpu_embed.core.layout import Group, Layout
from tpu_embed.core.located import LocalIds, Located, dense_bags


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
        """Return the ids of every stack, inside `shard_map`; see `Batch.locate`."""
        located, bad = [], {}
        for g in range(len(layout.groups)):
            ids, weights = [], []
            for f in self.spec.groups[g].features:
                signed = _signed(self.ids[f], layout.groups[g].index_dtype)
                valid, bad[f] = _resolve(self._bags(signed, f, PADDING_ID), layout, f)
                ids.append(_physical(valid, layout, f))
                if self.spec.is_weighted(g):
                    weights.append(self._scale(f, layout.groups[g]))
            bags = dense_bags(self.spec, g)
            scales = _join(weights, 1) if weights else None
            located.append(LocalIds(_join(ids, PADDING_ID), bags, scales))
        return Located(tuple(located), jnp.stack([bad[f] for f in range(len(layout.features))]))

    def report(self, bad_ids: Array, layout: Layout) -> None:
        """Report bad ids, int32 `[F]` by feature, where that can be done: under `checkify`."""
        for f, feature in enumerate(layout.features):
            size = feature.table.vocabulary_size
            what = f"feature {feature.path!r}: {{count}} id(s) outside [0, {size})"
            where = f"of table {feature.table.name!r}"
            checkify.debug_check(bad_ids[f] == 0, f"{what} {where}", count=bad_ids[f])

    def _bags(self, values: Array, f: int, fill: int) -> Array:
        """Return `[examples, bags, width]` of one feature, a sequence cut or padded to L bags."""
        form = self.spec.forms[f]
        shape = (self.spec.local_batch, form.bags, form.width or 0)
        if form.combines or values.ndim == 1:
            return values.reshape(shape)
        kept = values[:, : form.bags]
        missing = ((0, 0), (0, form.bags - kept.shape[1]))
        return jnp.pad(kept, missing, constant_values=fill).reshape(shape)

    def _scale(self, f: int, group: Group) -> Array:
        given, dtype = self.weights[f], group.compute_dtype
        values = jnp.ones(self.ids[f].shape, dtype) if given is None else given.astype(dtype)
        scale = self._bags(values, f, 0)
        return scale.reshape(scale.shape[0], -1)


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
    return dense_form(f"feature {path!r}", config, ids.shape, weighted=weights is not None)


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


def _signed(ids: Array, dtype: np.dtype) -> Array:
    """Return ids in a signed dtype that holds -1 and every row: `dtype`, or a wider one of theirs.

    An unsigned id beyond `dtype` becomes its largest number, which is no row.
    """
    if ids.dtype.itemsize < dtype.itemsize:
        return ids.astype(dtype)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        return jnp.minimum(ids, jnp.asarray(np.iinfo(dtype).max, ids.dtype)).astype(dtype)
    return ids


def _resolve(ids: Array, layout: Layout, f: int) -> tuple[Array, Array]:
    """Return ids with bad ones clipped or made padding, and how many an "error" feature had."""
    feature = layout.features[f]
    last = feature.table.vocabulary_size - 1
    bad = (ids < PADDING_ID) | (ids > last)
    if feature.config.on_bad_id == "clip":
        return jnp.where(bad, jnp.clip(ids, 0, last), ids), jnp.int32(0)
    count = jnp.sum(bad, dtype=jnp.int32)
    counted = count if feature.config.on_bad_id == "error" else jnp.int32(0)
    return jnp.where(bad, jnp.asarray(PADDING_ID, ids.dtype), ids), counted


def _physical(ids: Array, layout: Layout, f: int) -> Array:
    """Return the physical rows of valid ids, `[examples, columns]`; padding stays padding."""
    feature = layout.features[f]
    group = layout.groups[feature.group]
    ids = ids.astype(group.index_dtype).reshape(ids.shape[0], -1)
    return jnp.where(
        ids < 0, jnp.asarray(PADDING_ID, ids.dtype), group.physical(ids, feature.table)
    )


def _join(columns: Sequence[Array], padding: int) -> Array:
    """Return `[N]` in batch order from `[examples, columns]` a feature; N is at least 1."""
    joined = jnp.concatenate(columns, axis=1).reshape(-1)
    return joined if joined.size else jnp.full((1,), padding, joined.dtype)
