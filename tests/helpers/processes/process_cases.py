"""What the tests run in several processes, through `process_runs.py`.

A run with one process gives the results to compare with. Every function does the same in every
process, and returns plain values or NumPy arrays.
"""

import functools
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import exchange_cases
import jax
import jax.numpy as jnp
import numpy as np
from interrupt_cases import interrupt_the_wait
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tpu_embed
from tpu_embed import FeatureConfig, Jagged, RaggedIds, SparseIds, TableConfig, io
from tpu_embed import optimizers as o
from tpu_embed.core.rows import host_arrays
from tpu_embed.io.checkpoint import tables, trees
from tpu_embed.processes import messages

DEVICES, BATCH, STEPS = 8, 16, 3


def features(placement):
    films = TableConfig(19, 4, name="films", combiner="mean", placement=placement)
    # Drawn, unlike the others: random rows must not depend on which process draws them.
    drawn = jax.nn.initializers.truncated_normal(0.5)
    users = TableConfig(7, 4, drawn, name="users", optimizer=o.Adam(0.125), placement=placement)
    stochastic = {"dtype": "bfloat16", "rounding": "stochastic"}
    genres = TableConfig(5, 2, name="genres", placement="replicated", **stochastic)
    found = {"film": FeatureConfig(films, output_shape=(BATCH,))}
    found |= {"user": FeatureConfig(users), "genres": FeatureConfig(genres)}
    found["seen"] = FeatureConfig(films, max_sequence_length=2)
    return found | {"path": FeatureConfig(films, jagged=True)}


def mesh(devices):
    """Return a mesh with equally many devices of every process."""
    each = devices // jax.process_count()
    chosen = [jax.local_devices(process)[:each] for process in range(jax.process_count())]
    return Mesh(np.array(chosen).reshape(-1), ("d",))


def part(array):
    """Return this process's part of an array with one entry per example."""
    size = len(array) // jax.process_count()
    return array[jax.process_index() * size : (jax.process_index() + 1) * size]


def draw(step):
    """Return this process's part of a batch; from the second batch on, bags are longer.

    All processes agree on its shape.
    """
    rng = np.random.default_rng(step)
    film = [list(rng.integers(0, 19, rng.integers(0, 9 if step else 2))) for _ in range(BATCH)]
    seen = rng.integers(-1, 19, (BATCH, 3))
    rows, columns = np.nonzero(rng.random((BATCH, 4)) < 0.4)
    values, weights = rng.integers(0, 5, len(rows)), rng.random(len(rows)).astype(np.float32)
    user = rng.integers(0, 7, BATCH)
    mine = np.flatnonzero(np.isin(rows, part(np.arange(BATCH))))
    first, size = part(np.arange(BATCH))[0], len(part(user))
    indices = np.stack([rows[mine] - first, columns[mine]], axis=1)
    genres = SparseIds(indices, values[mine], (size, 4), weights[mine])
    batch = {"film": RaggedIds.from_lists(part(film)), "seen": part(seen), "user": part(user)}
    return batch | {"genres": genres, "path": RaggedIds.from_lists(part(film[::-1]))}


@jax.jit
def gradients(activations):
    return jax.tree.map(lambda a: 2 * a + 1, activations)


@functools.cache
def make_engine(devices, placement):
    """Return the one engine of its kind, so that its programs compile once."""
    return tpu_embed.EmbeddingEngine(features(placement), o.Adagrad(0.5), mesh=mesh(devices))


def told(function, *arguments, **options):
    """Return the kind and the text of what a call raises, if it does."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def is_last():
    return jax.process_index() == jax.process_count() - 1


def arrays(engine, state):
    """Return tables, slots and step on this host."""
    return (*host_arrays(state, engine.layout), int(state.step))


def train(devices):
    """Train by the functional API; return tables, slots, step and the number of programs."""
    engine = make_engine(devices, "mod")
    state = engine.init(jax.random.key(0))
    for step in range(STEPS):
        batch = engine.place(draw(step))
        state = engine.update_in_place(state, batch, gradients(engine.lookup(state, batch)))
    return arrays(engine, state), engine.compilations["update"]


def train_rounded(devices):
    """Train with the exchange in bfloat16; return tables, slots and step."""
    case = exchange_cases.draw(13)
    engine = exchange_cases.make_engine(case, devices, mesh=mesh(devices))
    state = engine.init(jax.random.key(0))
    for step in case.steps:
        ids, weights, gradients = jax.tree.map(part, step)
        gradients = jax.tree.map(functools.partial(of_all, engine), gradients)
        state = engine.update_in_place(state, engine.place(ids, weights), gradients)
    return arrays(engine, state)


@functools.cache
def train_weighted(devices):
    """Train weighted bags of every combiner, several blocks of the batch on each device.

    Returns tables, slots and step; and by table the rows that this process's parts touched, as the
    placed batches tell, and as their features do.
    """
    tables = [
        TableConfig(19, 4, name="mean", combiner="mean"),
        TableConfig(23, 2, name="sqrtn", combiner="sqrtn", placement="div"),
        TableConfig(3, 3, name="few", combiner="mean", placement="replicated"),
        TableConfig(97, 5, name="copied", combiner="sum", placement="replicated"),
    ]
    config = {f"{t.name}{end}": FeatureConfig(t) for t in tables for end in ("", " once")}
    engine = tpu_embed.EmbeddingEngine(config, o.Adagrad(0.5), mesh=mesh(devices))
    assert engine.layout.blocks_per_device([BATCH // engine.layout.axes.replicas]) > 1
    state, seen = engine.init(jax.random.key(0)), (io.TouchedRows(engine), io.TouchedRows(engine))
    for step in range(1, STEPS + 1):
        ids, weights = draw_weighted(tables, step)
        batch = engine.place(ids, weights)
        seen[0].record(batch, step)
        seen[1].record(ids, step)
        state = engine.update_in_place(state, batch, gradients(engine.lookup(state, batch)))
    rows = [{t: ids.tolist() for t, ids in touched.since(0).items()} for touched in seen]
    return arrays(engine, state), rows


def draw_weighted(tables, step):
    """Return this process's part of a batch, and its weights; bags of one table are ragged."""
    rng, ids, weights = np.random.default_rng(step), {}, {}
    for table in tables:
        name, size = table.name, table.vocabulary_size
        bags, scales = rng.integers(-1, size, (BATCH, 5)), rng.normal(size=(BATCH, 5))
        ids[name], weights[name] = part(bags), part(scales.astype(np.float32))
        ids[f"{name} once"] = part(rng.integers(0, min(3, size), BATCH))
        weights[f"{name} once"] = None
    here = np.arange(5) < part(rng.integers(0, 6, BATCH))[:, None]
    splits = np.append(0, np.cumsum(here.sum(1)))
    ids["mean"] = RaggedIds(np.abs(ids["mean"])[here], splits, weights["mean"][here])
    return ids, weights | {"mean": None}


def train_embedding(devices):
    """Train by the stateful API, pipelined; return tables, slots and step."""
    embedding = tpu_embed.TPUEmbedding(features("mod"), o.Adagrad(0.5), True, mesh=mesh(devices))
    embedding.engine = make_engine(devices, "mod")
    embedding.enqueue(draw(0))
    for step in range(STEPS):
        if step + 1 < STEPS:
            embedding.enqueue(draw(step + 1))
        embedding.apply_gradients(gradients(embedding.dequeue()))
    return (*embedding.retrieve(), int(embedding.state.step))


def refusals(devices):
    """Return what every process raises when the last one gives a batch that cannot be placed."""
    engine = make_engine(devices, "mod")
    last, good = is_last(), draw(0)
    spec = engine.place(good).spec
    bad_id = good | ({"user": good["user"] + 100} if last else {})
    a_float = good | ({"user": good["user"] / 2} if last else {})
    floats = good | {"film": np.full(len(good["user"]), 0.5)}
    other_size = tpu_embed.pad_batch(good, 16) if last else good
    missing = {k: v for k, v in good.items() if k != "user"} if last else good
    cases = [(one, None) for one in (bad_id, a_float, other_size, missing, floats)]
    longer = good | {"film": RaggedIds.from_lists(part([[1] * 30] * BATCH))}
    on_all = jax.device_put(np.zeros(BATCH, int), NamedSharding(mesh(devices), PartitionSpec()))
    cases += [(good | {"user": on_all}, None), (longer if last else good, spec)]
    cases += [(good, spec), (good, None if last else spec)]
    return [told(engine.place, given, spec=wanted) for given, wanted in cases]


def outliers():
    """Return the room for ids in batches that are alike but for two, which one process has alone.

    Batch 0 has many ids in the first process; batch 140 has more of them in the last one. Some
    batches in between ask for different rooms in both. The last one is given the first one's spec
    by one process alone.
    """
    films = TableConfig(1_000_000, 1, name="outliers", combiner="sum")
    engine = tpu_embed.EmbeddingEngine(FeatureConfig(films), o.SGD(), mesh=mesh(8))
    first, rooms, size = jax.process_index() == 0, [], BATCH // jax.process_count()
    for step in range(150):
        length = 20_000 if step == 0 and first else 25_000 if step == 140 and is_last() else 4
        rng = np.random.default_rng(step)
        bags = [rng.integers(0, 1_000_000, length).tolist()] + [[1, 2, 3]] * (size - 1)
        spec = engine.place(RaggedIds.from_lists(bags)).spec
        rooms.append(spec.stacks[0].sizes)
    again = engine.place(RaggedIds.from_lists(bags), spec=spec if first else None)
    assert again.spec == spec
    return rooms


def leave(leaver, how, where, directory):
    """End one process while the others wait for it, in Python or on a device.

    Args:
      leaver: its number.
      how: it ends: "raise", "exit", "kill" or "interrupt".
      where: the others wait: "place", "admit", "save" or "device".
      directory: for files.
    """
    engine = make_engine(8, "mod")
    state = engine.init(jax.random.key(0))
    living = TableConfig(16, 2, name="t", vocabulary=tpu_embed.DynamicVocabulary())
    made = tpu_embed.EmbeddingEngine(FeatureConfig(living), o.SGD(0.5), mesh=mesh(8))
    keys = np.arange(8 // jax.process_count())
    first, _ = made.admit(made.init(jax.random.key(0)), made.place(keys))
    engine.place(draw(0))
    jax.block_until_ready((state, first))
    if jax.process_index() == leaver:
        print("left at", time.time(), file=sys.stderr, flush=True)
        if how == "raise":
            raise ValueError("the data source is gone")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGINT)
    if where == "place":
        engine.place(draw(1))
    elif where == "admit":
        made.admit(first, made.place(keys + 1))
    elif where == "save":
        io.save(f"{directory}/saved", engine, state)
    ones = of_all(engine, np.ones(jax.local_device_count(), np.float32))
    jax.jit(jnp.sum)(ones).block_until_ready()


def interrupt():
    """Interrupt process 0 while it waits for the part of the other process, which comes later."""
    engine = make_engine(8, "mod")
    engine.place(draw(0))
    if jax.process_index() == 0:
        threading.Thread(target=interrupt_the_wait, daemon=True).start()
        try:
            engine.place(draw(1))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        engine.place(draw(1))
    else:
        while messages.left(messages.client()) is None:
            time.sleep(0.05)
        engine.place(draw(1))  # the other process had given its part before it was interrupted
        engine.place(draw(2))


def guarded(devices):
    """Skip a step with a NaN in the last example, then apply one without.

    Returns tables and slots after each of the two, and the counters.
    """
    options = {"mesh": mesh(devices), "on_bad_gradient": "skip"}
    engine = tpu_embed.EmbeddingEngine(features("mod"), o.Adagrad(0.5), **options)
    state = engine.init(jax.random.key(0))
    batch = engine.place(draw(0))
    good = fixed(engine, jax.eval_shape(engine.lookup, state, batch), 0)
    with_nan = jax.jit(lambda rows: rows.at[-1, 0].set(np.nan))
    state = engine.update_in_place(state, batch, good | {"user": with_nan(good["user"])})
    kept = arrays(engine, state)
    state = engine.update_in_place(state, batch, good)
    return kept, arrays(engine, state), np.asarray(state.counters["bad_gradients"]).tolist()


def save_all(directory, devices, placements):
    """Save a state after three steps, for every number of devices and placement."""
    for n, placement in itertools.product(devices, placements):
        engine = make_engine(n, placement)
        state = trained(engine, engine.init(jax.random.key(0)), steps=3)
        io.save(f"{directory}/{jax.process_count()}-{n}-{placement}", engine, state)


def trained(engine, state, *, steps):
    """Return the state after steps whose batches and gradients depend only on their number."""
    for _ in range(steps):
        batch = engine.place(draw(int(state.step) % 3))
        shapes = jax.eval_shape(engine.lookup, state, batch)
        state = engine.update_in_place(state, batch, fixed(engine, shapes, int(state.step)))
    return state


def of_all(engine, array):
    """Return the global array of which every process has a part."""
    axes = engine.layout.axes
    return jax.make_array_from_process_local_data(axes.sharding(axes.batch_axes), array)


def fixed(engine, shapes, step):
    """Return activation gradients that depend only on the step, as global arrays."""
    rng, found = np.random.default_rng(step), {}
    for name, shape in sorted(shapes.items()):
        jagged = isinstance(shape, Jagged)  # its C may differ: all places get one number
        like = shape.values if jagged else shape
        whole = np.broadcast_to(rng.normal(size=() if jagged else like.shape), like.shape)
        found[name] = of_all(engine, np.float32(part(whole)))
    return found


def faults(directory):
    """Return what every process raises when files fail in the last one; then save and restore."""

    def fails(module, name, error):
        failing = mock.Mock(side_effect=error)
        return mock.patch.object(module, name, failing if last else getattr(module, name))

    last, root, engine = is_last(), Path(directory), make_engine(8, "mod")
    state = engine.init(jax.random.key(0))
    model = jax.device_put({"kernel": np.ones(3, np.float32)}, state.step.sharding)
    full, damaged, seen = OSError("no space left"), ValueError("damaged"), []
    for module, name in ((tables, "write_rows"), (tables, "prepare"), (trees, "_write_leaves")):
        with fails(module, name, full):
            seen.append(told(io.save, root / "one", engine, state, model=model))
        assert last or not list(root.glob("one*"))
    with io.CheckpointManager(root / "run", engine) as manager:
        for module, name in ((tables, "write_rows"), (trees, "_write_leaves")):
            with fails(module, name, full):
                manager.save(1, state, model=model)
                seen.append(told(manager.wait))
        left = sorted(path.name for path in root.glob("*/*") if path.name.isdigit())
        assert manager.save(2, state, model=model)
        manager.wait()
        with fails(io.CheckpointManager, "all_steps", full):  # as of a bucket without an answer
            seen += [told(manager.save, 4, state), told(manager.restore)]
        for module, name in ((tables._Restore, "fill"), (trees, "_check_sums")):
            with fails(module, name, damaged):
                seen.append(told(manager.restore, model=model))
        at_once = arrays(engine, manager.restore(model=model).state)
        manager.save(3, state, model=model)
        manager.remove(2)
        assert manager.all_steps() == [3]
    seen.append(told(io.save, root / f"other {jax.process_index()}", engine, state))
    with mock.patch.object(io.CheckpointManager, "all_steps", return_value=[1] if last else [3]):
        seen.append(told(io.CheckpointManager, root / "run", engine))
    return seen, left, at_once, arrays(engine, state)


def unequal(directory):
    """Save where the last process has fewer shards; return what 8 devices restore, and this."""
    config, rule = {"x": FeatureConfig(TableConfig(19, 4, name="films"))}, o.Adagrad(0.5)
    meshes = [Mesh(jax.devices()[:n], ("d",)) for n in (6, 8)]
    six, eight = (tpu_embed.EmbeddingEngine(config, rule, mesh=one) for one in meshes)
    state = six.init(jax.random.key(0))
    io.save(f"{directory}/six", six, state)
    return arrays(eight, io.restore(f"{directory}/six", eight).state), arrays(six, state)


def restore_all(directory, names, devices, placements, steps=10):
    """Restore every checkpoint on every number of devices and placement, and train some steps."""
    found = {}
    for n, placement, name in itertools.product(devices, placements, names):
        engine = make_engine(n, placement)
        state = io.restore(f"{directory}/{name}", engine).state
        at_once = arrays(engine, state)
        later = arrays(engine, trained(engine, state, steps=steps))
        found[name, n, placement] = at_once, later
    return found


# -- small trainings whose rows move between steps -------------------------------------------------


def train_living():
    """Train keys of which some lose their rows; return keys, rows and values."""
    made, state = _train_small(2**40 + 3, 12, vocabulary=tpu_embed.DynamicVocabulary())
    keys, rows = made.vocabularies.keys("t")
    return keys, rows, made.rows(state, "t", keys=keys), made.vocabularies.counters


def train_hosted():
    """Train more ids than the devices hold; return all rows, and how many came from home."""
    made, state = _train_small(1, 30, storage=tpu_embed.HostStorage(device_rows=16, groups=2))
    made.storage.flush()
    return made.rows(state, "t", np.arange(30)), made.storage.counters["t"]["brought"]


def _train_small(factor, size, **options):
    """Train a table on ids that drift with the step; return the engine and the state."""
    table = FeatureConfig(TableConfig(size, 2, name="t", **options))
    made = tpu_embed.EmbeddingEngine(table, o.SGD(0.5), mesh=mesh(2))
    state = made.init(jax.random.key(3))
    for step in range(5):
        ids = (np.arange(8) + 5 * step) % 23 * factor
        state, batch = made.admit(state, made.place(part(ids)))
        state = made.update_in_place(state, batch, gradients(made.lookup(state, batch)))
    return made, state
