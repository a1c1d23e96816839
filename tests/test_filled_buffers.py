"""A source may fill its buffers again: every form of ids, weights and labels, by every door.

The buffers are overwritten as soon as a door has returned, and when the source is asked for the
next batch. What is trained has the bits of a run whose batches have memory of their own.
"""

import functools
import itertools

import jax
import numpy as np
import pandas
import pyarrow
import pytest
from facade_cases import at_64_bytes, mesh

import tpu_embed
from tpu_embed import FeatureConfig, Jagged, RaggedIds, SparseIds, TableConfig, fit, optimizers
from tpu_embed.data import Prefetcher

B, H, V, STEPS = 8, 3, 32, 5
SPLITS = np.array([0, 1, 3, 3, 4, 8, 9, 11, 12])
PLACES = np.argwhere(np.arange(H + 2) < np.diff(SPLITS)[:, None])  # [12, 2]


def arrow(buffer):
    """Return an Arrow array that reads a buffer where it lies."""
    kind = pyarrow.from_numpy_dtype(buffer.dtype)
    return pyarrow.Array.from_buffers(kind, len(buffer), [None, pyarrow.py_buffer(buffer)])


# By name: the shape of the ids; whether they have weights; how a batch holds them, given its ids,
# weights and `Buffers`; options of the feature.
FORMS = {
    "one": ((B,), False, lambda ids, *_: ids, {}),
    "wide": ((B, H), True, lambda ids, *_: ids, {}),
    "column": ((B, 2), False, lambda ids, *_: ids[:, 1], {}),
    "turned": ((H, B), False, lambda ids, *_: ids.T, {}),
    "nested": ((B, 2, H), False, lambda ids, *_: ids, {}),
    "sequence": ((B, H), False, lambda ids, *_: ids, {"max_sequence_length": 2}),
    "sparse": ((12,), True, lambda ids, w, own: SparseIds(own.places, ids, (B, H + 2), w), {}),
    "ragged": ((12,), True, lambda ids, w, own: RaggedIds(ids, own.splits, w), {}),
    "jagged": ((12,), False, lambda ids, _, own: RaggedIds(ids, own.splits), {"jagged": True}),
    "series": ((B,), False, lambda ids, *_: pandas.Series(ids, copy=False), {}),
    "arrow": ((B,), False, lambda ids, *_: arrow(ids), {}),
}
TABLES = {
    "plain": {},
    "living": {"vocabulary": tpu_embed.DynamicVocabulary(admit_after=2)},
    "far": {"storage": tpu_embed.HostStorage(device_rows=V - 4)},
}
MOST = ("one", "wide", "sparse", "ragged")
"""Forms of keys and of ids of rows at home; the others become these before they are read."""
NAMES = [f"{t} {form}" for t in TABLES for form in (FORMS if t == "plain" else MOST)]


class Buffers:
    """Memory of ids, weights and labels, and a batch that reads it where it lies.

    Ids on the devices have 32 bits, others 64, as they are kept: so nothing else copies them.
    """

    def __init__(self):
        self.ids, self.weights = {}, {}
        for name in NAMES:
            shape, is_weighted, *_ = FORMS[name.split()[1]]
            dtype = np.int32 if name.startswith("plain") else np.int64
            self.ids[name] = at_64_bytes(np.zeros(shape, dtype))
            if is_weighted:
                self.weights[name] = at_64_bytes(np.zeros(shape, np.float32))
        self.splits, self.places = at_64_bytes(SPLITS), at_64_bytes(PLACES)
        self.labels, self.ages = (at_64_bytes(np.zeros(B, np.float32)) for _ in range(2))
        self.more = {"prices": at_64_bytes(np.zeros((B, 2), np.float32)), "list": [0.0] * B}
        self.more["ages"] = pandas.Series(self.ages, copy=False)

    def fill(self, step):
        """Fill the buffers with the batch of a step; -1: with what is no batch of the run."""
        rng = np.random.default_rng(step + 1)
        for ids in self.ids.values():
            # Half of the batches bring ids that the ones before did not have.
            ids[...] = rng.integers(0, V // 2 + step, ids.shape)
        for each in (*self.weights.values(), self.labels, self.ages, self.more["prices"]):
            each[...] = rng.random(each.shape)
        self.more["list"][:] = rng.random(B).tolist()
        self.splits[...], self.places[...] = (0, 0) if step < 0 else (SPLITS, PLACES)

    def batch(self):
        """Return features, weights of those that take them apart, and labels of several kinds."""
        features, apart = {}, dict.fromkeys(NAMES)
        for name in NAMES:
            form, weights = name.split()[1], self.weights.get(name)
            features[name] = FORMS[form][2](self.ids[name], weights, self)
            if form == "wide":
                apart[name] = weights
        return features, apart, self.labels, self.more


def refilled():
    """Yield batches of one memory, which is overwritten before the next one is asked for."""
    buffers = Buffers()
    for step in range(STEPS):
        buffers.fill(step)
        yield buffers.batch()
        buffers.fill(-1)


def kept(steps=STEPS):
    """Yield the same batches, each with a memory of its own."""
    for step in range(steps):
        buffers = Buffers()
        buffers.fill(step)
        yield buffers.batch()


CONFIGS = {name: TableConfig(V, 2, name=name, **options) for name, options in TABLES.items()}
FEATURES = {
    name: FeatureConfig(CONFIGS[name.split()[0]], **FORMS[name.split()[1]][-1]) for name in NAMES
}


@functools.cache
def make_engine():
    return tpu_embed.EmbeddingEngine(FEATURES, optimizers.Adagrad(0.5), mesh=mesh(1))


def rows(engine, state):
    """Return the rows of all ids, by table."""
    return [np.asarray(engine.rows(state, name, np.arange(V))) for name in TABLES]


def late(items):
    """Return an iterator of items, each once the next one has been made."""
    return (one for one, _ in itertools.pairwise(itertools.chain(items, [None])))


def train(batches):
    """Train on placed batches; return the state, and what came with the batches."""
    engine, rest = make_engine(), []
    state = engine.init(jax.random.key(0))
    engine.vocabularies.rewind(state)
    for batch, *others in batches:
        state, batch = engine.admit(state, batch)
        state = engine.update(state, batch, engine.lookup(state, batch))
        rest.append(others)
    return state, rest


def place(source):
    engine = make_engine()
    batches = ((engine.place(ids, weights),) for ids, weights, *_ in source())
    return rows(engine, train(late(batches))[0])


def place_lookups(source):
    engine = make_engine()
    state, _ = train((engine.place(*one[:2]),) for one in kept(3))
    batches = late(engine.place(*one[:2], training=False) for one in source())
    return [engine.lookup(*engine.admit(state, batch)) for batch in batches]


def enqueue(source):
    made = tpu_embed.TPUEmbedding(FEATURES, optimizers.Adagrad(0.5), mesh=mesh(1))
    for _ in late(made.enqueue(ids, weights) for ids, weights, *_ in source()):
        made.apply_gradients(made.dequeue())
    return rows(made.engine, made.state)


def prefetch(source):
    with Prefetcher(make_engine(), source(), weighted=True) as batches:
        state, rest = train(batches)
    return rows(make_engine(), state), rest


def loss(activations, labels, more):
    sums = [one.sums() if isinstance(one, Jagged) else one for one in activations.values()]
    flat = sum(one.reshape(B, -1).sum(axis=1) for one in sums)
    wanted = labels + more["prices"].sum(axis=1) + more["list"] + more["ages"]
    return ((flat - wanted) ** 2).mean()


def fit_and_evaluate(source):
    options = {"weighted": True, "evaluation": source, "progress": False}
    report = fit(make_engine(), loss, source(), **options)
    return rows(make_engine(), report.state), report.loss, report.evaluation


@pytest.mark.parametrize("door", [place, place_lookups, enqueue, prefetch, fit_and_evaluate])
def test_buffers_may_be_filled_with_the_next_batch(door):
    jax.tree.map(np.testing.assert_array_equal, door(refilled), door(kept))
