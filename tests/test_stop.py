"""Ctrl-C and SIGTERM wait until a loop looks; nothing of them is lost, and handlers come back."""

import functools
import itertools
import signal
from concurrent import futures

import pytest
from interrupt_cases import Interrupt

from tpu_embed import _stop
from tpu_embed._stop import Stop, check_stop

BOTH = (signal.SIGINT, signal.SIGTERM)


def handlers():
    return [signal.getsignal(number) for number in BOTH]


@pytest.fixture(autouse=True)
def handlers_come_back():
    before = handlers()
    yield
    assert handlers() == before
    assert _stop._current is None


def ask(*numbers):
    for number in numbers:
        signal.raise_signal(number)


def of_a_stop(code):
    return code.co_filename == _stop.__file__


def steps_of(step):
    """Make steps in a `Stop`, each of which a function makes; return how many were whole."""
    done = []
    try:
        with Stop() as stop:
            for number in range(4):
                step(number)
                done.append(number)
                stop.at(number)
    except BaseException as error:
        return len(done), error
    return len(done), None


SIGNALS = [
    ([signal.SIGINT], 3, KeyboardInterrupt),
    ([signal.SIGTERM], 3, SystemExit),
    ([signal.SIGINT, signal.SIGTERM], 3, SystemExit),  # the last one counts
    ([signal.SIGTERM, signal.SIGINT], 3, KeyboardInterrupt),
    ([signal.SIGTERM, signal.SIGTERM], 3, SystemExit),
    ([signal.SIGINT, signal.SIGINT], 2, KeyboardInterrupt),  # a second Ctrl-C does not wait
]


@pytest.mark.parametrize(("numbers", "whole", "ends"), SIGNALS)
def test_a_signal_waits_for_the_end_of_its_step(numbers, whole, ends):
    count, error = steps_of(lambda step: step == 2 and ask(*numbers))
    assert (count, type(error)) == (whole, ends)
    assert ends is KeyboardInterrupt or error.code == 143


def test_ctrl_c_does_not_wait_while_another_signal_ends_the_loop():
    """While what was trained is saved, for example."""
    before = handlers()
    with Stop() as stop:
        ask(signal.SIGTERM)
        with pytest.raises(SystemExit):
            stop.check()
        assert not stop.at_once
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)
        assert stop.at_once
        assert handlers() == before  # so a third one needs nobody who looks


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_at_any_bytecode_it_leaves_the_handlers_of_before(times):
    interrupt_once = functools.partial(ask, *[signal.SIGINT] * times)
    before, told = handlers(), []
    for at in itertools.count(1):
        with Interrupt(of_a_stop, at, interrupt_once) as interrupt:
            with Stop() as stop:
                told.append(stop.at(1))
            assert interrupt.seen < at
        assert handlers() == before
        assert _stop._current is None
        if interrupt.seen < at:
            break
    assert at > 50
    assert not any(told)  # of one process: it raises, now or at the end of the block


def test_a_signal_that_nobody_looks_for_comes_at_the_end():
    def fail(_):
        ask(signal.SIGINT)
        raise OSError("disk gone")

    with pytest.raises(SystemExit), Stop():
        ask(signal.SIGTERM)
    count, error = steps_of(fail)
    assert (count, type(error)) == (0, KeyboardInterrupt)
    assert "disk gone" in str(error.__context__)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As a shell has Ctrl-C ignored in what runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert steps_of(lambda _: ask(number)) == (4, None)
    finally:
        signal.signal(number, before)


def test_a_loop_in_a_step_of_another_one_ends_both():
    inner = []

    def step(_):
        count, error = steps_of(lambda step: step == 1 and ask(signal.SIGINT))
        inner.append(count)
        raise error

    count, error = steps_of(step)
    assert (count, inner, type(error)) == (0, [2], KeyboardInterrupt)


def test_other_threads_have_no_handlers_and_get_no_signals():
    def work():
        before = handlers()
        with Stop() as stop:
            assert handlers() == before
            assert not stop.at(1)
        check_stop()

    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
        with Stop():
            ask(signal.SIGINT)
            pool.submit(work).result()
            with pytest.raises(KeyboardInterrupt):
                check_stop()
