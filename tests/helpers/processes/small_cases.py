"""Two small trainings whose rows move between steps, for one process or for two."""

import jax
import numpy as np
from process_cases import mesh, part

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o

DEVICES, STEPS = 2, 5


def train_living():
    """Train keys of which some lose their rows; return keys, rows and values."""
    rules = DynamicVocabulary()
    made, state = _train(TableConfig(12, 2, name="t", vocabulary=rules), 2**40 + 3)
    keys, rows = made.vocabularies.keys("t")
    return keys, rows, made.rows(state, "t", keys=keys), made.vocabularies.counters


def train_hosted():
    """Train more ids than the devices hold; return all rows, and how many came from home."""
    storage = HostStorage(device_rows=16, groups=2)
    made, state = _train(TableConfig(30, 2, name="t", storage=storage), 1)
    made.storage.flush()
    return made.rows(state, "t", np.arange(30)), made.storage.counters["t"]["brought"]


def _train(table, factor):
    """Train a table on ids that drift with the step; return the engine and the state."""
    made = tpu_embed.EmbeddingEngine(FeatureConfig(table), o.SGD(0.5), mesh=mesh(DEVICES))
    state = made.init(jax.random.key(3))
    for step in range(STEPS):
        ids = (np.arange(8) + 5 * step) % 23 * factor
        state, batch = made.admit(state, made.place(part(ids)))
        gradients = jax.tree.map(lambda a: 2 * a + 1, made.lookup(state, batch))
        state = made.update_in_place(state, batch, gradients)
    return made, state
