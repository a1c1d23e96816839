"""A training step of features in plain float64 loops, around those of `tpu_embed.check.oracle`.

Features may be any objects with the attributes of a `FeatureConfig` (and its `table` those of a
`TableConfig`); ids are arrays, or objects with the attributes of `SparseIds` or `RaggedIds`.
Everything starts from one interpretation of the inputs, `read`: which rows are in which bag, in
which order, with which weight. Neither file shares code with the library.
"""

import itertools
import math
from collections import namedtuple

import numpy as np

from tpu_embed.check.oracle import Bags, gains, summed, terms, update
from tpu_embed.check.oracle import lookup as bag_sums
from tpu_embed.check.oracle import row_gradients as bag_gradients

__all__ = ["gains", "lookup", "read", "row_gradients", "summed", "terms", "train_step"]


Occurrence = namedtuple("Occurrence", "table row gradient example")
"""One lookup of one row: its gradient [D], and the example that it belongs to."""


def read(feature, ids, weights=None):
    """Return the bags of one feature; a bad id raises under "error"."""
    ids = ids if hasattr(ids, "values") else np.asarray(ids)
    shape, entries = _entries(ids, weights)
    first, declared = feature.max_sequence_length, feature.output_shape
    if first:
        shape = (shape[0], first)
    elif hasattr(ids, "row_splits") and declared is not None:
        # Rows that do not fill the declared shape one by one give their first ids each.
        first = 0 if math.prod(declared) == shape[0] else math.prod(declared) // shape[0]
        shape = tuple(declared)
    bags = [[] for _ in range(math.prod(shape))]
    for bag, position, number, weight in entries:
        row = _resolve(feature, number)
        if row is not None and (not first or position < first):
            bags[bag * first + position if first else bag].append((row, weight))
    combines = not first and getattr(ids, "ndim", 2) > 1
    return Bags(bags, feature.table.combiner if combines else None, shape)


def _entries(ids, weights):
    """Return the shape of the bags; and bag, position, number and weight of each id in turn."""
    padding = None
    if hasattr(ids, "row_splits"):
        splits, numbers = [int(s) for s in ids.row_splits], ids.values
        rows = enumerate(itertools.pairwise(splits))
        places = [(bag, at) for bag, (begin, end) in rows for at in range(end - begin)]
        shape = (len(splits) - 1,)
    elif hasattr(ids, "dense_shape"):
        shape, numbers = tuple(ids.dense_shape)[:-1], ids.values
        indices = [tuple(map(int, place)) for place in np.asarray(ids.indices)]
        places = [(int(np.ravel_multi_index(at[:-1], shape)), at[-1]) for at in indices]
    else:
        shape, padding = ids.shape[: max(1, ids.ndim - 1)], -1
        numbers, width = ids.reshape(-1), ids.shape[-1] if ids.ndim > 1 else 1
        places = [divmod(n, width) for n in range(ids.size)]
    if getattr(ids, "weights", None) is not None:
        weights = ids.weights
    weights = getattr(weights, "values", weights)
    weights = np.ones(len(places)) if weights is None else np.ravel(np.asarray(weights))
    every = zip(places, numbers, weights, strict=True)
    return shape, [(*at, int(n), float(weight)) for at, n, weight in every if n != padding]


def _resolve(feature, number):
    inside = min(max(number, 0), feature.table.vocabulary_size - 1)
    if inside != number and feature.on_bad_id == "error":
        raise ValueError(f"bad id {number}")
    return inside if inside == number or feature.on_bad_id == "clip" else None


def quantize(row, config):
    """Return rows on their grid of `num_buckets` values."""
    if config is None:
        return row
    steps = (config.num_buckets - 1) / (config.upper - config.lower)
    clipped = np.minimum(np.maximum(row, config.lower), config.upper)
    return np.floor((clipped - config.lower) * steps + 0.5) / steps + config.lower


def lookup(table, feature, ids, weights=None):
    """Return the activation of one feature, float64.

    `table` [V, D]; the result is [B, D], [B, K, …, D] or [B, L, D].
    """
    rows = quantize(np.asarray(table, np.float64), feature.table.quantization_config)
    return bag_sums(rows, read(feature, ids, weights))


def row_gradients(features, gradients, blocks=8, replicas=1):
    """Return every lookup of every row with its gradient, in the order of sums.

    The order is by block ⌊e · blocks / B⌋ for example e of a feature of B examples, then feature,
    then example, then inner bag, then position; where replicas do not divide the blocks, those of a
    replica come together. `features` lists (feature, ids) or (feature, ids,
    weights). `gradients` has the gradients of the activations in the same order, None for zeros.
    Untrainable tables are left out.
    """
    found = []
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


def train_step(tables, slots, features, gradients, *, optimizers, step, apply, **order):
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
      order: blocks and replicas, as for `row_gradients`.
    """
    occurrences = row_gradients(features, gradients, **order)
    new_tables, new_slots = dict(tables), dict(slots)
    for config, (name, hyper, rate) in optimizers.items():

        def rule(row, own, gradient, t, name=name, hyper=hyper, rate=rate):
            return apply(name, hyper, row, own, gradient, t, rate)

        found = [(o.row, o.gradient) for o in occurrences if o.table is config]
        if not hyper.get("lazy_adam", True):
            found += [(row, np.zeros(config.dim)) for row in range(config.vocabulary_size)]
        if hyper.get("use_gradient_accumulation", True):
            found = summed(found).items()
        updated = update(tables[config], slots[config], found, rule, step)
        new_tables[config], new_slots[config] = updated
    return new_tables, new_slots
