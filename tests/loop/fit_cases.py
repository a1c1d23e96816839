"""Runs of `fit` that the tests of this folder begin in one way, and what these leave."""

import functools

import numpy as np
from flax import nnx
from loop_cases import (
    DENSE,
    Network,
    Stateful,
    left_by,
    loss_of_network,
    loss_of_tables,
    make_engine,
    of_items,
    plain_engine,
)

from tpu_embed import fit

STEPS = 14
engine = functools.cache(plain_engine)
full_engine = functools.cache(make_engine)


def trained(source=None, loss=loss_of_tables, **options):
    """Train one table without a network, on six batches where no source is given."""
    source = of_items(6) if source is None else source
    return fit(engine(), loss, source, **{"progress": False} | options)


def with_network():
    """Return the options of a run with a network of its own."""
    return {"loss": loss_of_network, "model": Network(nnx.Rngs(0)), "optimizer": DENSE}


def table(report):
    return np.asarray(engine().tables(report.state)["item"])


def steps_in(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def run(directory, source=None, **options):
    """Train tables of all kinds and a network, as a program that is started again would."""
    given = {"steps": STEPS, "save_every": 4, "keep": 2, "progress": False} | with_network()
    source = Stateful(STEPS) if source is None else source
    return fit(full_engine(), source=source, directory=directory, **given | options)


@functools.cache
def undisturbed():
    return left_by(full_engine(), run(None))


def assert_undisturbed(report):
    assert report.step == STEPS
    for found, expected in zip(left_by(full_engine(), report), undisturbed(), strict=True):
        np.testing.assert_array_equal(found, expected)
