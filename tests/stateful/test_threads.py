"""The stateful API called from several threads: no call is refused, torn or blocked for long."""

import threading

import jax
import numpy as np
import pytest
from facade_cases import assert_same, batch, gradients, make_embedding

LONG = 60
"""Seconds after which a thread that waits has a deadlock."""


class Thread(threading.Thread):
    """A thread whose `join` raises what it raised, or that it does not end."""

    def __init__(self, target, *arguments):
        super().__init__(target=target, args=arguments, daemon=True)
        self.error = None
        self.start()

    def run(self):
        try:
            super().run()
        except BaseException as error:
            self.error = error

    def join(self, timeout=LONG):
        super().join(timeout)
        assert not self.is_alive(), "a deadlock"
        if self.error is not None:
            raise self.error


def waiting_for_gradients():
    """Return an embedding with a dequeued batch, and the gradients."""
    embedding = make_embedding()
    embedding.enqueue(batch(0))
    return embedding, gradients(embedding.dequeue())


@pytest.fixture
def during_updates(monkeypatch):
    """Return what sets a function that is called while an update runs, its state gone already."""

    def set_function(embedding, function):
        prepare = embedding.engine.prepare_update

        def prepared(*arguments):
            exchange = prepare(*arguments)
            work = exchange._work

            def run(call):
                state = work(call)
                function()
                return state

            exchange._work = run
            return exchange

        monkeypatch.setattr(embedding.engine, "prepare_update", prepared)

    return set_function


def test_other_threads_need_not_wait_for_an_update(during_updates):
    """The arrays of the state are gone just then, which is no fault."""
    embedding, given = waiting_for_gradients()
    place = embedding.engine.place
    calls = lambda: place(batch(1)), embedding.describe, lambda: embedding.waiting
    during_updates(embedding, lambda: [Thread(call).join() for call in calls])
    embedding.apply_gradients(given)
    assert int(embedding.state.step) == 1


def test_what_reads_the_tables_waits_for_an_update(during_updates):
    (embedding, given), after = waiting_for_gradients(), {}
    reads = {
        "state": lambda: embedding.state,
        "dequeued": lambda: embedding.dequeued,
        "retrieve": embedding.retrieve,
        "embedding_tables": lambda: embedding.embedding_tables,
    }
    threads = []

    def read(name):
        after[name] = reads[name]()

    during_updates(embedding, lambda: threads.extend(Thread(read, name) for name in reads))
    embedding.apply_gradients(given)
    for thread in threads:
        thread.join()
    assert after["state"] is embedding.state
    assert after["dequeued"] is None
    assert_same(after["retrieve"], embedding.retrieve())
    assert list(after["embedding_tables"]) == list(embedding.embedding_tables)


STEPS = 60


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_one_thread_enqueues_and_another_trains(pipelined):
    """Beside one that reads all the time; the bits are those of one thread."""
    options = {"pipeline_execution_with_tensor_core": pipelined}
    embedding, other = make_embedding(**options), make_embedding(**options)
    batches = [batch(n) for n in range(STEPS)]
    room, ready, trained = threading.Semaphore(4), threading.Semaphore(0), threading.Event()

    def feed():
        for one in batches:
            room.acquire()
            embedding.enqueue(one)
            ready.release()

    def read():
        steps = [0]
        while not trained.is_set():
            steps.append(int(embedding.state.step))
            assert embedding.retrieve()[0]["user"].shape == (5, 2)
            assert embedding.describe()["per_replica_batch_size"] in (2, None)
            for table in embedding.embedding_tables.values():
                assert np.isfinite(table).all()
        assert steps == sorted(steps)

    threads = [Thread(feed), Thread(read)]
    ahead = int(pipelined)
    for n in range(-ahead, STEPS):
        if n + ahead < STEPS:
            assert ready.acquire(timeout=LONG)
            other.enqueue(batches[n + ahead])
        if n >= 0:
            for one in (embedding, other):
                one.apply_gradients(gradients(one.dequeue()))
            room.release()
    trained.set()
    for thread in threads:
        thread.join()
    assert_same(embedding.state, other.state)


def test_many_threads_enqueue():
    """The batches of each of them keep their order."""
    embedding = make_embedding()
    numbers = np.repeat(np.arange(6, dtype=np.float32)[:, None], 2, axis=1)
    embedding.load({"user": numbers[:5], "item": numbers})

    def feed(thread):
        for n in range(6):
            shown = np.array([[n, -1]] * 4, np.int32)
            user = np.full(4, thread, np.int32)
            embedding.enqueue({**batch(0), "user": user, "shown": shown})

    for thread in [Thread(feed, number) for number in range(5)]:
        thread.join()
    seen = [[] for _ in range(5)]
    while embedding.waiting:
        activations = jax.tree.map(np.asarray, embedding.dequeue())
        seen[int(activations["user"][0, 0])].append(int(activations["shown"][0, 0]))
        embedding.apply_gradients(jax.tree.map(np.zeros_like, activations))
    assert seen == [list(range(6))] * 5


def test_the_first_of_two_threads_sets_the_size(monkeypatch):
    """Both batches are placed before any of them is in the queue."""
    embedding, placed = make_embedding(), threading.Barrier(2)
    place = embedding.engine.place

    def place_both(*arguments):
        batch = place(*arguments)
        placed.wait(LONG)
        return batch

    monkeypatch.setattr(embedding.engine, "place", place_both)
    threads = [Thread(embedding.enqueue, batch(0, size)) for size in (4, 8)]
    for thread in threads:
        threading.Thread.join(thread, LONG)
    (said,) = (str(thread.error) for thread in threads if thread.error is not None)
    size = embedding.describe()["per_replica_batch_size"]
    assert said.startswith(f"enqueue: batch size per replica: expected {size}, the size it was ")
    assert embedding.waiting == 1
    assert len(embedding.dequeue()["user"]) == 2 * size
