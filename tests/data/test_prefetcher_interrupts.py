"""Ctrl-C anywhere in a loop over a `Prefetcher` of batches for a table on the host.

The thread of the prefetcher places ahead meanwhile. Whatever was interrupted, the run can go on to
the bits of one that was not: nothing waits for ever, and no batch is left out or trained twice.
"""

import itertools

import jax
import numpy as np
import pytest
from data_cases import threads, wait_for
from host_interrupt_cases import (
    ADMITTING,
    HOMES,
    PLACING,
    assert_same,
    features,
    ids_of,
    in_files,
    rows_of,
)
from interrupt_cases import Interrupt, ends_within, from_a_signal
from living_cases import mesh

import tpu_embed
from tpu_embed import HostStorage
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher

IN_DATA = ("data/prefetcher", "data/worker", "_changes", "processes/turns", "core/place/turn")
IN_NEXT = in_files(*IN_DATA)
IN_A_STEP = in_files(*IN_DATA, *HOMES, *PLACING, *ADMITTING)


class Loop:
    """An engine, its newest state, and a prefetcher whose batches follow it."""

    def __init__(self):
        self.engine = tpu_embed.EmbeddingEngine(
            features(HostStorage(device_rows=10)), o.Adagrad(0.5), mesh=mesh(1), lookahead=0
        )
        self.batches, self.batch, self.taken = None, None, 0
        self.begin()

    @property
    def maps(self):
        return self.engine.vocabularies

    def begin(self):
        """Begin the run anew."""
        self.close()
        self.state = self.engine.init(jax.random.key(0))
        self.maps.rewind(self.state)

    def close(self):
        if self.batches is not None:
            self.batches.close()
            self.batches = None
        self.batch = None

    def leave(self):
        """Close the prefetcher and forget what it has placed; interrupted, call it again."""
        self.close()
        if self.maps.placed > self.maps.admitted:
            self.maps.rewind(self.state)

    def step(self):
        if self.batches is None:
            source = (ids_of(step) for step in itertools.count(self.maps.admitted))
            self.batches, self.taken = Prefetcher(self.engine, source, depth=2), 0
        if self.batch is None:
            self.batch = next(self.batches)
            self.taken += 1
        if not self.batch.admitted:
            self.state, self.batch = self.engine.admit(self.state, self.batch)
        activations = self.engine.lookup(self.state, self.batch)
        self.state = self.engine.update_in_place(self.state, self.batch, activations)
        self.batch = None

    def recover(self, *, anew):
        """Let the run go on after an interrupt in the middle of a step that was not its update.

        Args:
          anew: whether to leave the prefetcher even where it could go on.
        """
        admitted, updated = self.maps.admitted, int(self.state.step)
        is_admitted = self.batch is not None and self.batch.admitted
        if admitted > updated and not is_admitted:
            self.begin()  # the batch was admitted, and the state has not come back
            return
        if is_admitted:
            return
        # A batch that was taken and has not come to the loop is lost, but not its number.
        lost = self.batches is not None and self.batches.get_state()["batches"] != self.taken
        if anew:
            self.maps.rewind(self.state)  # it waits for what the thread was asked to place
        if anew or lost:
            self.leave()

    def train(self, steps):
        while int(self.state.step) < steps:
            self.step()


@pytest.fixture(scope="module")
def undisturbed():
    """Rows after each number of steps of a run without a prefetcher."""
    engine = tpu_embed.EmbeddingEngine(
        features(HostStorage(device_rows=10)), o.Adagrad(0.5), mesh=mesh(1), lookahead=0
    )
    state, found = engine.init(jax.random.key(0)), []
    for step in range(8):
        state, batch = engine.admit(state, engine.place(ids_of(step)))
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
        found.append(rows_of(engine, state))
    return found


def sweep(kind, stride, undisturbed, *, anew):
    """Interrupt the third step of a run at its points, one after the other; return the points."""
    loop = Loop()
    for at in range(1, 20_000, stride):
        with ends_within(60):
            loop.train(2)
            with Interrupt(kind, at, from_a_signal, only_signals=True) as interrupt:
                loop.step()
            loop.recover(anew=anew)
            loop.train(4)
            loop.leave()
            assert_same(rows_of(loop.engine, loop.state), undisturbed[3])
            if interrupt.seen < at:
                break
            loop.begin()
    wait_for(lambda: not threads())
    return at


STRIDES = [pytest.param(3, id="some"), pytest.param(1, marks=pytest.mark.whole, id="every")]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.quick(1)
def test_in_the_prefetcher(anew, stride, undisturbed):
    assert sweep(IN_NEXT, stride, undisturbed, anew=anew) > 10


@pytest.mark.parametrize("stride", [pytest.param(41, id="some"), STRIDES[1]])
@pytest.mark.quick(1)
def test_in_a_step(stride, undisturbed):
    assert sweep(IN_A_STEP, stride, undisturbed, anew=False) > 100


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.quick(1)
def test_in_the_end_of_a_pass(stride, undisturbed):
    """Closing and forgetting what was placed ahead, which waits for the thread's turns."""
    loop = Loop()
    for at in range(1, 20_000, stride):
        with ends_within(60):
            loop.train(2)
            with Interrupt(IN_A_STEP, at, from_a_signal, only_signals=True) as interrupt:
                loop.leave()
            loop.leave()
            loop.train(4)
            loop.leave()
            assert_same(rows_of(loop.engine, loop.state), undisturbed[3])
            if interrupt.seen < at:
                break
            loop.begin()
    assert at > 10


@pytest.mark.parametrize("stride", STRIDES)
def test_an_error_of_the_source_is_not_lost(stride):
    """An interrupt while the thread ends must not make the data look as if it had ended."""

    def failing():
        yield np.arange(4)
        raise OSError("disk gone")

    engine, raised = Loop().engine, 0
    for at in range(1, 5_000, stride):
        engine.vocabularies.rewind(engine.init(jax.random.key(0)))
        batches = Prefetcher(engine, failing())
        with ends_within(60):
            next(batches)
            found = None
            with Interrupt(IN_NEXT, at, from_a_signal, only_signals=True) as interrupt:
                try:
                    next(batches)
                except OSError as error:
                    found = error
            if found is None:
                with pytest.raises(OSError, match="disk gone"):
                    next(batches)
                raised += 1
        if interrupt.seen < at:
            break
    assert raised > 1
