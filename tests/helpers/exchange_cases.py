"""Random steps with the exchange in bfloat16, and what they do as NumPy loops in float32.

Bags are weighted sums, and the rule is SGD with a rate of a power of two, so that products and sums
are rounded one by one, in the order that the guide promises: the library has to have the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers

RATE = np.float32(0.5)
STEPS = 2


@dataclasses.dataclass
class Use:
    """One feature in one batch: ids and weights `[B, H]`, gradients `[B, D]`, or `[B, H, D]`."""

    ids: np.ndarray
    weights: np.ndarray
    gradients: np.ndarray
    sequence: bool


@dataclasses.dataclass
class Case:
    """Tables by name, the table of each feature, and the uses of all features in each step."""

    tables: dict[str, TableConfig]
    features: dict[str, FeatureConfig]
    blocks: int
    steps: list[dict[str, Use]]


def rounded(x):
    """Return float32 numbers rounded to bfloat16, to nearest even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def draw(seed, rows=None, **table_options):
    """Return a random case; its rows occur in many blocks.

    Args:
      seed: of the case.
      rows: of the table "items".
      table_options: of the table "items".
    """
    rng = np.random.default_rng(seed)
    dim = int(rng.choice([1, 3, 8, 17, 40]))
    items: Any = {"placement": str(rng.choice(["mod", "div"])), "combiner": "sum"} | table_options
    tables = {
        "items": TableConfig(rows or int(rng.integers(3, 40)), dim, name="items", **items),
        "flags": TableConfig(6, dim, combiner="sum", name="flags", placement="replicated"),
        "words": TableConfig(23, dim + 1, combiner="sum", name="words", dtype="bfloat16"),
    }
    features, steps = {}, [{} for _ in range(STEPS)]
    for number, table in enumerate(["items", "items", "flags", "words"]):
        name, hot = f"f{number}", int(rng.integers(1, 6))
        sequence = bool(rng.random() < 0.3)
        features[name] = FeatureConfig(tables[table], hot if sequence else 0)
        size = 8 * int(rng.integers(1, 4))
        for step in steps:
            step[name] = _use(rng, tables[table], (size, hot), sequence)
    return Case(tables, features, int(rng.choice([8, 8, 16])), steps)


def _use(rng, table, shape, sequence):
    ids = rng.integers(-1, table.vocabulary_size, shape)
    weights = rng.normal(size=shape).astype(np.float32)
    lead = shape if sequence else shape[:1]
    gradients = rng.normal(size=(*lead, table.dim)).astype(np.float32)
    return Use(ids, weights, gradients, sequence)


def expected(case, tables):
    """Return the activations of the last step, and the tables after it, by NumPy loops.

    Args:
      case: the case.
      tables: the first rows of each table, `[V, D]` by name.
    """
    tables = {name: np.asarray(table, np.float32) for name, table in tables.items()}
    found = {}
    for step in case.steps:
        for name, use in step.items():
            config = case.features[name].table
            found[name] = _looked_up(tables[config.name], use, config)
        for name, config in case.tables.items():
            uses = [use for f, use in sorted(step.items()) if case.features[f].table is config]
            tables[name] = _stepped(tables[name], uses, config, case.blocks)
    return found, tables


def _looked_up(table, use, config):
    rows = table if config.placement == "replicated" else rounded(table)
    found = np.zeros_like(use.gradients)
    for (example, place), row in np.ndenumerate(use.ids):
        if row >= 0:
            at = (example, place) if use.sequence else example
            found[at] = found[at] + rows[row] * use.weights[example, place]
    return found


def _stepped(table, uses, config, blocks):
    """Return a table after one step: partial sums by row and block, then their sums in order."""
    order = sorted(
        (example * blocks // len(use.ids), f, example, place, int(row))
        for f, use in enumerate(uses)
        for (example, place), row in np.ndenumerate(use.ids)
        if row >= 0
    )
    partials = {}
    for block, f, example, place, row in order:
        use = uses[f]
        gradient = use.gradients[(example, place) if use.sequence else example]
        of_row = partials.setdefault(row, {})
        so_far = of_row.get(block, np.zeros(config.dim, np.float32))
        of_row[block] = so_far + gradient * use.weights[example, place]
    new = table.copy()
    for row, of_row in partials.items():
        total = np.zeros(config.dim, np.float32)
        for block in sorted(of_row):
            exact = config.placement == "replicated"
            total = total + (of_row[block] if exact else rounded(of_row[block]))
        new[row] = table[row] - RATE * total
    return rounded(new) if config.dtype == "bfloat16" else new


def make_engine(case, devices, **options):
    """Return an engine of a case on some devices."""
    chosen = {"exchange_dtype": "bfloat16", "mesh": mesh(devices), "sum_blocks": case.blocks}
    return EmbeddingEngine(case.features, optimizers.SGD(float(RATE)), **chosen | options)


def arrays(step):
    """Return ids, weights and gradients of a step, each by feature."""
    return tuple(
        {name: getattr(use, field) for name, use in step.items()}
        for field in ("ids", "weights", "gradients")
    )


def run(engine, case, *, traced=False):
    """Return the activations of the last step, and the tables after it.

    Args:
      engine: of the case.
      case: the case.
      traced: whether ids and weights are traced in a jit, or placed.
    """
    state, found = engine.init(jax.random.key(0)), None

    @jax.jit
    def in_jit(state, ids, weights, gradients):
        found = engine.lookup(state, ids, weights)
        return found, engine.update(state, ids, gradients, weights)

    for step in case.steps:
        ids, weights, gradients = arrays(step)
        if traced:
            found, state = in_jit(state, ids, weights, gradients)
        else:
            batch = engine.place(ids, weights)
            found = engine.lookup(state, batch)
            state = engine.update_in_place(state, batch, gradients)
    return on_host((found, engine.tables(state)))


def on_host(tree):
    """Return arrays as float32 on the host."""
    return jax.tree.map(lambda array: np.asarray(array).astype(np.float32), tree)


def check(engine, case, *, traced=False):
    """Check that a run has the bits of the NumPy loops.

    Bags of traced ids may be added shard by shard, so activations are within rounding then.
    """
    first = on_host(engine.tables(engine.init(jax.random.key(0))))
    (found, tables), (activations, rows) = run(engine, case, traced=traced), expected(case, first)
    jax.tree.map(np.testing.assert_array_equal, tables, rows)
    near = 1e-6 if traced else 0
    for name, values in activations.items():
        np.testing.assert_allclose(found[name], values, rtol=near, atol=near)
