"""The oracle: a training step in plain float64 loops, sharing no code with the library.

Features may be any objects with the attributes of a `FeatureConfig` (and its `table` those of a
`TableConfig`); ids are arrays, or objects with the attributes of `SparseIds` or `RaggedIds`.
Everything starts from one interpretation of the inputs, `read`: which rows are in which bag, in
which order, with which weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np


@dataclasses.dataclass
class Entry:
    """One id that is kept: a row of the table, and its weight in the combiner."""

    row: int
    weight: float


@dataclasses.dataclass
class Reading:
    """The bags of one feature, in row-major order of `shape`, the activation's shape without D."""

    shape: tuple[int, ...]
    combines: bool
    bags: list[list[Entry]]


@dataclasses.dataclass
class Occurrence:
    """One lookup of one row: its gradient [D], and the example that it belongs to."""

    table: object
    row: int
    gradient: np.ndarray
    example: int


def read(feature, ids, weights=None) -> Reading:
    """Read the ids of one feature; a bad id raises under "error"."""
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


def _read_dense(feature, ids: np.ndarray, weights) -> Reading:
    length = feature.max_sequence_length
    if ids.ndim == 1:
        shape = ids.shape
    elif length:
        shape = (ids.shape[0], length)
    else:
        shape = ids.shape[:-1]
    bags: list[list[Entry]] = [[] for _ in range(math.prod(shape))]
    for place in itertools.product(*map(range, ids.shape)):
        number = int(ids[place])
        row = None if number == -1 else _resolve(feature, number)
        if row is None:
            continue
        weight = 1.0 if weights is None else float(np.asarray(weights)[place])
        if ids.ndim == 1:
            bags[place[0]].append(Entry(row, weight))
        elif not length:
            bags[int(np.ravel_multi_index(place[:-1], shape))].append(Entry(row, weight))
        elif place[1] < length:
            bags[place[0] * length + place[1]].append(Entry(row, weight))
    return Reading(shape, ids.ndim > 1 and not length, bags)


def _read_sparse(feature, ids, weights: list[float]) -> Reading:
    length = feature.max_sequence_length
    full = tuple(ids.dense_shape)
    shape = (full[0], length) if length else full[:-1]
    bags: list[list[Entry]] = [[] for _ in range(math.prod(shape))]
    for place, number, weight in zip(np.asarray(ids.indices), ids.values, weights, strict=True):
        row = _resolve(feature, int(number))
        if row is None:
            continue
        if not length:
            bags[int(np.ravel_multi_index(tuple(place[:-1]), shape))].append(Entry(row, weight))
        elif place[1] < length:
            bags[int(place[0]) * length + int(place[1])].append(Entry(row, weight))
    return Reading(shape, not length, bags)


def _read_ragged(feature, ids, weights: list[float]) -> Reading:
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
    bags: list[list[Entry]] = [[] for _ in range(math.prod(shape))]
    for i in range(rows):
        for position, n in enumerate(range(splits[i], splits[i + 1])):
            row = _resolve(feature, int(ids.values[n]))
            if row is None:
                continue
            if not first:
                bags[i].append(Entry(row, weights[n]))
            elif position < first:
                bags[i * first + position].append(Entry(row, weights[n]))
    return Reading(shape, not first, bags)


def gains(combiner: str, combines: bool, weights: list[float]) -> list[float]:
    """Return the factor of each row in a bag."""
    if not combines or combiner == "sum":
        return weights
    if combiner == "mean":
        total = math.fsum(weights)
    else:
        total = math.sqrt(math.fsum(w * w for w in weights))
    return [w / total if total else 0.0 for w in weights]


def quantize(row: np.ndarray, config) -> np.ndarray:
    """Return a row on its grid of `num_buckets` values."""
    if config is None:
        return row
    steps = (config.num_buckets - 1) / (config.upper - config.lower)
    clipped = np.minimum(np.maximum(row, config.lower), config.upper)
    return np.floor((clipped - config.lower) * steps + 0.5) / steps + config.lower


def lookup(table: np.ndarray, feature, ids, weights=None) -> np.ndarray:
    """Return the activation of one feature, float64.

    `table` [V, D]; the result is [B, D], [B, K, …, D] or [B, L, D].
    """
    table = np.asarray(table, np.float64)
    reading = read(feature, ids, weights)
    out = np.zeros((len(reading.bags), table.shape[1]))
    for b, bag in enumerate(reading.bags):
        factors = gains(feature.table.combiner, reading.combines, [e.weight for e in bag])
        for entry, gain in zip(bag, factors, strict=True):
            out[b] += gain * quantize(table[entry.row], feature.table.quantization_config)
    return out.reshape(*reading.shape, table.shape[1])


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
        shape = (len(reading.bags), feature.table.dim)
        flat = (
            np.zeros(shape) if gradient is None else np.asarray(gradient, np.float64).reshape(shape)
        )
        per_example = math.prod(reading.shape[1:])
        for b, bag in enumerate(reading.bags):
            factors = gains(feature.table.combiner, reading.combines, [e.weight for e in bag])
            for entry, gain in zip(bag, factors, strict=True):
                example = b // per_example
                occurrence = Occurrence(feature.table, entry.row, gain * flat[b], example)
                place = [example * parts // reading.shape[0] for parts in (replicas, blocks)]
                found.append((tuple(place), occurrence))
    found.sort(key=lambda pair: pair[0])  # stable: features, bags and positions keep their order
    return [occurrence for _, occurrence in found]


def summed(occurrences: list[Occurrence], table) -> dict[int, np.ndarray]:
    """Return touched row -> sum of its gradients, for one table, in order of first appearance."""
    sums: dict[int, np.ndarray] = {}
    for o in occurrences:
        if o.table is table:
            sums[o.row] = sums.get(o.row, np.zeros_like(o.gradient)) + o.gradient
    return sums


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
    new_tables = {config: np.array(table, np.float64) for config, table in tables.items()}
    new_slots = {
        config: {name: np.array(slot, np.float64) for name, slot in named.items()}
        for config, named in slots.items()
    }
    for config, (name, hyper, rate) in optimizers.items():
        for row, gradient in _row_updates(config, hyper, occurrences):
            old = {slot: values[row] for slot, values in new_slots[config].items()}
            weights = new_tables[config][row]
            weights, changed = apply(name, hyper, weights, old, gradient, step, rate)
            new_tables[config][row] = weights
            for slot, value in changed.items():
                new_slots[config][slot][row] = value
    return new_tables, new_slots


def _row_updates(config, hyper, occurrences: list[Occurrence]) -> list[tuple[int, np.ndarray]]:
    if not hyper.get("use_gradient_accumulation", True):
        return [(o.row, o.gradient) for o in occurrences if o.table is config]
    sums = summed(occurrences, config)
    if not hyper.get("lazy_adam", True):
        zero = np.zeros(config.dim)
        return [(row, sums.get(row, zero)) for row in range(config.vocabulary_size)]
    return list(sums.items())
