"""Random batches: ids in every input container, weights, and gradients of the activations.

`draw_form` chooses what stays the same over the steps of a case. `draw_step` draws the numbers of
one step: lists of leaves in the flattening order of the features.
"""

import functools
import math
from collections import namedtuple

import ml_dtypes
import numpy as np
from random_optimizers import choose

from tpu_embed import RaggedIds, SparseIds

DENSE = ("one", "bag", "bag", "bags", "sequence")
KINDS = (*DENSE, "sparse", "sparse bags", "sparse sequence")
KINDS += ("ragged", "ragged", "ragged rows", "ragged first", "ragged sequence")
WIDTHS = (0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 13)
DTYPES = ("int8", "int16", "int32", "int64", "int64", "uint8", "uint16", "uint32", "uint64")
EXTREMES = (1e-30, 1e-21, 1e-3, 1.0, 5e19, 1e30)
"""Weights for mean and sqrtn whose squares or quotients overflow in float32."""


class Form(namedtuple("Form", "kind rows inner width shape length output_shape weights values")):
    """How the ids of a feature are given.

    Attributes:
      kind: one of `KINDS`.
      rows: the number of bags: B, or B · K ragged rows that fill `output_shape`.
      inner: for dense and sparse bags, the dimensions between B and H.
      width: H; for ragged ids, the length of the longest row.
      shape: the shape of the activation without D.
      length: L of a sequence, else 0.
      output_shape: the declared one, or None.
      weights: "none", "inside", "array" or "container" (the last two beside the ids).
      values: which weights there are; see `_draw_weights`.
    """


class Step(namedtuple("Step", "ids weights gradients spoilt")):
    """One batch: leaves in flattening order.

    `weights` is None if no feature has weights beside its ids; a gradient is None for zeros;
    `spoilt` is the number of a feature whose gradient is not finite.
    """


def draw_form(rng, batch, dense):
    """Return a random form for `batch` examples."""
    kind = choose(rng, DENSE if dense else KINDS)
    inner, rows, length, width = (), batch, 0, choose(rng, WIDTHS)
    if kind.endswith("bags"):
        inner = choose(rng, ((1,), (2,), (3,), (2, 2)))
    if kind == "ragged rows":
        inner = choose(rng, ((2,), (3,), (2, 2)))
        rows = batch * math.prod(inner)
    if kind == "ragged first":
        each, first = int(rng.integers(1, 3)), int(rng.integers(2, 4))
        inner, rows = choose(rng, ((each, first), (each * first,))), batch * each
    if kind.endswith("sequence"):
        length = int(rng.integers(1, 5))
    shape = (batch, length) if length else (batch, *inner)
    declared = kind in ("ragged rows", "ragged first") or (not length and rng.random() < 0.2)
    places = ["none", "none", "array"]
    if kind not in DENSE:
        places += ["inside", "container"]
    weights = "none" if kind == "one" else choose(rng, places)
    values = choose(rng, ("quarters", "positive", "integers", "zeros and ones"))
    output_shape = shape if declared else None
    return Form(kind, rows, inner, width, shape, length, output_shape, weights, values)


class BadIds(namedtuple("BadIds", "under_error wide")):
    """Which ids outside of [0, V) may occur.

    Attributes:
      under_error: also where `on_bad_id="error"`: inside a jit they are dropped and counted.
      wide: also those beyond int32, which JAX itself cuts to 32 bits on their way into a jit.
    """


def draw_step(rng, features, bad, may_skip):
    """Return a random step.

    Args:
      rng: a NumPy Generator.
      features: pairs of `FeatureConfig` and `Form`, in flattening order.
      bad: which ids outside of the vocabulary may occur.
      may_skip: whether a gradient may be NaN or infinite.
    """
    ids, weights = zip(*(_draw_ids(rng, *pair, bad) for pair in features), strict=True)
    gradients = [_draw_gradient(rng, form.shape, feature.table.dim) for feature, form in features]
    spoilt = None
    if may_skip and rng.random() < 0.3:
        spoilt = choose(rng, [f for f, g in enumerate(gradients) if g is not None] or [None])
    if spoilt is not None:
        place = tuple(int(rng.integers(n)) for n in gradients[spoilt].shape)
        gradients[spoilt][place] = choose(rng, (np.nan, np.inf))
    if all(leaf is None for leaf in weights) and rng.random() < 0.5:
        weights = None
    return Step(list(ids), weights and list(weights), gradients, spoilt)


def _laid_out(rng, array):
    """Return the same numbers, perhaps in another memory layout or byte order, or read-only."""
    kind = choose(rng, ("plain", "plain", "plain", "columns first", "strided", "swapped", "locked"))
    if kind == "columns first":
        return np.asfortranarray(array)
    if kind == "strided":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if kind == "swapped":
        return array.astype(array.dtype.newbyteorder())
    array.flags.writeable = kind != "locked"
    return array


def _draw_gradient(rng, shape, dim):
    if rng.random() < 0.15:
        return None
    scale = choose(rng, (1.0, 1.0, 0.0, 2.0**-6, 8.0))
    dtype = choose(rng, (np.float32, np.float32, np.float32, ml_dtypes.bfloat16))
    return (scale * rng.normal(size=(*shape, dim))).astype(dtype)


def _draw_ids(rng, feature, form, bad):
    """Return the ids of a feature, and the weights beside them."""
    sparse = _draw_sparse if form.kind.startswith("sparse") else _draw_ragged
    return (_draw_dense if form.kind in DENSE else sparse)(rng, feature, form, bad)


def _draw_numbers(rng, feature, count, bad, *, padding):
    """Return `count` ids in a random dtype, from few values, so that duplicates are common."""
    size = feature.table.vocabulary_size
    pool = min(size, int(choose(rng, (1, 3, 10, size, size))))
    first = int(rng.integers(0, size - pool + 1))
    numbers = rng.integers(first, first + pool, count)
    if (feature.on_bad_id != "error" or bad.under_error) and rng.random() < 0.4:
        others = [size, size + 3, -2, -7, 2**31 - 1, -(2**31)]
        others += ([] if padding else [-1]) + ([2**40, -(2**40)] if bad.wide else [])
        numbers = np.where(rng.random(count) < 0.2, rng.choice(others, count), numbers)
    if padding:
        numbers = np.where(rng.random(count) < choose(rng, (0.0, 0.3, 0.9, 1.0)), -1, numbers)
    low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    dtypes = [d for d in DTYPES if np.iinfo(d).min <= low and high <= np.iinfo(d).max]
    return numbers.astype(choose(rng, dtypes))


def _draw_weights(rng, feature, form, shape):
    """Return weights; in a mean their sum is either zero or far from it, in any precision."""
    if form.values == "quarters":  # of either sign; they add exactly
        weights = rng.integers(-8, 9, shape) / 4
    elif form.values == "positive":
        weights = np.exp(3 * rng.normal(size=shape))
    elif form.values == "integers":
        return rng.integers(-2, 4, shape)
    else:
        weights = rng.integers(0, 2, shape).astype(float)
    combines = form.kind.endswith(("bag", "bags", "rows")) or form.kind in ("sparse", "ragged")
    if combines and feature.table.combiner != "sum" and rng.random() < 0.5:
        weights = rng.choice(EXTREMES, shape)
    return weights.astype(choose(rng, ("float32", "float32", "float64")))


def _draw_dense(rng, feature, form, bad):
    shape = (form.rows,) if form.kind == "one" else (form.rows, *form.inner, form.width)
    numbers = _draw_numbers(rng, feature, math.prod(shape), bad, padding=True)
    ids = _laid_out(rng, numbers.reshape(shape))
    if form.weights == "none":
        return ids, None
    return ids, _laid_out(rng, _draw_weights(rng, feature, form, shape))


def _draw_sparse(rng, feature, form, bad):
    shape = (form.rows, *form.inner, form.width)
    filled = rng.random(shape) < choose(rng, (0.0, 0.3, 0.7, 1.0))
    indices = _laid_out(rng, np.argwhere(filled).astype(choose(rng, ("int32", "int64", "uint16"))))
    ids = functools.partial(SparseIds, indices, dense_shape=shape)
    return _weighted(rng, feature, form, bad, len(indices), ids)


def _draw_ragged(rng, feature, form, bad):
    lengths = rng.integers(0, form.width + 1, form.rows)
    lengths = np.where(rng.random(form.rows) < choose(rng, (0.0, 0.3, 1.0, 0.3)), 0, lengths)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    splits = _laid_out(rng, splits.astype(choose(rng, ("int32", "int64", "uint16"))))
    ids = functools.partial(RaggedIds, row_splits=splits)
    return _weighted(rng, feature, form, bad, int(splits[-1]), ids)


def _weighted(rng, feature, form, bad, count, ids):
    """Return `ids(values)`, with weights if the form says so, and the weights beside them."""
    values = _laid_out(rng, _draw_numbers(rng, feature, count, bad, padding=False))
    weights = _laid_out(rng, _draw_weights(rng, feature, form, values.shape))
    if form.weights == "inside":
        return ids(values, weights=weights), None
    return ids(values), {"none": None, "array": weights, "container": ids(weights)}[form.weights]
