"""Ctrl-C anywhere while tables on the host are trained: the same bits, and no row is lost."""

import jax
import numpy as np
import pytest
from host_interrupt_cases import (
    ADMITTING,
    HOMES,
    PLACING,
    STATEFUL,
    assert_same,
    features,
    ids_of,
    in_files,
    rows_of,
)
from interrupt_cases import Interrupt, from_a_signal
from living_cases import mesh

import tpu_embed
from tpu_embed import HostStorage, io
from tpu_embed import optimizers as o


class Run:
    """An engine whose table is on the host, its newest state, and the batches placed ahead."""

    def __init__(self):
        storage = HostStorage(device_rows=6)
        self.engine = tpu_embed.EmbeddingEngine(
            features(storage), o.Adagrad(0.5), mesh=mesh(1), lookahead=0
        )
        self.begin()

    def begin(self):
        """Begin anew, whatever has happened."""
        self.state = self.engine.init(jax.random.key(0))
        self.rewind()

    def rewind(self):
        """Forget the batches that are placed ahead."""
        self.engine.vocabularies.rewind(self.state)
        self.ahead = []

    @property
    def done(self):
        return self.engine.vocabularies.admitted

    def place(self):
        """Place batches until two are ahead."""
        while (placed := self.engine.vocabularies.placed) < self.done + 2:
            self.ahead.append(self.engine.place(ids_of(placed)))

    def admit(self):
        self.state, self.ahead[0] = self.engine.admit(self.state, self.ahead[0])

    def update(self):
        batch = self.ahead.pop(0)
        activations = self.engine.lookup(self.state, batch)
        self.state = self.engine.update_in_place(self.state, batch, activations)

    def train(self, steps):
        while self.done < steps:
            self.place()
            self.admit()
            self.update()

    def rows(self):
        return rows_of(self.engine, self.state)


@pytest.fixture(scope="module")
def undisturbed():
    """Rows after each number of steps."""
    run, found = Run(), []
    for steps in range(12):
        run.train(steps)
        found.append(run.rows())
    assert run.engine.storage.counters["items"]["late"] > 0
    return found


STRIDES = [29, pytest.param(1, marks=pytest.mark.whole)]
IN_PLACE = in_files(*HOMES, *PLACING)
IN_ADMIT = in_files(*HOMES, *ADMITTING, "vocabulary/vocabularies", "vocabulary/timeline")


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.quick(1)
def test_a_place_that_is_interrupted_anywhere_can_be_repeated(training, stride, undisturbed):
    run = Run()
    run.train(5)
    for at in range(1, 10_000, stride):
        with Interrupt(IN_PLACE, at, from_a_signal) as interrupt:
            run.engine.place(ids_of(6), training=training)
        assert run.engine.vocabularies.placed in (6, 6 + training)
        run.rewind()
        run.ahead.append(run.engine.place(ids_of(5)))
        if interrupt.seen < at:
            break
    assert at > 200
    run.train(8)
    assert_same(run.rows(), undisturbed[8])


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.quick(1)
def test_an_admit_that_is_interrupted_anywhere_has_happened_or_not(steps, stride, undisturbed):
    """If it has, its state is lost, because it was not returned: then the run begins anew."""
    run, repeated = Run(), 0
    for at in range(1, 10_000, stride):
        run.train(steps)
        run.place()
        with Interrupt(IN_ADMIT, at, from_a_signal) as interrupt:
            run.admit()
        assert run.done in (steps, steps + 1)
        if interrupt.seen < at:
            break
        if run.done == steps:
            run.admit()
            run.update()
            repeated += 1
        else:
            run.begin()
        run.train(steps + 2)
        assert_same(run.rows(), undisturbed[steps + 2])
        run.begin()
    assert at > 200
    assert repeated > 0


IN_LOAD = in_files(*HOMES, "vocabulary/vocabularies", "vocabulary/timeline")


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.whole
def test_a_new_beginning_or_a_restore_that_is_interrupted_anywhere_can_be_repeated(
    saved, stride, undisturbed, tmp_path
):
    run, first = Run(), 3 if saved else 0
    run.train(first)
    run.rewind()
    io.save(tmp_path / "saved", run.engine, run.state)

    def begin():
        if saved:
            run.state, run.ahead = io.restore(tmp_path / "saved", run.engine).state, []
        else:
            run.begin()

    for at in range(1, 10_000, stride):
        run.train(first + 2)
        with Interrupt(IN_LOAD, at, from_a_signal) as interrupt:
            begin()
        begin()
        assert run.done == first
        if interrupt.seen < at:
            break
    assert at > 100
    run.train(first + 2)
    assert_same(run.rows(), undisturbed[first + 2])


def embedding(storage, pipelined):
    return tpu_embed.TPUEmbedding(
        features(storage),
        o.Adagrad(0.5),
        mesh=mesh(1),
        pipeline_execution_with_tensor_core=pipelined,
    )


def go_on(made, until):
    """Train until so many updates were applied, with a batch ahead; interrupted, call it again."""
    while (done := int(made.state.step)) < until:
        if made.dequeued is None:
            while made.waiting < 2:
                made.enqueue(ids_of(done + made.waiting))
            made.dequeue()
        activations = np.asarray(made.dequeued)
        made.apply_gradients(2 * activations + 1)


def check_sweep(pipelined, stride):
    made = embedding(HostStorage(device_rows=14), pipelined)
    resident = embedding(None, pipelined)
    go_on(made, 1)
    kind = in_files(*STATEFUL, *HOMES, *ADMITTING)
    for step in range(2, 20_000):
        at = 1 + (step - 2) * stride
        with Interrupt(kind, at, from_a_signal) as interrupt:
            go_on(made, step)
        go_on(made, step)
        if interrupt.seen < at:
            break
    assert step > 50
    counts = made.engine.storage.counters["items"]
    assert counts["brought"] > step / 2
    go_on(resident, step)
    assert_same(*(rows_of(one.engine, one.state) for one in (made, resident)))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_interrupted_anywhere_a_loop_goes_on_to_the_bits_of_a_resident_table(pipelined):
    check_sweep(pipelined, stride=53)


@pytest.mark.whole
@pytest.mark.parametrize("pipelined", [False, True])
def test_interrupted_at_every_bytecode(pipelined):
    check_sweep(pipelined, stride=1)
