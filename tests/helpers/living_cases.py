"""Engines with dynamic vocabularies, their batches, and what plain Python expects of them."""

import functools
import zlib
from fractions import Fraction

import jax
import numpy as np
from facade_cases import assert_same as assert_same
from facade_cases import mesh
from oracle_vocabulary import VocabularyOracle

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, RaggedIds, TableConfig
from tpu_embed import optimizers as o

SIZES = {"bags": 16, "one": 8, "seen": 8}
KEY = 7
ITEMS, TAGS = 34, 6


def configs(items=ITEMS, **options):
    """Return features of two living tables, and of an ordinary one that shares a stack."""
    living = DynamicVocabulary(**({"ttl": 2} | options))
    of_tags = DynamicVocabulary(admit_after=2, evict="lfu", unseen="shared")
    items = TableConfig(items, 4, name="items", vocabulary=living)
    options = {"combiner": "sum", "optimizer": o.Adagrad(0.5), "vocabulary": of_tags}
    return {
        "bags": FeatureConfig(items),
        "one": FeatureConfig(TableConfig(TAGS, 2, name="tags", **options)),
        "seen": FeatureConfig(items, max_sequence_length=2),
        "user": FeatureConfig(TableConfig(9, 4, name="users", combiner="sum")),
    }


def engine(devices=2, lookahead=0, features=None, **options):
    """Return an engine of these features."""
    options |= {"mesh": mesh(devices), "lookahead": lookahead}
    return tpu_embed.EmbeddingEngine(features or configs(), o.Adam(0.125), **options)


def draw(step, scale=1):
    """Return a batch in every form of ids, `scale` times as large; its keys drift with the step."""
    rng, spread = np.random.default_rng(step), 40 * scale
    bags, one, seen = (scale * SIZES[name] for name in ("bags", "one", "seen"))
    lengths = rng.permutation(np.arange(bags) % 3)  # always as many in all: one spec
    splits = np.concatenate([[0], np.cumsum(lengths)])
    weights = rng.choice([0.5, 1, 2], splits[-1]).astype(np.float32)
    far = np.uint64(2**61 + 3)
    keys = (rng.integers(0, spread, splits[-1]) + step).astype(np.uint64) * far
    shown = (rng.integers(0, spread, (seen, 3)) + step).astype(np.uint64) * far
    shown, one = shown.view(np.int64), rng.integers(0, 12, one) - 1
    return {
        "bags": RaggedIds(keys, splits, weights),
        "one": one,
        "seen": np.where(rng.random(shown.shape) < 0.2, -1, shown),
        "user": rng.integers(0, 9, 8 * scale),
    }


def keys_in_order(batch):
    """Return the keys of each living table in batch order, by loops."""
    bags, items = batch["bags"], []
    for e in range(SIZES["bags"]):
        for at in range(bags.row_splits[e], bags.row_splits[e + 1]):
            items.append((Fraction(e, SIZES["bags"]), 0, at, int(bags.values[at])))
    for (e, at), key in np.ndenumerate(batch["seen"][:, :2]):
        if key != -1:
            items.append((Fraction(e, SIZES["seen"]), 1, at, int(key) % 2**64))
    tags = [key for key in batch["one"].tolist() if key != -1]
    return {"items": [key for *_, key in sorted(items)], "tags": tags}


def oracles(lookahead=0, items=ITEMS):
    """Return the plain Python maps of the two tables."""
    of_tags = {"admit_after": 2, "evict": "lfu", "waiting": 4 * TAGS}
    return {
        "items": VocabularyOracle(items, ttl=2, waiting=4 * items, lookahead=lookahead),
        "tags": VocabularyOracle(TAGS - 1, lookahead=lookahead, **of_tags),
    }


def gradients(activations, step):
    """Return gradients that depend on the step, in the form of the activations."""
    rng = np.random.default_rng(1000 + step)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), activations)


def train_on(made, state, batch, step):
    """Train on a placed batch; return the state and the activations."""
    state, batch = made.admit(state, batch)
    activations = made.lookup(state, batch)
    state = made.update_in_place(state, batch, gradients(activations, step))
    return state, jax.tree.map(np.asarray, activations)


def train(made, state, steps, first=0, scale=1):
    """Train on the batches of some steps; return the state and the activations of each."""
    seen = []
    for step in range(first, first + steps):
        state, activations = train_on(made, state, made.place(draw(step, scale)), step)
        seen.append(activations)
    return state, seen


def initial_row(table, key, seed=KEY):
    """Return the first value of a key's row, drawn as the semantics say."""
    base = jax.random.fold_in(jax.random.key(seed), zlib.crc32(table.name.encode()))
    low, high = np.uint32(key % 2**32), np.uint32(key // 2**32)
    draw = tpu_embed.initializers.resolve(table.initializer, table.dim)
    return np.asarray(_drawn(base, low, high, draw, table.dim))[0]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _drawn(base, low, high, draw, dim):
    folded = jax.random.fold_in(jax.random.fold_in(base, low), high)
    return draw(folded, (1, dim), np.float32)


def whole(made, state):
    """Return all that a state and its maps hold, as arrays by name."""
    found = {f"table {n}": t for n, t in made.tables(state).items()}
    for name, slots in made.slots(state).items():
        found |= {f"slot {name}/{slot}": s for slot, s in slots.items()}
    for name, one in made.vocabularies.state().maps.items():
        found |= {f"map {name}/{field}": a for field, a in one._asdict().items()}
    return {name: np.asarray(array) for name, array in found.items()}


def simple(capacity=3, lookahead=0, **options):
    """Return an engine of one living table on one device, with plain SGD, and its first state."""
    return _of_one(capacity, o.SGD(1.0), lookahead, options)


def _of_one(capacity, rule, lookahead, options, **kind):
    table = TableConfig(capacity, 2, name="t", vocabulary=DynamicVocabulary(**options), **kind)
    features = {"x": FeatureConfig(table)}
    made = tpu_embed.EmbeddingEngine(features, rule, mesh=mesh(1), lookahead=lookahead)
    return made, made.init(jax.random.key(KEY))


def ids(*keys):
    return {"x": np.array(keys)}


ONES = {"x": np.ones((2, 2), np.float32)}


def maps_of(made):
    return {
        f"{name} {field}": array
        for name, one in made.vocabularies.state(made.vocabularies.placed).maps.items()
        for field, array in one._asdict().items()
    }


def on_host(capacity=6, device_rows=2, lookahead=0, **options):
    """Return an engine of one living table on the host, with Adagrad, and its first state."""
    storage = HostStorage(device_rows=device_rows)
    return _of_one(capacity, o.Adagrad(0.5), lookahead, options, storage=storage)


def train_once(made, state, *keys):
    """Train on a batch of two keys; return the state."""
    state, batch = made.admit(state, made.place(ids(*keys)))
    return made.update(state, batch, ONES)
