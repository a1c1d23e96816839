"""Judge the ids of one feature of one batch, and bring every input form into one of two shapes.

NumPy on the host, called by the engine for each feature. Enters: a dense array, `SparseIds` or
`RaggedIds`, with weights beside or inside. Leaves: `HostIds`, either dense (a matrix of ids, -1 =
padding) or flat (ids in batch order, each with its bag), every id valid or resolved by the
feature's `on_bad_id`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_embed._types import PADDING_ID, Tracer
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype, resolve_dense, resolve_flat
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, refuse_masked
from tpu_embed.core.ids.rescale import rescale_dense_bags, rescale_flat_bags

__all__ = ["FeatureShape", "HostIds", "dense_shape", "host_ids", "part_of_feature"]

_INT32_MAX = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class FeatureShape:
    """Say what is static about one feature of a batch; hashable.

    Args:
      batch: B, number of examples.
      inner: the activation's shape between B and D: () one bag an example, (K, …) many, (L,) a
        sequence.
      combines: False: every id stands in a bag of its own and no combiner is applied (rank-1 ids,
        sequences, ragged rows that give their first k ids); a weight scales.
      width: H, ids a bag of a dense feature; None: flat.
      weighted: whether the ids have weights.
    """

    batch: int
    inner: tuple[int, ...]
    combines: bool
    width: int | None
    weighted: bool

    @property
    def bags(self) -> int:
        """Bags an example, the product of `inner`."""
        return math.prod(self.inner)


@dataclasses.dataclass(frozen=True, eq=False)
class HostIds:
    """Hold one feature of one batch, judged.

    Args:
      shape: what is static about it.
      ids: int32, or int64 where the vocabulary asks for it. Dense: [B, bags, width], -1 = padding;
        flat: [N] in batch order, none of them -1.
      bags: flat: [N] int32 bag of each id, within [0, B · bags), never falling; None if dense.
      weights: like `ids`, float32 (float64 for a float64 table), 0 at dense padding; of bags that
        are divided by them, brought near 1 (`rescale.py`); None: all ones.
      padded: whether -1 may be among dense ids.
    """

    shape: FeatureShape
    ids: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray | None
    padded: bool


def host_ids(path: str, config: FeatureConfig, table_name: str, ids: Any, weights: Any) -> HostIds:
    """Judge one feature's ids and weights.

    Args:
      path: the feature's path, for messages.
      config: the feature's.
      table_name: its table's, for messages.
      ids: [B], [B, H] or [B, K, …, H] integers, `SparseIds` or `RaggedIds`.
      weights: None (all ones, or those inside `ids`), an array shaped like the ids or like
        `ids.values`, or a container of the same indices holding floats.

    Returns:
      `HostIds`.

    Raises:
      TypeError: ids that are not integers, masked arrays.
      ValueError: a bad id under `on_bad_id="error"`; ids, weights or shapes that the input forms
        don't allow.

    Example:
      >>> from tpu_embed.config import TableConfig
      >>> config = FeatureConfig(TableConfig(10, 4))
      >>> host_ids("x", config, "table_0", np.array([[3, -1], [4, 5]]), None).ids.tolist()
      [[[3, -1]], [[4, 5]]]
    """
    feature = FeatureRules(path, config, table_name)
    if isinstance(ids, SparseIds):
        return _sparse(feature, ids, weights)
    if isinstance(ids, RaggedIds):
        return _ragged(feature, ids, weights)
    if isinstance(ids, Tracer):
        remedy = "place outside the jitted function, or give the ids to lookup and update inside it"
        raise feature.error(expected="ids whose values are known", got="a tracer", remedy=remedy)
    refuse_masked(path, ids)
    if not getattr(ids, "is_fully_addressable", True):
        raise feature.error(
            expected="this process's part of the batch, on the host",
            got="an array whose parts other processes have",
            remedy="give NumPy arrays; global arrays go to lookup and update inside a jit",
        )
    if hasattr(ids, "__array__") and not isinstance(ids, type):
        return _dense(feature, np.asarray(ids), weights)
    raise feature.error(
        expected="an array of ids, SparseIds or RaggedIds",
        got=type(ids).__name__,
        remedy="SparseIds and RaggedIds have constructors for lists, scipy, BCOO and Arrow",
    )


def part_of_feature(config: FeatureConfig, part: int, whole: int) -> FeatureConfig:
    """Return the config of a feature for `part` of `whole` equal parts of the batch."""
    shape = config.output_shape
    if shape is None or part == whole:
        return config
    return dataclasses.replace(config, output_shape=(shape[0] * part // whole, *shape[1:]))


# -- dense ---------------------------------------------------------------------------------------


def dense_shape(
    path: str, config: FeatureConfig, shape: Sequence[int], *, weighted: bool
) -> FeatureShape:
    """Return the form of a dense array of ids of a shape; inside a jit its shape is all there is.

    Raises:
      ValueError: rank 0, a sequence of another rank than 2, or not the declared output_shape.
    """
    feature, length = FeatureRules(path, config, ""), config.max_sequence_length
    if not shape:
        raise feature.error(expected="ids of rank 1 or more", got="rank 0")
    if length and len(shape) != 2:
        raise feature.error(expected="a sequence's ids as [B, H]", got=f"rank {len(shape)}")
    combines = len(shape) > 1 and not length
    feature.check_output_shape(tuple(shape[: max(1, len(shape) - 1)]))
    inner = (length,) if length else tuple(shape[1:-1])
    return _form(shape[0], inner, combines, shape[-1] if combines else 1, weighted)


_form = functools.lru_cache(4096)(FeatureShape)
"""The one form of its kind: batches of like forms are then compared in no time."""


def _dense(feature: FeatureRules, ids: np.ndarray, weights: Any) -> HostIds:
    check_dtype(feature, ids)
    weighted = weights is not None
    form = dense_shape(feature.path, feature.config, ids.shape, weighted=weighted)
    numbers = weights_of.beside_dense(feature.path, feature.config.table.dtype, ids, weights)
    ids, padded = resolve_dense(feature, ids, functools.partial(_dense_position, ids.shape))
    if numbers is not None and padded:
        numbers = np.where(ids == PADDING_ID, numbers.dtype.type(0), numbers)
    if feature.length:
        padded = padded or ids.shape[1] < feature.length
        ids = _first_columns(ids, feature.length, PADDING_ID)
        numbers = None if numbers is None else _first_columns(numbers, feature.length, 0)
    shape = (form.batch, form.bags, form.width or 0)
    scale = None if numbers is None else numbers.reshape(shape)
    if scale is not None and _is_mean(feature, form):
        scale = rescale_dense_bags(scale)
    return HostIds(form, ids.reshape(shape), None, scale, padded)


def _dense_position(shape: tuple[int, ...], at: int) -> str:
    place = [int(i) for i in np.unravel_index(at, shape)]
    words = [f"example {place[0]}"]
    if len(place) > 2:
        words.append(f"bag {place[1] if len(place) == 3 else tuple(place[1:-1])}")
    if len(place) > 1:
        words.append(f"position {place[-1]}")
    return ", ".join(words)


def _first_columns(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    missing = length - array.shape[1]
    if missing > 0:
        return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)
    return array[:, :length]


# -- sparse and ragged ---------------------------------------------------------------------------


def _sparse(feature: FeatureRules, ids: SparseIds, weights: Any) -> HostIds:
    check_dtype(feature, ids.values)
    shape, indices = ids.dense_shape, ids.indices
    _check_coordinates(feature, ids)
    if feature.length and len(shape) != 2:
        raise feature.error(expected="a sequence's dense_shape as (B, H)", got=f"{shape}")
    feature.check_output_shape(shape[:-1])
    bags = indices[:, 0].astype(np.int64)
    for size, column in zip(shape[1:-1], indices.T[1:-1], strict=True):
        bags = bags * size + column
    columns = indices[:, -1].astype(np.int64)  # differences of unsigned numbers are never negative
    order = (np.diff(bags) > 0) | ((np.diff(bags) == 0) & (np.diff(columns) > 0))
    if not order.all():
        entry = int(np.argmin(order))
        got = f"{indices[entry].tolist()} before {indices[entry + 1].tolist()}"
        raise feature.error(
            expected="SparseIds.indices sorted by row, then column, none twice",
            got=got,
            remedy="SparseIds.from_scipy sorts",
        )
    numbers = weights_of.beside_sparse(feature.path, feature.config.table.dtype, ids, weights)

    def where(at: int) -> str:
        bag = tuple(indices[at, 1:-1].tolist())
        words = f", bag {bag[0] if len(bag) == 1 else bag}" if bag else ""
        return f"example {indices[at, 0]}{words}, position {indices[at, -1]}"

    if feature.length:
        form = FeatureShape(shape[0], (feature.length,), False, None, numbers is not None)
        keep = columns < feature.length
        return _flat(
            feature, form, ids.values, bags * feature.length + columns, numbers, where, keep
        )
    form = FeatureShape(shape[0], shape[1:-1], True, None, numbers is not None)
    return _flat(feature, form, ids.values, bags, numbers, where, None)


def _check_coordinates(feature: FeatureRules, ids: SparseIds) -> None:
    shape, indices, n = ids.dense_shape, ids.indices, ids.values.size
    if len(shape) < 2:
        raise feature.error(expected="SparseIds.dense_shape (B, H) or longer", got=f"{shape}")
    if ids.values.ndim != 1:
        raise feature.error(expected="SparseIds.values [N]", got=f"shape {ids.values.shape}")
    if indices.shape != (n, len(shape)) or indices.dtype.kind not in "iu":
        raise feature.error(
            expected=f"SparseIds.indices [{n}, {len(shape)}] of integers",
            got=f"{indices.dtype} of shape {indices.shape}",
        )
    outside = (indices < 0).any(axis=1) | (indices >= np.asarray(shape)).any(axis=1)
    if outside.any():
        got = f"{indices[np.argmax(outside)].tolist()}"
        raise feature.error(expected=f"SparseIds.indices inside dense_shape {shape}", got=got)


def _ragged(feature: FeatureRules, ids: RaggedIds, weights: Any) -> HostIds:
    check_dtype(feature, ids.values)
    lengths = _row_lengths(feature, ids)
    rows, n = len(lengths), ids.values.size
    numbers = weights_of.beside_ragged(feature.path, feature.config.table.dtype, ids, weights)
    batch, inner, first = _ragged_shape(feature, rows)
    row = np.repeat(np.arange(rows, dtype=np.int32), lengths)

    def where(at: int) -> str:
        word = "example" if batch == rows else "row"
        return f"{word} {row[at]}, position {at - int(ids.row_splits[row[at]])}"

    form = FeatureShape(batch, inner, not first, None, numbers is not None)
    if not first:
        return _flat(feature, form, ids.values, row, numbers, where, None)
    position = np.arange(n) - np.repeat(ids.row_splits[:-1].astype(np.int64), lengths)
    keep = position < first if n and int(lengths.max()) > first else None
    bags = row * np.int64(first) + position
    return _flat(feature, form, ids.values, bags, numbers, where, keep)


def _row_lengths(feature: FeatureRules, ids: RaggedIds) -> np.ndarray:
    splits, n = ids.row_splits, ids.values.size
    if ids.values.ndim != 1:
        raise feature.error(expected="RaggedIds.values [N]", got=f"shape {ids.values.shape}")
    if splits.ndim != 1 or not splits.size or splits.dtype.kind not in "iu":
        got = f"{splits.dtype} of shape {splits.shape}"
        raise feature.error(expected="RaggedIds.row_splits [B + 1] of integers", got=got)
    lengths = np.diff(splits.astype(np.int64, copy=False))
    if splits[0] != 0 or splits[-1] != n or (lengths < 0).any():
        raise feature.error(
            expected=f"RaggedIds.row_splits that rise from 0 to {n}",
            got=np.array2string(splits, threshold=8, edgeitems=3),
        )
    return lengths


def _ragged_shape(feature: FeatureRules, rows: int) -> tuple[int, tuple[int, ...], int]:
    """Return (B, inner, k): k ids a row that keep their own place, 0 where rows are combined."""
    if feature.length:
        return rows, (feature.length,), feature.length
    shape = feature.config.output_shape
    if shape is None:
        return rows, (), 0
    product = math.prod(shape)
    if not rows or product % rows:
        raise feature.error(
            expected=f"output_shape with a product of R or kR for {rows} rows",
            got=f"{shape}, product {product}",
        )
    return shape[0], shape[1:], 0 if product == rows else product // rows


def _flat(
    feature: FeatureRules,
    form: FeatureShape,
    ids: np.ndarray,
    bags: np.ndarray,
    weights: np.ndarray | None,
    where: Callable[[int], str],
    keep: np.ndarray | None,
) -> HostIds:
    """Resolve bad ids, then leave out what `keep` [N] or the policy does not keep."""
    if form.batch * form.bags > _INT32_MAX:
        got = f"{form.batch} x {form.bags}"
        raise feature.error(expected=f"at most {_INT32_MAX} bags in a batch", got=got)
    ids, valid = resolve_flat(feature, ids, where)
    if keep is not None and valid is not None:
        keep = keep & valid
    elif keep is None:
        keep = valid
    if keep is not None:
        ids, bags = ids[keep], bags[keep]
        weights = None if weights is None else weights[keep]
    if weights is not None and _is_mean(feature, form):
        weights = rescale_flat_bags(weights, bags)
    return HostIds(form, ids, bags.astype(np.int32, copy=False), weights, padded=False)


def _is_mean(feature: FeatureRules, form: FeatureShape) -> bool:
    """Tell whether the weights of a bag may be multiplied by one number."""
    return form.combines and feature.config.table.combiner != "sum"
