"""`Order`: threads wait for each other in one process, and are refused in several."""

import threading
from concurrent import futures
from unittest import mock

import pytest

from tpu_embed.processes import Order

LONG = 60


class Worker(threading.Thread):
    """A thread that has an order until it is told to end."""

    def __init__(self, order):
        super().__init__(daemon=True)
        self.order, self.stopped, self.goes_on = order, False, threading.Event()

    def run(self):
        self.order.run(lambda: None)
        self.goes_on.wait(LONG)


@pytest.fixture
def several():
    with mock.patch("jax.process_count", return_value=2):
        yield


def in_a_thread(act):
    """Return what a call in another thread returns or raises."""
    with futures.ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(act).result(LONG)
        except RuntimeError as error:
            return str(error)


def test_in_one_process_threads_wait():
    order, done = Order(), []

    def add():
        before = len(done)
        done.append(before)

    with futures.ThreadPoolExecutor(20) as pool:
        [pool.submit(order.run, add) for _ in range(20)]
    assert done == list(range(20))
    order.let(mock.Mock())  # no thread is refused
    assert in_a_thread(lambda: order.run(lambda: "it")) == "it"


@pytest.mark.usefixtures("several")
def test_a_second_thread_is_refused():
    order = Order()
    assert order.run(lambda: order.run(lambda: 1)) == 1  # the same thread may call it inside
    beside = order.run(lambda: in_a_thread(lambda: order.run(lambda: 1)))
    assert beside.startswith("place: expected calls one after the other, each to its end, got one")
    assert in_a_thread(lambda: order.run(lambda: 1)) == 1


@pytest.mark.usefixtures("several")
def test_all_are_refused_until_a_worker_ends():
    order = Order()
    worker = Worker(order)
    order.let(worker)
    worker.start()
    for act in (lambda: order.run(lambda: 1), lambda: order.let(Worker(order))):
        with pytest.raises(RuntimeError, match="Prefetcher that has not ended; close it first"):
            act()
    worker.stopped = True
    worker.goes_on.set()
    assert order.run(lambda: 1) == 1
    never_started = Worker(order)
    order.let(never_started)
    never_started.stopped = True
    assert order.run(lambda: 1) == 1


@pytest.mark.usefixtures("several")
def test_after_an_interrupt_the_processes_are_out_of_step():
    order = Order()
    for error in (ValueError("bad id"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            order.run(mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="got one that was interrupted; end all processes"):
        order.run(lambda: 1)
