"""What the tests of `fit` run in several processes."""

import os
import signal
import time

import jax
import numpy as np
import optax
from process_cases import BATCH, arrays, draw, make_engine, mesh, part

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed.data import EventValues
from tpu_embed.loop import Best

STEPS = 6


def parts(count):
    """Yield this process's parts of batches, with a number per example."""
    for step in range(count):
        rng = np.random.default_rng(step)
        yield draw(step), part(rng.random(BATCH).astype(np.float32))


def loss(model, activations, wanted):
    # Not the places of a jagged feature that no id takes: how many there are is no part of a run.
    sums = {name: leaf.sums() if name == "path" else leaf for name, leaf in activations.items()}
    leaves = jax.tree.leaves(sums)
    return sum(((leaf * model["scale"] - wanted.mean()) ** 2).mean() for leaf in leaves)


def failing():
    yield from parts(4)
    if jax.process_index() == 1:
        raise OSError("disk gone")
    yield from list(parts(STEPS))[4:]


def call(engine, source, directory, loss=loss, **options):
    options |= {"model": {"scale": np.ones((), np.float32)}, "optimizer": optax.adam(0.1)}
    options |= {"directory": directory, "save_every": 3, "progress": False}
    with jax.numpy_dtype_promotion("standard"):
        return tpu_embed.fit(engine, loss, source, **options)


def train(devices, directory):
    """Fail in one process after four steps, then go on; return what was trained, and the error."""
    engine = make_engine(devices, "mod")
    try:
        call(engine, failing(), directory)
    except Exception as raised:
        error = str(raised), raised.__notes__[-1]
    report = call(engine, parts(STEPS), directory)
    return *left_by(engine, report), report.loss, error


def left_by(engine, report):
    return arrays(engine, report.state), np.asarray(report.model["scale"])


def small(directory, source, **options):
    """Train a living table by `fit`; return its keys and their rows."""
    table = tpu_embed.TableConfig(64, 2, name="t", vocabulary=tpu_embed.DynamicVocabulary())
    engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table), o.SGD(0.1), mesh=mesh(2))
    options |= {"directory": directory, "save_every": 1_000, "progress": False}
    report = tpu_embed.fit(engine, lambda found: (found**2).mean(), source, **options)
    keys, _ = engine.vocabularies.keys("t")
    return keys, engine.rows(report.state, "t", keys=keys)


def keys_of(steps, seconds=0.0):
    """Yield this process's parts of batches of keys, the later ones slowly."""
    for step in range(steps):
        time.sleep(seconds if step > 3 else 0)
        yield part(np.random.default_rng(step).integers(0, 50, 8))


def stop(steps, directory):
    """Train until SIGTERM to one process ends all, and go on; return this, and how it ended."""

    def callback(report):
        if report.step == 3 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        small(directory, keys_of(steps, seconds=0.2), callback=callback, report_every=1)
    except SystemExit as error:
        ended = error.code, error.__notes__[-1]
    (step,) = (int(one.name) for one in directory.iterdir() if one.name.isdigit())
    return small(directory, keys_of(steps)), step, ended


def undisturbed(devices):
    """Return what is trained without an error."""
    engine = make_engine(devices, "mod")
    return left_by(engine, call(engine, parts(STEPS), None))


def with_times(count):
    """Yield the same parts, with a number per event of the jagged feature."""
    for ids, wanted in parts(count):
        yield ids, wanted, EventValues("path", np.float32(ids["path"].values % 3))


def loss_of_events(model, activations, wanted, times, *, rng):
    path, drawn = activations["path"], jax.random.uniform(rng, (8, 1))
    scaled = path.with_values(path.values * times.values[..., None])
    return loss(model, activations | {"path": scaled, "user": activations["user"] * drawn}, wanted)


def in_parts(devices, directory):
    """Train in two parts per batch, until the patience for what is measured ends; return all.

    Each process measures something else; the numbers of the first one count.
    """
    engine, seen = make_engine(devices, "mod"), []

    def measure(report):
        seen.append(report.step)
        return {"score": abs(report.step - 4) * (-1) ** jax.process_index()}

    options = {"measure": measure, "evaluate_every": 2, "best": Best("score", "min", patience=2)}
    options |= {"loss": loss_of_events, "micro_batches": 2}
    report = call(engine, with_times(12), directory, **options)
    return left_by(engine, report), (report.step, report.evaluation, seen)
