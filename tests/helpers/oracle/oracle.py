"""A training step of features in plain float64 loops, around those of `tpu_embed.check.oracle`.

Features may be any objects with the attributes of a `FeatureConfig` (and its `table` those of a
`TableConfig`); ids are arrays, or objects with the attributes of `SparseIds` or `RaggedIds`.
Everything starts from one interpretation of the inputs, `read`: which rows are in which bag, in
which order, with which weight. Neither file shares code with the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tpu_embed.check.oracle import Bags, gains, summed, terms, update
from tpu_embed.check.oracle import lookup as bag_sums
from tpu_embed.check.oracle import row_gradients as bag_gradients

__all__ = ["gains", "lookup", "read", "row_gradients", "summed", "terms", "train_step"]


@dataclasses.dataclass
class Occurrence:
    """One lookup of one row: its gradient [D], and the example that it belongs to."""

    table: object
    row: int
    gradient: np.ndarray
    example: int


def read(feature, ids, weights=None) -> Bags:
    """Return the bags of one feature; a bad id raises under "error"."""
    if hasattr(ids, "row_splits"):
        return _read_ragged(feature, ids, _flat_weights(ids, weights))
    if hasattr(ids, "dense_shape"):
        return _read_sparse(feature, ids, _flat_weights(ids, weights))
    return _read_dense(feature, np.asarray(ids), weights)


def _flat_weights(ids, weights) -> list[float]:
    if ids.weights is not None:
        weights = ids.weights
    elif weights is None:
        return [1.0] * len(ids.values)
    elif hasattr(weights, "values"):
        weights = weights.values
    return [float(w) for w in np.asarray(weights)]


def _resolve(feature, number: int) -> int | None:
    size = feature.table.vocabulary_size
    if 0 <= number < size:
        return number
    if feature.on_bad_id == "error":
        raise ValueError(f"bad id {number}")
    if feature.on_bad_id == "drop":
        return None
    return 0 if number < 0 else size - 1


def _read_dense(feature, ids: np.ndarray, weights) -> Bags:
    length = feature.max_sequence_length
    if ids.ndim == 1:
        shape = ids.shape
    elif length:
        shape = (ids.shape[0], length)
    else:
        shape = ids.shape[:-1]
    bags: list[list[tuple[int, float]]] = [[] for _ in range(math.prod(shape))]
    for place in itertools.product(*map(range, ids.shape)):
        number = int(ids[place])
        row = None if number == -1 else _resolve(feature, number)
        if row is None:
            continue
        weight = 1.0 if weights is None else float(np.asarray(weights)[place])
        if ids.ndim == 1:
            bags[place[0]].append((row, weight))
        elif not length:
            bags[int(np.ravel_multi_index(place[:-1], shape))].append((row, weight))
        elif place[1] < length:
            bags[place[0] * length + place[1]].append((row, weight))
    return Bags(bags, feature.table.combiner if ids.ndim > 1 and not length else None, shape)


def _read_sparse(feature, ids, weights: list[float]) -> Bags:
    length = feature.max_sequence_length
    full = tuple(ids.dense_shape)
    shape = (full[0], length) if length else full[:-1]
    bags: list[list[tuple[int, float]]] = [[] for _ in range(math.prod(shape))]
    for place, number, weight in zip(np.asarray(ids.indices), ids.values, weights, strict=True):
        row = _resolve(feature, int(number))
        if row is None:
            continue
        if not length:
            bags[int(np.ravel_multi_index(tuple(place[:-1]), shape))].append((row, weight))
        elif place[1] < length:
            bags[int(place[0]) * length + int(place[1])].append((row, weight))
    return Bags(bags, None if length else feature.table.combiner, shape)


def _read_ragged(feature, ids, weights: list[float]) -> Bags:
    splits = [int(s) for s in ids.row_splits]
    rows = len(splits) - 1
    if feature.max_sequence_length:
        first = feature.max_sequence_length
        shape = (rows, first)
    elif feature.output_shape is None:
        first, shape = 0, (rows,)
    else:
        shape = tuple(feature.output_shape)
        first = 0 if math.prod(shape) == rows else math.prod(shape) // rows
    bags: list[list[tuple[int, float]]] = [[] for _ in range(math.prod(shape))]
    for i in range(rows):
        for position, n in enumerate(range(splits[i], splits[i + 1])):
            row = _resolve(feature, int(ids.values[n]))
            if row is None:
                continue
            if not first:
                bags[i].append((row, weights[n]))
            elif position < first:
                bags[i * first + position].append((row, weights[n]))
    return Bags(bags, None if first else feature.table.combiner, shape)


def quantize(row: np.ndarray, config) -> np.ndarray:
    """Return rows on their grid of `num_buckets` values."""
    if config is None:
        return row
    steps = (config.num_buckets - 1) / (config.upper - config.lower)
    clipped = np.minimum(np.maximum(row, config.lower), config.upper)
    return np.floor((clipped - config.lower) * steps + 0.5) / steps + config.lower


def lookup(table: np.ndarray, feature, ids, weights=None) -> np.ndarray:
    """Return the activation of one feature, float64.

    `table` [V, D]; the result is [B, D], [B, K, …, D] or [B, L, D].
    """
    rows = quantize(np.asarray(table, np.float64), feature.table.quantization_config)
    return bag_sums(rows, read(feature, ids, weights))


def row_gradients(features, gradients, blocks=8, replicas=1) -> list[Occurrence]:
    """Return every lookup of every row with its gradient, in the order of sums.

    The order is by block ⌊e · blocks / B⌋ for example e of a feature of B examples, then feature,
    then example, then inner bag, then position; where replicas do not divide the blocks, those of a
    replica come together. `features` lists (feature, ids) or (feature, ids,
    weights). `gradients` has the gradients of the activations in the same order, None for zeros.
    Untrainable tables are left out.
    """
    found: list[tuple[tuple[int, int], Occurrence]] = []
    for item, gradient in zip(features, gradients, strict=True):
        feature, ids, weights = (*item, None)[:3]
        if not feature.table.trainable:
            continue
        reading = read(feature, ids, weights)
        if gradient is None:
            gradient = np.zeros((*reading.shape, feature.table.dim))
        per_example = math.prod(reading.shape[1:])
        for b, row, of_row in bag_gradients(reading, gradient):
            example = b // per_example
            place = [example * parts // reading.shape[0] for parts in (replicas, blocks)]
            found.append((tuple(place), Occurrence(feature.table, row, of_row, example)))
    found.sort(key=lambda pair: pair[0])  # stable: features, bags and positions keep their order
    return [occurrence for _, occurrence in found]


def train_step(
    tables, slots, features, gradients, *, optimizers, step, apply, blocks=8, replicas=1
):
    """Return (tables, slots) after one update.

    Args:
      tables: table config -> [V, D].
      slots: table config -> {slot name: [V, …]}.
      features: as for `row_gradients`.
      gradients: as for `row_gradients`.
      optimizers: table config -> (rule name, hyperparameters, learning rate).
      step: t, which is 1 for the first update.
      apply: `(name, hyper, row, slots, gradient, t, lr) -> (row, slots)`, for
        example `oracle_rules.apply`.
      blocks, replicas: as for `row_gradients`.
    """
    occurrences = row_gradients(features, gradients, blocks, replicas)
    new_tables, new_slots = dict(tables), dict(slots)
    for config, (name, hyper, rate) in optimizers.items():

        def rule(row, own, gradient, t, name=name, hyper=hyper, rate=rate):
            return apply(name, hyper, row, own, gradient, t, rate)

        found = _row_updates(config, hyper, occurrences)
        updated = update(tables[config], slots[config], found, rule, step)
        new_tables[config], new_slots[config] = updated
    return new_tables, new_slots


def _row_updates(config, hyper, occurrences: list[Occurrence]) -> list[tuple[int, np.ndarray]]:
    mine = [(o.row, o.gradient) for o in occurrences if o.table is config]
    if not hyper.get("use_gradient_accumulation", True):
        return mine
    sums = summed(mine)
    if not hyper.get("lazy_adam", True):
        zero = np.zeros(config.dim)
        return [(row, sums.get(row, zero)) for row in range(config.vocabulary_size)]
    return list(sums.items())
