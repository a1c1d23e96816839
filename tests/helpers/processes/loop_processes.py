"""What the tests of `fit` run in several processes."""

import jax
import numpy as np
import optax
from process_cases import BATCH, arrays, draw, make_engine, part

import tpu_embed

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


def call(engine, source, directory):
    model = {"scale": np.ones((), np.float32)}
    with jax.numpy_dtype_promotion("standard"):
        return tpu_embed.fit(
            engine,
            loss,
            source,
            model=model,
            optimizer=optax.adam(0.1),
            directory=directory,
            save_every=3,
            progress=False,
        )


def train(devices, directory):
    """Fail in one process after four steps, then go on; return what was trained, and the error."""
    engine, error = make_engine(devices, "mod"), None
    try:
        call(engine, failing(), directory)
    except Exception as raised:
        error = str(raised), raised.__notes__[-1]
    report = call(engine, parts(STEPS), directory)
    return arrays(engine, report.state), np.asarray(report.model["scale"]), report.loss, error


def undisturbed(devices):
    """Return what is trained without an error."""
    engine = make_engine(devices, "mod")
    report = call(engine, parts(STEPS), None)
    return arrays(engine, report.state), np.asarray(report.model["scale"])
