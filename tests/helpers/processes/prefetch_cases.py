"""What the tests of `Prefetcher` run in several processes, through `process_cases.py`."""

import itertools
import time

import jax
from process_cases import BATCH, STEPS, arrays, draw, gradients, is_last, make_engine, part, told

from tpu_embed.data import Prefetcher

LAST = 2
"""The batch after which things go wrong."""


def parts(count):
    """Yield this process's parts of batches, now and then slowly, not everywhere at once."""
    for step in range(count):
        if (step + jax.process_index()) % 3 == 0:
            time.sleep(0.05)
        yield draw(step), part(range(step, step + BATCH))


def train(devices):
    """Train; before each step the loop itself places a batch that is only looked up.

    Returns tables, slots and step; and labels.
    """
    engine, labels = make_engine(devices, "mod"), []
    state = engine.init(jax.random.key(0))
    for batch, label in Prefetcher(engine, parts(STEPS), depth=2):
        engine.lookup(state, engine.place(draw(STEPS + int(state.step)), training=False))
        state = engine.update_in_place(state, batch, gradients(engine.lookup(state, batch)))
        labels.append(list(label))
    return arrays(engine, state), labels


def left_half_way(devices, how):
    """Leave a prefetcher after one batch, then train with a new one, several times."""
    engine = make_engine(devices, "mod")
    state = engine.init(jax.random.key(0))
    for depth in (1, 3):
        batches = Prefetcher(engine, parts(20), depth)
        next(iter(batches))
        time.sleep(0.1 * jax.process_index())
        if how == "closed":
            batches.close()
        del batches
        engine.place(draw(7))
    for batch, _ in Prefetcher(engine, parts(STEPS)):
        state = engine.update_in_place(state, batch, gradients(engine.lookup(state, batch)))
    return arrays(engine, state)


def taken(batches):
    """Return the labels of the batches that came, and what was raised after them."""
    seen = []
    return seen, told(lambda: seen.extend(next(iter(label)) for _, label in batches))


def faults(devices):
    """Return what comes of sources that end or fail in the last process; then of a good one."""

    def failing():
        yield from parts(LAST)
        raise OSError("disk gone")

    def bad():
        yield from parts(LAST)
        features, label = draw(LAST), part(range(BATCH))
        yield features | {"user": features["user"] + 100}, label

    engine, found = make_engine(devices, "mod"), []
    for depth, other in itertools.product((1, 4), (lambda: parts(LAST), failing, bad)):
        found.append(taken(Prefetcher(engine, other() if is_last() else parts(5), depth)))
    found.append(taken(Prefetcher(engine, parts(5))))
    return found


class Numbers:
    """A source with a state of its own in each process."""

    def __init__(self):
        self.next = 10 * jax.process_index()

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return draw(self.next % 5), self.next

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


def positions(devices):
    """Return a position, and what follows it at once and in a new prefetcher."""
    engine = make_engine(devices, "mod")
    with Prefetcher(engine, Numbers(), depth=3) as batches:
        for _ in itertools.islice(batches, 4):
            pass
        position = batches.get_state()
        at_once = [number for _, number in itertools.islice(batches, 3)]
    again = Prefetcher(engine, Numbers())
    again.set_state(position)
    return position, at_once, [number for _, number in itertools.islice(again, 3)]


def raise_in_the_loop():
    """Raise in the loop of one process, which others wait for."""
    engine = make_engine(8, "mod")
    with Prefetcher(engine, parts(500)) as batches:
        for step, _ in enumerate(batches):
            if step == LAST and is_last():
                raise ValueError("mine alone")
