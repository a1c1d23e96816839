"""A table on the host that is trained while it is interrupted, and the files of the package."""

from pathlib import Path

import jax
import numpy as np

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig

ROWS, BATCH = 40, 4


def features(storage):
    drawn = jax.nn.initializers.normal()
    table = TableConfig(ROWS, 2, drawn, name="items", storage=storage)
    return FeatureConfig(table)


def ids_of(step):
    return np.random.default_rng(step).integers(0, ROWS, BATCH)


def in_files(*names):
    """Return a predicate: whether code is in one of these files of the package."""
    for name in names:
        assert (Path(tpu_embed.__file__).parent / f"{name}.py").is_file(), name
    return lambda code: code.co_filename.endswith(tuple(f"tpu_embed/{name}.py" for name in names))


HOMES = ("storage/homes", "storage/host_rows", "core/layout/arrivals")
ADMITTING = ("core/engine/admitter", "core/state/new_rows")


def rows_of(engine, state):
    """Return all rows and slots of the table, wherever they are."""
    return [engine.rows(state, "items", np.arange(ROWS), slot=s) for s in (None, "accumulators")]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
