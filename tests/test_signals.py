"""Ctrl-C anywhere in the training loop: the loop can continue, and gives the same bits."""

import contextlib
import itertools
import signal
import sys
import threading

import jax
import numpy as np
import pytest
from facade_cases import assert_same, batch, gradients, make_embedding, make_embedding_of
from interrupt_cases import Interrupt, at_once, from_a_signal

import tpu_embed
from tpu_embed import optimizers as o
from tpu_embed._signals import SignalsDeferred

STEP = (
    "tpu_embed/stateful/tpu_embedding.py",
    "tpu_embed/stateful/state_keeper.py",
    "tpu_embed/stateful/record.py",
    "tpu_embed/_calls.py",
    "engine/engine.py",
)
UPDATE = {"update", "call_into", "change", "derive", "settle", "settled"}


def in_a_step(code):
    return code.co_filename.endswith(STEP)


def in_an_update(code):
    return in_a_step(code) and code.co_name in UPDATE


def in_jax(code):
    pxla = code.co_filename.endswith("jax/_src/interpreters/pxla.py")
    return in_an_update(code) or (pxla and code.co_name in ("__call__", "_handle_token_bufs"))


def go_on(embedding, until, *, ahead=1):
    """Train until so many updates were applied; after an interrupt, call it again."""
    while (done := int(embedding.state.step)) < until:
        activations = embedding.dequeued
        if activations is None:
            while embedding.waiting < ahead:
                embedding.enqueue(batch(done + embedding.waiting))
            activations = embedding.dequeue()
        embedding.apply_gradients(gradients(activations))


def sweep(embedding, kind, act, *, ahead=1, stride=1):
    """Train a step for every bytecode that it has, interrupted before it; return the steps."""
    before = sys.gettrace()
    go_on(embedding, 1, ahead=ahead)
    for step in range(2, 10_000):
        at = 1 + (step - 2) * stride
        with Interrupt(kind, at, act) as interrupt:
            go_on(embedding, step, ahead=ahead)
        assert sys.gettrace() is before
        go_on(embedding, step, ahead=ahead)
        if interrupt.seen < at:
            return step
    raise AssertionError("the sweep has no end")


CASES = [(from_a_signal, True), (at_once, False)]
OTHERS = [(at_once, True), (from_a_signal, False)]


def assert_sweep_has_the_bits_of_an_undisturbed_run(kind, act, pipelined, stride=1):
    options = {"pipeline_execution_with_tensor_core": pipelined}
    embedding, other = make_embedding(**options), make_embedding(**options)
    ahead = 2 if pipelined else 1
    steps = sweep(embedding, kind, act, ahead=ahead, stride=stride)
    assert steps > 50
    go_on(other, steps, ahead=ahead)
    assert_same(embedding.retrieve(), other.retrieve())
    assert_same(embedding.state, other.state)


@pytest.mark.parametrize(("act", "pipelined"), CASES)
@pytest.mark.quick(1)
def test_interrupted_anywhere_the_loop_goes_on_to_the_same_bits(act, pipelined):
    assert_sweep_has_the_bits_of_an_undisturbed_run(in_a_step, act, pipelined, stride=23)


@pytest.mark.parametrize(("act", "pipelined"), CASES)
@pytest.mark.quick(1)
def test_interrupted_at_every_bytecode_of_an_update(act, pipelined):
    assert_sweep_has_the_bits_of_an_undisturbed_run(in_an_update, act, pipelined)


@pytest.mark.whole
@pytest.mark.parametrize(("act", "pipelined"), CASES + OTHERS)
def test_interrupted_at_every_bytecode(act, pipelined):
    assert_sweep_has_the_bits_of_an_undisturbed_run(in_a_step, act, pipelined)


def _calls_the_host(gradient, row, slots, learning_rate, step):
    jax.debug.callback(lambda: None)
    return row - learning_rate * gradient, slots


def test_a_signal_inside_of_jax_waits_until_the_state_is_stored():
    """A program that calls the host is called through Python by JAX, which has it halfway."""
    table = tpu_embed.TableConfig(4, 2, name="t")
    rule = o.CustomOptimizer(_calls_the_host, {}, 0.5)
    embedding = make_embedding_of(tpu_embed.FeatureConfig(table), rule, devices=1)

    def step(kind, at):
        embedding.enqueue(np.array([0, 1]))
        activations = np.asarray(embedding.dequeue())
        with Interrupt(kind, at, from_a_signal) as interrupt:
            embedding.apply_gradients(np.ones((2, 2), np.float32))
        if embedding.dequeued is not None:
            embedding.apply_gradients(np.ones((2, 2), np.float32))
        return activations, interrupt.seen

    expected, of_an_update = step(in_an_update, 0)
    for at in itertools.count(1):
        expected = expected - np.float32(0.5)
        activations, seen = step(in_jax, at)
        np.testing.assert_array_equal(activations, expected)
        if seen < at:
            break
    assert seen > of_an_update + 50


class HandledError(Exception):
    pass


@contextlib.contextmanager
def handler_of(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _raise_handled(number, _):
    raise HandledError(number)


def test_deferred_handlers_run_at_the_end_each_once_and_are_back():
    def raise_deferred(*numbers):
        with SignalsDeferred():
            for number in numbers:
                signal.raise_signal(number)
            assert ran == []

    ran = []
    with handler_of(signal.SIGUSR1, lambda number, frame: ran.append((number, frame))):
        mine = signal.getsignal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            raise_deferred(signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1)
        assert [number for number, _ in ran] == [signal.SIGUSR1] * 2
        assert all(frame is not None for _, frame in ran)
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_context_in_another_one_leaves_signals_to_the_outer_one():
    def inner():
        with SignalsDeferred():
            # A generator that has ended does not say any more who has called it.
            done.extend(signal.raise_signal(number) for number in [signal.SIGINT])

    def outer():
        with SignalsDeferred():
            inner()
            done.append("outer")

    done = []
    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == [None, "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_whatever_a_handler_raises_is_deferred():
    def raise_deferred():
        with SignalsDeferred():
            signal.raise_signal(signal.SIGTERM)
            done.append(True)

    done = []
    with handler_of(signal.SIGTERM, _raise_handled):
        with pytest.raises(HandledError):
            raise_deferred()
        with pytest.raises(HandledError):
            signal.raise_signal(signal.SIGTERM)
    assert done


def test_signals_without_a_handler_of_python_are_left_alone():
    with handler_of(signal.SIGUSR1, signal.SIG_IGN), SignalsDeferred():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)


def test_in_another_thread_nothing_is_deferred():
    def run():
        with SignalsDeferred():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize("act", [from_a_signal, at_once])
def test_interrupted_while_deferring_handlers_are_back(act):
    """Whatever the bytecode; another signal waits, and raises too.

    Where something that is no signal keeps them from coming back, the next signal brings them.
    """

    def in_this(code):
        return code.co_filename.endswith("tpu_embed/_signals.py")

    def defer_a_signal():
        with SignalsDeferred():
            signal.raise_signal(signal.SIGUSR1)

    with handler_of(signal.SIGUSR1, _raise_handled):
        for at in itertools.count(1):
            interrupt = Interrupt(in_this, at, act)
            with interrupt, contextlib.suppress(HandledError):
                defer_a_signal()
            if act is at_once:
                with pytest.raises(HandledError):
                    signal.raise_signal(signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) is _raise_handled
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if interrupt.seen < at:
                break
    assert interrupt.seen > 40
