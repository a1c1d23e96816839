"""`Order`: threads wait for each other in one process, and are refused in several."""

import threading
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

    def end(self):
        self.stopped = True
        self.goes_on.set()


@pytest.fixture
def several():
    with mock.patch("jax.process_count", return_value=2):
        yield


def in_a_thread(act):
    """Return what a call in another thread returns or raises."""
    found = []

    def run():
        try:
            found.append(act())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    return found[0]


def test_in_one_process_threads_wait():
    order, done = Order(), []

    def add():
        before = len(done)
        done.append(before)

    threads = [threading.Thread(target=order.run, args=(add,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
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
    worker.end()
    assert order.run(lambda: 1) == 1
    never_started = Worker(order)
    order.let(never_started)
    never_started.stopped = True
    assert order.run(lambda: 1) == 1


@pytest.mark.usefixtures("several")
def test_after_an_interrupt_the_processes_are_out_of_step():
    order = Order()

    def interrupted():
        raise KeyboardInterrupt

    def refused():
        raise ValueError("bad id")

    with pytest.raises(ValueError, match="bad id"):
        order.run(refused)
    with pytest.raises(KeyboardInterrupt):
        order.run(interrupted)
    with pytest.raises(RuntimeError, match="got one that was interrupted; end all processes"):
        order.run(lambda: 1)
