"""Interrupt loops of one's own at random moments; the tests run this in a process of its own.

    python interrupted_loops.py embedding|functional COUNT SEED

A timer raises KeyboardInterrupt in the main thread, as Ctrl-C does. After each, the loop goes on as
a notebook would: with what the interrupted call has left, or, where a call refuses that, as its
message says. At its end, everything has the bits of a loop that was never interrupted. Prints
how many interrupts there were, and after how many of them the state was kept.
"""

import faulthandler
import signal
import sys
import time

import jax
import numpy as np

if __name__ == "__main__":  # not where pytest looks for doctests
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)

from loop_cases import batches, left_by, make_engine

import tpu_embed
from tpu_embed.data import Prefetcher

STEPS = 12
DATA = [features for features, _ in batches(STEPS)]
HANGS = 120
"""Seconds after which a call that does not return counts as a hang."""


class Embedding:
    """The loop of `docs/stateful.md`."""

    def __init__(self):
        engine = make_engine(1)
        self.made = tpu_embed.TPUEmbedding(
            engine.structure.unflatten([one.config for one in engine.layout.features]),
            tpu_embed.optimizers.Adagrad(0.5),
            mesh=engine.layout.axes.mesh,
        )
        self.engine = self.made.engine

    def begin(self):
        first = self.engine.init(jax.random.key(0))
        self.engine.vocabularies.rewind(first)
        self.made.state = first

    def go_on(self):
        made = self.made
        while (step := int(made.state.step)) < STEPS:
            if made.dequeued is None and not made.waiting:
                made.enqueue(DATA[step])
            made.apply_gradients(made.dequeue() if made.dequeued is None else made.dequeued)

    def repair(self):
        self.engine.vocabularies.rewind(self.made.state)

    @property
    def state(self):
        return self.made.state


class Functional:
    """A loop of the functional API, whose batches a `Prefetcher` places."""

    def __init__(self):
        self.engine, self.batches = make_engine(1), None

    def begin(self):
        self.close()
        first = self.engine.init(jax.random.key(0))
        self.engine.vocabularies.rewind(first)
        self.state = first

    def close(self):
        if self.batches is not None:
            self.batches.close()
            self.batches = None

    def go_on(self):
        engine = self.engine
        if self.batches is None:
            self.batches = Prefetcher(engine, iter(DATA[int(self.state.step) :]))
        for batch in self.batches:
            self.state, batch = engine.admit(self.state, batch)
            activations = engine.lookup(self.state, batch)
            self.state = engine.update_in_place(self.state, batch, activations)

    def repair(self):
        """What was placed ahead, and the batch in hand, are thrown away and placed again."""
        self.close()
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            raise RuntimeError("the state was not returned")
        if self.engine.vocabularies.admitted != int(self.state.step):
            raise RuntimeError("admitted, not updated")
        self.engine.vocabularies.rewind(self.state)


def main(which, count, seed):
    """Interrupt a loop so many times, and check what it has trained."""
    loop = {"embedding": Embedding, "functional": Functional}[which]()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    rng, interrupts, lost = np.random.default_rng(seed), 0, 0
    for _ in range(2):  # the second time, all programs are compiled
        loop.begin()
        begun = time.monotonic()
        loop.go_on()
        seconds = (time.monotonic() - begun) / STEPS
    expected = left_by(loop.engine, loop)
    loop.begin()
    while True:
        armed = rng.uniform(0, 3) * seconds + 1e-6 if interrupts < count else 0
        faulthandler.dump_traceback_later(HANGS, exit=True)
        ended = attempt(loop, armed)
        if ended is None:
            for a, b in zip(left_by(loop.engine, loop), expected, strict=True):
                np.testing.assert_array_equal(a, b)
            if interrupts == count:
                break
            loop.begin()
            continue
        interrupts += isinstance(ended, KeyboardInterrupt)
        # The functional loop has lost the batch in hand; the other one looks what there is.
        if which == "functional" or not isinstance(ended, KeyboardInterrupt):
            lost += not mended(loop)
    print(interrupts, interrupts - lost)


def attempt(loop, seconds):
    """Go on, and be interrupted after some seconds; return what has ended the loop, or None."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            loop.go_on()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, ValueError, RuntimeError) as error:
        return error


def mended(loop):
    """Do what a refusal says, or begin anew; return whether the state was kept."""
    try:
        loop.repair()
    except (ValueError, RuntimeError):
        loop.begin()
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
