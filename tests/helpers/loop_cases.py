"""A small model with tables of all kinds, its batches, and what a run of it leaves."""

import functools

import jax
import numpy as np
import optax
from facade_cases import mesh
from flax import nnx

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o

ROWS, KEYS, FAR, DIM, BATCH = 40, 60, 50, 2, 8
DENSE = optax.adam(0.05)


def make_engine(devices=2):
    """Return an engine of a fixed table, a living one, and one on the host."""
    living = DynamicVocabulary(admit_after=2, ttl=4)
    tables = [
        TableConfig(ROWS, DIM, name="item"),
        TableConfig(20, DIM, name="query", vocabulary=living),
        TableConfig(FAR, DIM, name="far", storage=HostStorage(device_rows=24)),
    ]
    features = {table.name: FeatureConfig(table) for table in tables}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(devices))


def plain_engine(devices=2):
    """Return an engine of one table."""
    item = TableConfig(ROWS, DIM, name="item")
    return tpu_embed.EmbeddingEngine({"item": FeatureConfig(item)}, o.SGD(0.5), mesh=mesh(devices))


class Network(nnx.Module):
    """Dropout and batch statistics: a step changes more than parameters."""

    def __init__(self, rngs):
        self.first = nnx.Linear(DIM, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, activations):
        found = sum(activations.values())  # [B, D]
        return self.dropout(self.norm(self.first(found))).sum(axis=-1)


def loss_of_network(network, activations, wanted):
    error = network(activations) - wanted
    return (error**2).mean(), {"error": abs(error).mean()}


def loss_of_tables(activations, wanted):
    return ((sum(activations.values()).sum(axis=-1) - wanted) ** 2).mean()


def batches(steps, names=("item", "query", "far")):
    """Yield batches, each of which depends on its number alone."""
    sizes = {"item": ROWS, "query": KEYS, "far": FAR}
    for number in range(steps):
        rng = np.random.default_rng(number)
        ids = {name: rng.integers(0, sizes[name], (BATCH, 2)) for name in names}
        yield ids, rng.random(BATCH, np.float32)


of_items = functools.partial(batches, names=("item",))


class Stateful:
    """The same batches, or those that `make` yields, from an iterator that knows its position."""

    def __init__(self, steps, make=batches, **options):
        self.items, self.at = list(make(steps, **options)), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def left_by(engine, report):
    """Return all that a run has trained, as arrays on the host."""
    state = report.state
    rows = [
        engine.rows(state, name, np.arange(table.vocabulary_size), slot=slot)
        for name, table in engine.table_configs.items()
        for slot in (None, "accumulators")
    ]
    model = getattr(report, "model", None)
    values = nnx.state(model) if isinstance(model, nnx.Module) else model
    leaves = jax.tree.leaves((rows, engine.vocabularies.held("query"), values, state.step))
    return [on_host(leaf) for leaf in leaves]


def on_host(leaf):
    """Return an array on the host; of random keys their data."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
