"""Ctrl-C and SIGTERM end `fit` between two steps; the next call goes on to the undisturbed bits."""

import functools
import os
import signal
import sys
import threading
import time
from concurrent import futures

import jax
import numpy as np
import pytest
from fit_cases import STEPS, assert_undisturbed, run, steps_in
from interrupt_cases import ends_within
from loop_cases import Stateful, batches

from tpu_embed.io.checkpoint import tables

BOTH = (signal.SIGINT, signal.SIGTERM)


def handlers():
    return [signal.getsignal(number) for number in BOTH]


@pytest.fixture(autouse=True)
def handlers_come_back():
    before = handlers()
    with ends_within(120):
        yield
    assert handlers() == before


def last_step(directory):
    return max(steps_in(directory), default=0)


def send(number, after=0.0):
    time.sleep(after)
    os.kill(os.getpid(), number)


def join_saves():
    """Wait for what a run has left to a thread because it had to end at once."""
    for thread in threading.enumerate():
        if thread.name == "tpu_embed save":
            thread.join()


class Sending(Stateful):
    """The batches; something happens in the thread that reads them, before one of them is read."""

    def __init__(self, at, happens):
        super().__init__(STEPS)
        self.happens_at, self.happens = at, happens

    def __next__(self):
        if self.at == self.happens_at:
            self.happens_at = None
            self.happens()
        return super().__next__()


def ended_by(number):
    """Check that the block ends as a signal asks for."""
    if number == signal.SIGINT:
        return pytest.raises(KeyboardInterrupt)
    return pytest.raises(SystemExit, check=lambda error: error.code == 143)


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.whole)])
def test_signals_at_random_moments(count, tmp_path):
    rng, done, directory = np.random.default_rng(count), 0, tmp_path / "first"
    for disturbed in range(count):
        at, number = int(rng.integers(done, STEPS)), BOTH[rng.integers(2)]
        source = Sending(at, functools.partial(send, number, after=rng.uniform(0, 0.02)))
        with ended_by(number) as error:
            run(directory, source)
        before, done = done, last_step(directory)
        assert before <= done <= at
        there = f"has step {done}; the same call goes on" if done else "there is no checkpoint"
        assert there in error.value.__notes__[-1]
        if done > STEPS - 4 or disturbed == count - 1:
            assert_undisturbed(run(directory))
            done, directory = 0, tmp_path / f"after {disturbed}"


@pytest.mark.parametrize(("where", "number"), [("source", BOTH[1]), ("evaluation", BOTH[0])])
def test_a_wait_for_data_ends(where, number, tmp_path):
    never = threading.Event()

    def wait():
        threading.Timer(0.5, send, [number]).start()
        never.wait()

    def endless():
        yield from batches(2)
        wait()

    options = {"evaluation": endless, "evaluate_every": 5} if where == "evaluation" else {}
    with ended_by(number):
        run(tmp_path, Stateful(STEPS) if options else Sending(5, wait), **options)
    assert last_step(tmp_path) == 5
    never.set()
    assert_undisturbed(run(tmp_path))


@pytest.mark.parametrize("number", BOTH)
def test_without_a_directory_it_ends_in_the_same_way(number):
    steps = []

    def callback(report):
        steps.append(report.step)
        send(number)

    with ended_by(number):
        run(None, callback=callback, report_every=3)
    assert steps == [3]


def test_a_second_ctrl_c_waits_for_nothing(tmp_path):
    def callback(report):
        if report.step == 6:
            send(signal.SIGINT)
            send(signal.SIGINT)
            raise AssertionError

    with ended_by(signal.SIGINT):
        run(tmp_path, callback=callback, report_every=1)
    join_saves()
    assert last_step(tmp_path) == 4
    assert_undisturbed(run(tmp_path))


def test_a_second_ctrl_c_does_not_wait_for_a_save(tmp_path, monkeypatch):
    """The save goes on in its thread; until it has ended, no other run writes to the directory."""
    disk, write = threading.Event(), tables.write

    def write_slowly(path, prepared):
        threading.Timer(0.5, send, [signal.SIGINT]).start()
        disk.wait()
        write(path, prepared)

    def callback(_):
        monkeypatch.setattr(tables, "write", write_slowly)
        send(signal.SIGINT)

    with ended_by(signal.SIGINT):
        run(tmp_path, callback=callback, report_every=6)
    assert last_step(tmp_path) == 4
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="expected no other run that writes there, got one that"):
        run(tmp_path)
    disk.set()
    join_saves()
    assert last_step(tmp_path) == 6
    assert_undisturbed(run(tmp_path))


def test_a_signal_in_the_last_save_is_not_lost(tmp_path, monkeypatch):
    write = tables.write

    def write_and_send(path, prepared):
        if path.parent.name.startswith(f"{STEPS}."):
            send(signal.SIGTERM)
        write(path, prepared)

    monkeypatch.setattr(tables, "write", write_and_send)
    with ended_by(signal.SIGTERM):
        run(tmp_path)
    assert last_step(tmp_path) == STEPS
    assert_undisturbed(run(tmp_path))


def test_a_handler_of_the_programs_own_runs_between_two_steps(tmp_path):
    asked = []

    def handler(number, frame):
        asked.append(number)
        if len(asked) == 2:
            sys.exit(3)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as error:
            run(tmp_path, callback=lambda _: send(signal.SIGTERM), report_every=3)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (error.value.code, last_step(tmp_path)) == (3, 6)
    assert_undisturbed(run(tmp_path))


def test_in_another_thread_it_trains_as_before():
    with futures.ThreadPoolExecutor(1) as pool:
        # Each thread sets for itself what it promotes.
        train = jax.numpy_dtype_promotion("standard")(run)
        assert_undisturbed(pool.submit(train, None).result())
