"""Random steps with the exchange in bfloat16, and what they do as NumPy loops in float32.

Bags are weighted sums, and the rule is SGD with a rate of a power of two, so that products and sums
are rounded one by one, in the order that the guide promises: the library has to have the same bits.
"""

import dataclasses

import jax
import numpy as np
from facade_cases import mesh
from update_cases import to_bfloat16 as rounded

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers

RATE = np.float32(0.5)
STEPS = 2


@dataclasses.dataclass
class Case:
    """Tables and features by name; and of each step ids, weights and gradients by feature."""

    tables: dict
    features: dict
    blocks: int
    steps: list


def draw(seed, rows=None, **table_options):
    """Return a random case; its rows occur in many blocks.

    Args:
      seed: of the case.
      rows: of the table "items".
      table_options: of the table "items".
    """
    rng = np.random.default_rng(seed)
    dim = int(rng.choice([1, 3, 8, 17, 40]))
    items = {"placement": str(rng.choice(["mod", "div"])), "combiner": "sum"} | table_options
    tables = {
        "items": TableConfig(rows or int(rng.integers(3, 40)), dim, name="items", **items),
        "flags": TableConfig(6, dim, combiner="sum", name="flags", placement="replicated"),
        "words": TableConfig(23, dim + 1, combiner="sum", name="words", dtype="bfloat16"),
    }
    features, steps = {}, [({}, {}, {}) for _ in range(STEPS)]
    for number, table in enumerate(["items", "items", "flags", "words"]):
        name, table, hot = f"f{number}", tables[table], int(rng.integers(1, 6))
        sequence = bool(rng.random() < 0.3)
        features[name] = FeatureConfig(table, hot if sequence else 0)
        shape = (8 * int(rng.integers(1, 4)), hot)
        for ids, weights, gradients in steps:
            ids[name] = rng.integers(-1, table.vocabulary_size, shape)
            weights[name] = rng.normal(size=shape).astype(np.float32)
            of_rows = (*(shape if sequence else shape[:1]), table.dim)
            gradients[name] = rng.normal(size=of_rows).astype(np.float32)
    return Case(tables, features, int(rng.choice([8, 8, 16])), steps)


def _occurrences(feature, ids, weights):
    """Yield row and weight of each id that is present, and where its activation is."""
    for place, row in np.ndenumerate(ids):
        if row >= 0:
            yield row, weights[place], place if feature.max_sequence_length else place[:1]


def expected(case, tables):
    """Return the activations of the last step, and the tables after it, by NumPy loops.

    Args:
      case: the case.
      tables: the first rows of each table, `[V, D]` by name.
    """
    tables = {name: np.asarray(table, np.float32) for name, table in tables.items()}
    found = {}
    for ids, weights, gradients in case.steps:
        sums = {name: {} for name in tables}  # of each row: block -> gradient
        for name, feature in case.features.items():
            config, found[name] = feature.table, np.zeros_like(gradients[name])
            rows = tables[config.name]
            rows = rows if config.placement == "replicated" else rounded(rows)
            for row, weight, at in _occurrences(feature, ids[name], weights[name]):
                found[name][at] += rows[row] * weight
                of_row = sums[config.name].setdefault(row, {})
                block = at[0] * case.blocks // len(ids[name])
                so_far = of_row.get(block, np.zeros(config.dim, np.float32))
                of_row[block] = so_far + gradients[name][at] * weight
        for name, config in case.tables.items():
            sent = np.asarray if config.placement == "replicated" else rounded
            new = tables[name].copy()
            for row, of_row in sums[name].items():
                total = np.zeros(config.dim, np.float32)
                for block in sorted(of_row):
                    total = total + sent(of_row[block])
                new[row] -= RATE * total
            tables[name] = rounded(new) if config.dtype == "bfloat16" else new
    return found, tables


def make_engine(case, devices, **options):
    """Return an engine of a case on some devices."""
    chosen = {"exchange_dtype": "bfloat16", "mesh": mesh(devices), "sum_blocks": case.blocks}
    return EmbeddingEngine(case.features, optimizers.SGD(float(RATE)), **chosen | options)


def on_host(tree):
    """Return arrays as float32 on the host."""
    return jax.tree.map(lambda array: np.asarray(array).astype(np.float32), tree)


def check(engine, case, *, traced=False):
    """Check that a run has the bits of the NumPy loops.

    Bags of traced ids may be added shard by shard, so activations are within rounding then.

    Args:
      engine: of the case.
      case: the case.
      traced: whether ids and weights are traced in a jit, or placed.
    """

    @jax.jit
    def in_jit(state, ids, weights, gradients):
        found = engine.lookup(state, ids, weights)
        return found, engine.update(state, ids, gradients, weights)

    state = engine.init(jax.random.key(0))
    activations, rows = expected(case, on_host(engine.tables(state)))
    for ids, weights, gradients in case.steps:
        if traced:
            found, state = in_jit(state, ids, weights, gradients)
        else:
            batch = engine.place(ids, weights)
            found = engine.lookup(state, batch)
            state = engine.update_in_place(state, batch, gradients)
    jax.tree.map(np.testing.assert_array_equal, on_host(engine.tables(state)), rows)
    near = 1e-6 if traced else 0
    for name, values in activations.items():
        np.testing.assert_allclose(found[name], values, rtol=near, atol=near)
