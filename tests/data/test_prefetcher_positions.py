"""`Prefetcher.get_state`: what was taken, as JSON, and the same batches after it."""

import itertools
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from data_cases import SIZE, batch, engine, source, wait_for
from interrupt_cases import Interrupt, from_a_signal

from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager


class Counter:
    """A source that changes the state which it has returned."""

    def __init__(self):
        self.state = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        self.state["next"] += 1
        return batch(self.state["next"]), self.state["next"]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize("make", [lambda: source(9), Counter, lambda: list(source(9))])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_position_goes_through_json(make, taken):
    with Prefetcher(engine(), make(), depth=3) as batches:
        for _ in range(taken):
            next(batches)
        time.sleep(0.02)  # more is placed ahead
        position = json.loads(json.dumps(batches.get_state()))
        expected = [number for _, number in itertools.islice(batches, 3)]
    resumed = Prefetcher(engine(), make())
    resumed.set_state(position)
    assert resumed.get_state() == position
    assert [number for _, number in itertools.islice(resumed, 3)] == expected
    assert resumed.get_state()["batches"] == taken + 3


def test_positions_that_are_refused():
    plain, counter = Prefetcher(engine(), source(3)), Prefetcher(engine(), Counter())
    for position in (None, {}, {"batches": -1}, {"batches": True}, [3]):
        with pytest.raises(ValueError, match=r"set_state: expected a position, got .*; give what"):
            plain.set_state(position)
    with pytest.raises(ValueError, match="expected a source with get_state and set_state"):
        plain.set_state(counter.get_state())
    with pytest.raises(ValueError, match="expected one state per process, 1 in all, got no states"):
        counter.set_state(plain.get_state())
    two = {"batches": 1, "sources": [{"json": 1}, {"json": 2}]}
    with pytest.raises(ValueError, match="got 2 states; continue with as many processes"):
        counter.set_state(two)
    for one in (None, 3, {}, {"bytes": "!"}, {"bytes": 3}, {"json": 1, "bytes": "e30="}):
        with pytest.raises(ValueError, match=r"expected a source's state, got .*; give what"):
            counter.set_state({"batches": 1, "sources": [one]})
    plain.set_state({"batches": 4})
    with pytest.raises(ValueError, match="expected 4 batches before the next one, got 3"):
        next(plain)
    next(counter)
    with pytest.raises(RuntimeError, match="expected a call before the first batch"):
        counter.set_state(counter.get_state())


def test_bytes_are_a_state_too():
    class Bytes(Counter):
        def get_state(self):
            return bytes([self.state["next"], 255])

        def set_state(self, state):
            self.state = {"next": state[0]}

    batches = Prefetcher(engine(), Bytes())
    next(batches), next(batches)
    resumed = Prefetcher(engine(), Bytes())
    resumed.set_state(json.loads(json.dumps(batches.get_state())))
    assert next(resumed)[1] == 3


def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(tmp_path):
    def learn(state, batches, steps):
        for placed, number in itertools.islice(batches, steps):
            gradients = {"x": np.full((SIZE, 2), number + 1, np.float32)}
            state = engine().update(state, placed, gradients)
        return state

    initial = engine().init(jax.random.key(0))
    whole = learn(initial, Prefetcher(engine(), source(9)), 9)
    with CheckpointManager(tmp_path, engine()) as manager:
        batches = Prefetcher(engine(), source(9), depth=3)
        manager.save(4, learn(initial, batches, 4), position=batches.get_state())
    with CheckpointManager(tmp_path, engine()) as manager:
        found = manager.restore()
    resumed = Prefetcher(engine(), source(9))
    resumed.set_state(found.position)
    jax.tree.map(np.testing.assert_array_equal, learn(found.state, resumed, 9), whole)


def test_no_more_is_placed_ahead_after_a_position():
    """Not as many batches as were taken before it."""
    read = []

    def counted():
        for number in range(1_000):
            read.append(number)
            yield batch(number)

    with Prefetcher(engine(), counted(), depth=3) as batches:
        batches.set_state({"batches": 50})
        next(batches)
        wait_for(lambda: len(read) >= 54)
        time.sleep(0.1)  # the thread has time for more
        assert len(read) == 50 + 1 + 3


def of_the_prefetcher(code):
    return Path(code.co_filename).name in ("prefetcher.py", "worker.py")


def test_no_batch_comes_twice_after_an_interrupt():
    """Whichever line it hits, the position says which batch the loop took last."""
    hit, numbered = 0, [(batch(number), number) for number in range(1, 5)]
    for at in range(1, 300):
        with Prefetcher(engine(), numbered) as batches:
            given = [next(batches)[1]]
            with Interrupt(of_the_prefetcher, at, from_a_signal, only_signals=True) as interrupt:
                given.append(next(batches)[1])
            hit += interrupt.seen >= at
            taken = batches.get_state()["batches"]
            assert [number for _, number in batches] == list(range(taken + 1, 5))
            assert given[-1] <= taken
        if interrupt.seen < at:
            break
    assert 10 < hit < 299, "all places of a call were reached"
