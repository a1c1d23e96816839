"""What tests of tables on the host run in one process or in several; see `process_cases.py`."""

import contextlib
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from living_processes import gradients, train_layers_step, train_step
from process_cases import mesh, part

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io, nn
from tpu_embed import optimizers as o
from tpu_embed._calls import Exchange
from tpu_embed.core.layout import arrivals
from tpu_embed.core.place import keys
from tpu_embed.data import Prefetcher
from tpu_embed.io.checkpoint.host_rows import described_by
from tpu_embed.storage import HostRows

DEVICES, BATCH, STEPS = 8, 16, 8
ITEMS, TAGS = 150, 60


def configs(*, hosted, rows):
    """Return features of a table by row numbers and of a living one, on the host or not.

    Args:
      hosted: whether these two are.
      rows: how many rows of each the devices hold.
    """
    storage = HostStorage(device_rows=rows) if hosted else None
    drawn = {"initializer": jax.nn.initializers.normal(0.3), "storage": storage, "shard_axes": "d"}
    items = TableConfig(ITEMS, 4, name="items", **drawn)
    living = DynamicVocabulary(ttl=3, unseen="shared")
    tags = TableConfig(TAGS, 4, name="tags", vocabulary=living, combiner="sum", **drawn)
    users = TableConfig(9, 4, name="users", shard_axes="d")
    return {
        "bags": FeatureConfig(items),
        "seen": FeatureConfig(items, max_sequence_length=2),
        "tags": FeatureConfig(tags),
        "user": FeatureConfig(users),
    }


def engine(*, hosted=True, rows=64, shape=(DEVICES,)):
    """Return an engine of these features; the second of two axes of its mesh splits the rows."""
    features, axes = configs(hosted=hosted, rows=rows), ("data", "d")[-len(shape) :]
    made = Mesh(mesh(DEVICES).devices.reshape(shape), axes)
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.3), mesh=made, lookahead=0)


def draw_part(step):
    """Return this process's part of a batch."""
    rng = np.random.default_rng(step)
    often = rng.random((BATCH, 2)) < 0.5
    bags = np.where(often, rng.integers(0, 9, (BATCH, 2)), rng.integers(0, ITEMS, (BATCH, 2)))
    batch = {
        "bags": bags,
        "seen": rng.integers(-1, 15, (BATCH, 2)),
        "tags": (rng.integers(0, 30, (BATCH, 2)) + step // 2) * (2**40 + 7),
        "user": rng.integers(0, 9, BATCH),
    }
    return {name: part(array) for name, array in batch.items()}


def everything(made, state):
    """Return all rows and slots of items, and of all keys of tags; and what the host counts."""
    keys, rows = made.vocabularies.keys("tags")
    found = {"keys": keys, "rows": rows}
    for name, ids in (("items", np.arange(ITEMS)), ("tags", rows)):
        for slot in (None, "accumulators"):
            found[f"{name} {slot}"] = made.rows(state, name, ids, slot=slot)
    return found


def looked_up(activations):
    """Return this process's part of activations."""
    parts = {}
    for name, one in activations.items():
        shards = sorted(one.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        parts[name] = np.concatenate([np.asarray(shard.data) for shard in shards])
    return parts


def train(*, hosted=True, steps=STEPS):
    """Train with batches placed ahead, and lookups in between; return all that was found."""
    made = engine(hosted=hosted)
    state, seen = made.init(jax.random.key(7)), []
    with Prefetcher(made, (draw_part(step) for step in range(steps)), depth=2) as batches:
        for step, batch in enumerate(batches):
            state = train_step(made, state, batch)
            if step % 3 == 1:
                looked = made.place(draw_part(50 + step), training=False)
                seen.append(looked_up(made.lookup(state, looked)))
    return seen, everything(made, state)


def train_embedding(*, hosted=True):
    """Train by the stateful API, pipelined; return all rows."""
    features = configs(hosted=hosted, rows=80)
    made = tpu_embed.TPUEmbedding(features, o.Adagrad(0.3), True, mesh=mesh(DEVICES), seed=7)
    made.enqueue(draw_part(0))
    made.enqueue(draw_part(1))
    for step in range(STEPS):
        made.apply_gradients(gradients(made.dequeue()))
        if step + 2 < STEPS:
            made.enqueue(draw_part(step + 2))
    return everything(made.engine, made.state)


def on_the_host():
    """Return what the devices have missed, what `touched` says, and what was at home here."""
    made = engine()
    state = made.init(jax.random.key(7))
    for step in range(STEPS):
        state = train_step(made, state, made.place(draw_part(step)))
    made.storage.flush()
    ids = np.array([3, 140, 77])
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    state = made.set_rows(state, "items", ids, values)
    assert np.array_equal(made.rows(state, "items", ids), values)
    state = train_step(made, state, made.place(draw_part(3)))
    touched = made.touched("items")
    return made.storage.counters, touched, made.storage["items"].ids(), everything(made, state)


def by_key(*, hosted=True):
    """Return all rows of a run that gives keys rows in between, and the errors of bad calls."""
    made, errors = engine(hosted=hosted), []
    state, first = made.init(jax.random.key(7)), jax.process_index() == 0
    values, keys = np.arange(80, dtype=np.float32).reshape(20, 4), np.arange(20) * (2**40 + 7)
    for step in range(STEPS):
        state = train_step(made, state, made.place(draw_part(step)))
        if step % 3 == 1:
            some = np.concatenate([keys[step:], [-5 - step, 2**50 + step]])
            given = np.resize(values + step, (some.size, 4))
            state = made.set_rows(state, "tags", keys=some, values=given)
            assert np.array_equal(made.rows(state, "tags", keys=some), given)
            slot = {"keys": some[::2], "slot": "accumulators"}
            state = made.set_rows(state, "tags", values=given[::2], **slot)
    bad = [{"keys": [1, 1 if first else 2]}]
    if jax.process_count() > 1:  # one process has nobody to disagree with
        bad.append({"values": values[:2] + first})
    for given in bad:
        try:
            made.set_rows(state, "tags", **{"keys": keys[:2], "values": values[:2]} | given)
        except ValueError as error:
            errors.append(str(error))
    return errors, everything(made, state)


def fail_to_set():
    """Return all rows before and after calls of `set_rows` that one process fails to write."""
    made, errors = engine(), []
    state = made.init(jax.random.key(7))
    for step in range(4):
        state = train_step(made, state, made.place(draw_part(step)))
    before, values = everything(made, state), np.ones((9, 4), np.float32)

    def full(*_):
        raise OSError(28, "No space left on device")

    keys, _ = made.vocabularies.keys("tags")
    broken = mock.patch.object(HostRows, "write", full)
    with broken if jax.process_index() == 0 else contextlib.nullcontext():
        for name, which in (("items", {"rows": np.arange(9)}), ("tags", {"keys": keys[:9]})):
            try:
                made.set_rows(state, name, values=values, **which)
            except OSError as error:
                errors.append(str(error))
    return errors, before, everything(made, state)


def with_all_shards(directory=None):
    """Return all rows of a run in which each process holds all shards.

    With a directory, two tables are on the host. Then also return what is at home here, and how
    many rows a checkpoint has.
    """
    hosted = directory is not None
    made = engine(hosted=hosted, shape=(2, DEVICES // 2))
    state = made.init(jax.random.key(7))
    for step in range(STEPS):
        state = train_step(made, state, made.place(draw_part(step)))
    found = everything(made, state)
    if directory is None:
        return found
    io.save(f"{directory}/all shards", made, state)
    tables, processes = Path(directory) / "all shards" / "tables", range(jax.process_count())
    saved = [described_by(tables, None, process)["items"] for process in processes]
    count = sum(segment["rows"] for one in saved for segment in one["segments"])
    return found, made.storage["items"].ids(), count


def lose_a_row():
    """Return the errors of the batches after one process has failed to write its rows at home."""
    made = engine()
    state, errors = made.init(jax.random.key(7)), []
    for step in range(6):
        state = train_step(made, state, made.place(draw_part(step)))
    made.storage.flush()

    def full(*_):
        raise OSError(28, "No space left on device")

    broken = mock.patch.object(HostRows, "write", full)
    with broken if jax.process_index() == 0 else contextlib.nullcontext():
        state = train_step(made, state, made.place(draw_part(6)))
        try:
            made.storage.flush()
        except RuntimeError as error:
            errors.append(str(error))
    before = made.vocabularies.placed
    try:
        made.place(draw_part(7))
    except RuntimeError as error:
        errors.append(str(error))
    return errors, made.vocabularies.placed - before


def shapes_sent():
    """Return the shapes of what the programs of moved rows are called with, with exact sizes."""
    shapes = []

    def recorded(call, skipped):
        def record(*given):
            shapes.append(jax.tree.map(np.shape, given[skipped:]))
            return call(*given)

        return record

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(arrivals, "ROW_MULTIPLE", 1))
        # An exchange calls a program with operands; lines are sent as one list.
        for where, name, skipped in ((Exchange, "_call", 2), (keys, "send_lines", 0)):
            changed = recorded(getattr(where, name), skipped)
            patched.enter_context(mock.patch.object(where, name, changed))
        made = engine()
        state = made.init(jax.random.key(7))
        for step in range(5):
            state = train_step(made, state, made.place(draw_part(step)))
            made.place(draw_part(50 + step), training=False)
        # Only the first process has rows of these ids at home.
        ids, touched = np.arange(ITEMS, dtype=np.uint64), made.touched("items")
        first = made.storage.tables["items"].row_groups.of(ids) == 0
        first &= (made.vocabularies.rows("items", ids) < 0) & np.isin(ids, touched)
        bags = np.resize(ids[first], (BATCH, 2)).astype(np.int64)
        nothing = {"seen": np.full((BATCH, 2), -1), "tags": np.full((BATCH, 2), -1)}
        batch = {"bags": bags, **nothing, "user": np.zeros(BATCH, np.int64)}
        batch = made.place({name: part(array) for name, array in batch.items()})
        assert first.any()
        train_step(made, state, batch)
    return shapes


MOVES = [
    {},
    {"hosted": False},
    {"rows": 56, "shape": (2, DEVICES // 2)},
    {"hosted": False, "shape": (2, DEVICES // 2)},
]
"""Engines that adopt the state of the one before, to and fro between host and devices."""


def adopt():
    """Return all rows of a run that moves from engine to engine, and the errors of bad moves."""
    made, errors = engine(), []
    state = made.init(jax.random.key(7))
    for step in range(STEPS):
        if step and step % 2 == 0:
            before, made = made, engine(**MOVES[step // 2])
            state = made.adopt(state, before)
        state = train_step(made, state, made.place(draw_part(step)))
    found, maps, back = everything(made, state), made.vocabularies, engine()
    if jax.process_count() > 1:
        if jax.process_index() == 1:  # a batch that is ahead, in this process only
            maps.take_keys("tags", np.array([1], np.uint64))
        local = Mesh(np.array(jax.local_devices()), ("d",))
        alone = tpu_embed.EmbeddingEngine(
            configs(hosted=False, rows=64), o.Adagrad(0.3), mesh=local
        )
        for other in (back, alone):
            try:
                other.adopt(state, made)
            except ValueError as error:
                errors.append(str(error))
        maps.undo(maps.admitted)
    assert_equal(everything(back, back.adopt(state, made)), found)
    return found, errors


def train_layers(*, hosted=True):
    """Train a layer of row numbers and of keys; return what it looked up, and all rows."""
    drawn, where = jax.nn.initializers.normal(0.3), {"mesh": mesh(DEVICES), "rngs": nnx.Rngs(0)}
    options = {"initializer": drawn, "optimizer": o.Adagrad(0.3)}
    options["storage"] = HostStorage(device_rows=48) if hosted else None
    tags = TableConfig(TAGS, 2, name="tags", vocabulary=DynamicVocabulary(), **options)
    items = TableConfig(ITEMS, 4, name="items", **options)
    features = {"bags": FeatureConfig(items), "tags": FeatureConfig(tags)}
    layer, seen = nn.Embeddings(features, **where), []
    for step in range(STEPS):
        batch = draw_part(step)
        batch = {name: batch[name] for name in ("bags", "tags")}
        train_layers_step(layer, layer.place(batch))
        if step % 3 == 1:
            looked = batch | {"bags": draw_part(50 + step)["bags"]}
            seen.append(looked_up(layer(layer.place(looked, training=False))))
    found, maps = {}, layer.engine.vocabularies
    for name in ("items", "tags"):
        ids = np.arange(ITEMS) if name == "items" else maps.keys("tags")[1]
        for slot in (None, "accumulators"):
            found[f"{name} {slot}"] = layer.engine.rows(layer.state, name, ids, slot=slot)
    return seen, found


def save(directory):
    """Save twice, the second time what has changed; return all rows then, and some steps later."""
    made = engine()
    state = made.init(jax.random.key(7))
    for step in range(3):
        state = train_step(made, state, made.place(draw_part(step)))
        if step != 1:
            io.save(f"{directory}/{step}", made, state)
    saved = everything(made, state)
    for step in (3, 4):
        state = train_step(made, state, made.place(draw_part(step)))
    return saved, everything(made, state)


def restore(directory, *, hosted=True):
    """Restore, train on and save again; return all rows then, and some steps later."""
    made = engine(hosted=hosted, rows=56)
    state = io.restore(f"{directory}/2", made).state
    if hosted:
        ids = made.storage["items"].ids()
        assert made.storage.tables["items"].row_groups.at_home(ids).all()
    restored = everything(made, state)
    for step in (3, 4):
        state = train_step(made, state, made.place(draw_part(step)))
    again, later, other = (
        f"{directory}/{jax.process_count()} {hosted}",
        everything(made, state),
        engine(),
    )
    io.save(again, made, state)
    assert_equal(later, everything(other, io.restore(again, other).state))
    return restored, later


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
