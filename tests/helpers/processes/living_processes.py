"""What tests of dynamic vocabularies run in one process or in several; see `process_cases.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from living_cases import ITEMS, KEY, SIZES, configs, draw
from process_cases import mesh, part, told

import tpu_embed
from tpu_embed import DynamicVocabulary, RaggedIds, TableConfig, io, nn
from tpu_embed import optimizers as o
from tpu_embed.core.rows import host_arrays
from tpu_embed.data import Prefetcher

DEVICES, STEPS, USERS = 8, 6, 150


@functools.cache
def engine(items):
    """Return the one engine of its kind, so that its programs compile once."""
    return tpu_embed.EmbeddingEngine(configs(items), o.Adam(0.125), mesh=mesh(DEVICES))


def start():
    """Return the engine and a first state, whose maps are empty again."""
    made = engine(ITEMS)
    state = made.init(jax.random.key(KEY))
    made.vocabularies.rewind(state)
    return made, state


def draw_part(step):
    """Return this process's part of a batch; the numbers of its keys differ between processes."""
    batch = draw(step)
    bags = batch.pop("bags")
    lists = part(np.split(bags.values, bags.row_splits[1:-1]))
    weights = part(np.split(bags.weights, bags.row_splits[1:-1]))
    ragged = RaggedIds.from_lists(list(lists), weights=list(weights))
    return {"bags": ragged, **{name: part(array) for name, array in batch.items()}}


def bits(made, state):
    """Return all of a state and its maps, on this host."""
    maps = {n: one._asdict() for n, one in made.vocabularies.state().maps.items()}
    step, history, *taken = np.asarray(state.vocabulary["map_version"]).tolist()
    assert history == made.vocabularies.at(step)[1]  # a number of this run
    steps, counters = [step, *taken], made.vocabularies.counters
    return *host_arrays(state, made.layout), maps, steps, counters


@jax.jit
def gradients(activations):
    return jax.tree.map(lambda a: 2 * a + 1, activations)


def train_step(made, state, batch):
    state, batch = made.admit(state, batch)
    return made.update_in_place(state, batch, gradients(made.lookup(state, batch)))


def train():
    """Train with batches placed ahead, with a lookup in between; return the bits."""
    made, state = start()
    with Prefetcher(made, map(draw_part, range(STEPS)), depth=2) as batches:
        for batch in batches:
            state = train_step(made, state, batch)
    looked = made.lookup(state, made.place(draw_part(50), training=False))
    return bits(made, state), len(looked["user"].addressable_shards)


def train_embedding():
    """Train by the stateful API, pipelined; return the bits."""
    made = tpu_embed.TPUEmbedding(configs(), o.Adam(0.125), True, mesh=mesh(DEVICES), seed=KEY)
    made.enqueue(draw_part(0))
    made.enqueue(draw_part(1))
    for step in range(STEPS):
        made.apply_gradients(gradients(made.dequeue()))
        if step + 2 < STEPS:
            made.enqueue(draw_part(step + 2))
    return bits(made.engine, made.state)


def model():
    """Return one layer of two tables of keys, and of one of row numbers on the host."""
    living, home = DynamicVocabulary(), tpu_embed.HostStorage(device_rows=48)
    late = DynamicVocabulary(admit_after=2, unseen="shared")
    tables = [
        TableConfig(20, 4, name="films", vocabulary=living),
        TableConfig(12, 2, name="tags", vocabulary=late),
        TableConfig(USERS, 2, name="users", storage=home),
    ]
    features = {table.name: tpu_embed.FeatureConfig(table) for table in tables}
    return nn.Embeddings(features, o.Adagrad(0.5), mesh=mesh(DEVICES), rngs=nnx.Rngs(3))


def draw_for_layers(step):
    """Return this process's part of a batch for the layers of `model`."""
    rng = np.random.default_rng(step)
    films = (rng.integers(0, 30, 16) + step) * (2**40 + 3)
    tags = rng.integers(0, 20, (16, 2)) + 10**12
    batch = {"users": rng.integers(0, USERS, 16), "films": films, "tags": tags}
    return {name: part(array) for name, array in batch.items()}


@nnx.jit(donate_argnums=0)
def train_layers_step(rows, batch):
    def loss_fn(rows):
        found = [jnp.square(one - 1.0).sum() for one in rows(batch).values()]
        return sum(found[1:], found[0])

    return nn.fused_value_and_grad(loss_fn)(rows)[0]


def train_layers(directory):
    """Train a layer, save, restore and train on.

    Returns:
      Rows, slots and maps; the errors of bad batches, and how many batches were placed then.
    """
    rows, other = model(), model()
    with Prefetcher(rows.engine, map(draw_for_layers, range(4)), depth=2) as ahead:
        for number, batch in enumerate(ahead):
            train_layers_step(rows, rows.admit(batch))
            if number == 2:  # a batch that is placed ahead is trained on later
                evaluated = evaluate_layers(rows, range(50, 54))
    good, first = draw_for_layers(4), jax.process_index() == 0
    bad = [good | {"tags": good["tags"] + 0.5}, good | {"films": [[1, 2], [3]]}]
    bad.append({name: good[name] for name in ("tags", "users")})
    many = jax.process_count() > 1
    errors = [told(rows.place, some if first else good)[1] for some in bad if many]
    maps = rows.engine.vocabularies
    assert maps.placed == maps.admitted == 4  # what one has refused, none has learned
    path = f"{directory}/layers of {jax.process_count()}"
    io.save_modules(path, {"rows": rows})
    io.restore_modules(path, {"rows": other})
    train_layers_step(other, other.place(good))
    return layer_bits(other), errors, evaluated


def evaluate_layers(rows, steps):
    """Return the largest and the smallest activation of each table, in batches placed ahead."""
    source, found = map(draw_for_layers, steps), []
    with Prefetcher(rows.engine, source, depth=2, training=False) as ahead:
        for batch in ahead:
            looked = rows(rows.admit(batch))
            found.append([(float(one.max()), float(one.min())) for one in looked.values()])
    return found


def layer_bits(rows):
    """Return all of the layer's rows and maps, on this host."""
    maps = rows.engine.vocabularies
    keys = {name: (maps.keys(name), maps.counters[name]) for name in ("films", "tags")}
    ids = {"users": np.arange(USERS), **{name: keys[name][0][1] for name in keys}}
    of = functools.partial(rows.engine.rows, rows.state)
    found = [of(n, x, slot=s) for n, x in ids.items() for s in (None, "accumulators")]
    return found, int(rows.state.step), keys, maps.placed, maps.admitted


def refusals():
    """Return the errors of batches that one process or both refuse, and what the maps are then."""
    made, state = start()
    state = go_on(made, state, [0])
    before, good = bits(made, state), draw_part(1)
    ragged = good["bags"]
    spoilt = dataclasses.replace(ragged, weights=ragged.weights * np.nan)
    size = SIZES["one"] if jax.process_count() > 1 else 10
    bad = [{"one": good["one"] + 0.5}, {"bags": spoilt}]
    bad += [{"one": np.arange(n)} for n in (10, size)]
    # Only the first process has a bad part; the sizes of both must agree.
    first = jax.process_index() == 0
    errors = [told(made.place, good | some if first else good) for some in bad]
    spec = made.place(draw_part(0), training=False).spec
    more = RaggedIds(np.repeat(ragged.values, 3), 3 * ragged.row_splits)  # more than fit
    errors.append(told(made.place, {**good, "bags": more}, None, spec))
    return errors, before, bits(made, state), bits(made, go_on(made, state, [1]))


def unlike():
    """Return the error of processes that have admitted different numbers of batches."""
    made, _ = start()
    made.place(draw_part(0))
    if jax.process_index() == 0:
        made.vocabularies.note_admitted(1)
    return told(made.place, draw_part(1), training=False)


def go_on(made, state, steps):
    for step in steps:
        state = train_step(made, state, made.place(draw_part(step)))
    return state


def save(path):
    """Train and save; return the bits at the save and some steps later."""
    made, state = start()
    state = go_on(made, state, range(3))
    ahead = made.place(draw_part(3))
    io.save(path, made, state)
    at_save = bits(made, state)
    return at_save, bits(made, go_on(made, train_step(made, state, ahead), [4]))


def restore(path, items=ITEMS):
    """Restore and train on; return the bits at once and some steps later."""
    made = engine(items)
    state = io.restore(path, made).state
    return bits(made, state), bits(made, go_on(made, state, [3, 4]))
