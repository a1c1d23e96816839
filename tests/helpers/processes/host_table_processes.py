"""What tests of tables on the host run in one process or in several; see `process_cases.py`."""

import contextlib
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh
from living_processes import train_step
from process_cases import assert_same, mesh, part, told

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, io
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
    found = {"bags": items, "tags": tags, "user": TableConfig(9, 4, name="users", shard_axes="d")}
    found = {name: FeatureConfig(table) for name, table in found.items()}
    return found | {"seen": FeatureConfig(items, max_sequence_length=2)}


def engine(*, hosted=True, rows=64, shape=(DEVICES,)):
    """Return an engine of these features; the second of two axes of its mesh splits the rows."""
    features, axes = configs(hosted=hosted, rows=rows), ("data", "d")[-len(shape) :]
    made = Mesh(mesh(DEVICES).devices.reshape(shape), axes)
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.3), mesh=made, lookahead=0)


def draw_part(step):
    """Return this process's part of a batch."""
    rng = np.random.default_rng(step)
    few, all_ = rng.integers(0, 9, (BATCH, 2)), rng.integers(0, ITEMS, (BATCH, 2))
    batch = {
        "bags": np.where(rng.random(few.shape) < 0.5, few, all_),
        "seen": rng.integers(-1, 15, (BATCH, 2)),
        "tags": (rng.integers(0, 30, (BATCH, 2)) + step // 2) * (2**40 + 7),
        "user": rng.integers(0, 9, BATCH),
    }
    return jax.tree.map(part, batch)


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

    def here(one):
        shards = sorted(one.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(here, activations)


def begin(steps, **options):
    """Return an engine with options as for `engine`, and its state after some steps."""
    made = engine(**options)
    state = made.init(jax.random.key(7))
    return made, go_on(made, state, range(steps))


def go_on(made, state, steps):
    for step in steps:
        state = train_step(made, state, made.place(draw_part(step)))
    return state


@contextlib.contextmanager
def disk_of_the_first_is_full():
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    write = full if jax.process_index() == 0 else HostRows.write
    with mock.patch.object(HostRows, "write", write):
        yield


def train(*, hosted=True):
    """Train with batches placed ahead, and lookups in between; return all that was found."""
    (made, state), seen = begin(0, hosted=hosted), []
    with Prefetcher(made, map(draw_part, range(STEPS)), depth=2) as batches:
        for step, batch in enumerate(batches):
            state = train_step(made, state, batch)
            if step % 3 == 1:
                looked = made.place(draw_part(50 + step), training=False)
                seen.append(looked_up(made.lookup(state, looked)))
    return seen, everything(made, state)


def on_the_host():
    """Return what the devices have missed, what `touched` says, and what was at home here."""
    made, state = begin(STEPS)
    made.storage.flush()
    ids = np.array([3, 140, 77])
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    state = made.set_rows(state, "items", ids, values)
    assert np.array_equal(made.rows(state, "items", ids), values)
    state = go_on(made, state, [3])
    touched = made.touched("items")
    return made.storage.counters, touched, made.storage["items"].ids(), everything(made, state)


def by_key(hosted=True):
    """Return all rows of a run that gives keys rows in between, and the errors of bad calls."""
    (made, state), first = begin(0, hosted=hosted), jax.process_index() == 0
    values, keys = np.arange(80, dtype=np.float32).reshape(20, 4), np.arange(20) * (2**40 + 7)
    for step in range(STEPS):
        state = go_on(made, state, [step])
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
    good = {"keys": keys[:2], "values": values[:2]}
    errors = [told(made.set_rows, state, "tags", **good | given)[1] for given in bad]
    return errors, everything(made, state)


def fail_to_set():
    """Return all rows before and after calls of `set_rows` that one process fails to write."""
    made, state = begin(4)
    before, values = everything(made, state), np.ones((9, 4), np.float32)
    keys, _ = made.vocabularies.keys("tags")
    given = {"items": {"rows": np.arange(9)}, "tags": {"keys": keys[:9]}}
    with disk_of_the_first_is_full():
        errors = [told(made.set_rows, state, n, values=values, **x)[1] for n, x in given.items()]
    return errors, before, everything(made, state)


def with_all_shards(directory):
    """Return all rows of a run in which each process holds all shards, and what is at home here.

    Also return how many rows a checkpoint has.
    """
    made, state = begin(STEPS, **SPLIT)
    found = everything(made, state)
    io.save(f"{directory}/all shards", made, state)
    tables, processes = Path(directory) / "all shards" / "tables", range(jax.process_count())
    saved = [described_by(tables, None, process)["items"] for process in processes]
    count = sum(segment["rows"] for one in saved for segment in one["segments"])
    return found, made.storage["items"].ids(), count


def lose_a_row():
    """Return the errors of the batches after one process has failed to write its rows at home."""
    made, state = begin(6)
    made.storage.flush()
    with disk_of_the_first_is_full():
        go_on(made, state, [6])
        errors = [told(made.storage.flush)]
    before = made.vocabularies.placed
    errors.append(told(made.place, draw_part(7)))
    return [one[1] for one in errors if one], made.vocabularies.placed - before


def shapes_sent():
    """Return the shapes of what the programs of moved rows are called with, with exact sizes."""
    shapes = []

    def recorded(call, skipped):
        def record(*given):
            shapes.append(jax.tree.map(np.shape, given[skipped:]))
            return call(*given)

        return record

    with (
        mock.patch.object(arrivals, "ROW_MULTIPLE", 1),
        # An exchange calls a program with operands; lines are sent as one list.
        mock.patch.object(Exchange, "_call", recorded(Exchange._call, 2)),
        mock.patch.object(keys, "send_lines", recorded(keys.send_lines, 0)),
    ):
        made, state = begin(0)
        for step in range(5):
            state = go_on(made, state, [step])
            made.place(draw_part(50 + step), training=False)
        # Only the first process has rows of these ids at home.
        ids, touched = np.arange(ITEMS, dtype=np.uint64), made.touched("items")
        first = made.storage.tables["items"].row_groups.of(ids) == 0
        first &= (made.vocabularies.rows("items", ids) < 0) & np.isin(ids, touched)
        bags = np.resize(ids[first], (BATCH, 2)).astype(np.int64)
        nothing = np.full((BATCH, 2), -1)
        batch = {"bags": bags, "seen": nothing, "tags": nothing, "user": np.zeros(BATCH, np.int64)}
        assert first.any()
        train_step(made, state, made.place(jax.tree.map(part, batch)))
    return shapes


SPLIT = {"shape": (2, DEVICES // 2)}
MOVES = [{}, {"hosted": False}, {"rows": 56, **SPLIT}, {"hosted": False, **SPLIT}]
"""Engines that adopt the state of the one before, to and fro between host and devices."""


def adopt():
    """Return all rows of a run that moves from engine to engine, and the errors of bad moves."""
    (made, state), errors = begin(0), []
    for step in range(STEPS):
        if step and step % 2 == 0:
            before, made = made, engine(**MOVES[step // 2])
            state = made.adopt(state, before)
        state = go_on(made, state, [step])
    found, maps, back = everything(made, state), made.vocabularies, engine()
    if jax.process_count() > 1:
        if jax.process_index() == 1:  # a batch that is ahead, in this process only
            maps.take_keys("tags", np.array([1], np.uint64))
        local = Mesh(np.array(jax.local_devices()), ("d",))
        features = configs(hosted=False, rows=64)
        alone = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.3), mesh=local)
        errors = [told(other.adopt, state, made)[1] for other in (back, alone)]
        maps.undo(maps.admitted)
    assert_same(everything(back, back.adopt(state, made)), found)
    return found, errors


def save(directory):
    """Save twice, the second time what has changed; return all rows then, and some steps later."""
    made, state = begin(1)
    io.save(f"{directory}/0", made, state)
    state = go_on(made, state, [1, 2])
    io.save(f"{directory}/2", made, state)
    saved = everything(made, state)
    return saved, everything(made, go_on(made, state, [3, 4]))


def restore(directory, *, hosted=True):
    """Restore, train on and save again; return all rows then, and some steps later."""
    made, other = engine(hosted=hosted, rows=56), engine()
    state = io.restore(f"{directory}/2", made).state
    if hosted:
        ids = made.storage["items"].ids()
        assert made.storage.tables["items"].row_groups.at_home(ids).all()
    restored, state = everything(made, state), go_on(made, state, [3, 4])
    again, later = f"{directory}/{jax.process_count()} {hosted}", everything(made, state)
    io.save(again, made, state)
    assert_same(later, everything(other, io.restore(again, other).state))
    return restored, later
