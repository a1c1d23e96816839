"""The stateful API holds one record, which a call replaces completely or not at all."""

import threading
from typing import Any

import jax
import pytest
from facade_cases import assert_same, batch, make_embedding

from tpu_embed.stateful.record import Enqueued, Record
from tpu_embed.stateful.state_keeper import StateKeeper


def _item(number: Any) -> Enqueued:
    return Enqueued(number, True, None)


def test_a_lookup_is_issued_once():
    issued = []
    item = _item(3).issued(lambda number: issued.append(number) or f"activations of {number}")
    assert item.activations == "activations of 3"
    assert item.issued(issued.append) is item
    assert issued == [3]
    again = item.withdrawn().issued(lambda number: f"others of {number}")
    assert (again.batch, again.activations) == (3, "others of 3")


def test_what_raises_leaves_the_record():
    keeper = StateKeeper(make_embedding().engine, 0)
    keeper.change(waiting=(_item(0),))
    before = keeper.now

    def fail(record):
        record._replace(waiting=())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keeper.derive(fail)
    assert keeper.now is before


def test_changes_of_several_threads_are_all_kept():
    keeper = StateKeeper(make_embedding().engine, 0)

    def append():
        for _ in range(200):
            keeper.derive(lambda record: record._replace(waiting=(*record.waiting, _item(0))))

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keeper.now.waiting) == 800


def test_a_size_is_set_once():
    record = Record().with_size((2, 2), "build", "no")
    assert record.per_replica == (2, 2)
    assert (
        record.with_size((2, 2), "build", "no") == record.with_size(None, "build", "no") == record
    )
    with pytest.raises(ValueError, match=r"batch size per replica: expected 2, .* got \(3, 2\); n"):
        record.with_size((3, 2), "build", "no")


def test_an_update_has_left_a_state_or_none():
    embedding, item = make_embedding(), _item(0)
    state, other = embedding.state, embedding.engine.init(jax.random.key(1))
    # The batch waits for its gradients until the update is done.
    record = Record(state, dequeued=item)
    assert record.settled() == record
    assert record._replace(update=[other]).settled() == Record(other)
    assert record._replace(update=[]).settled() == record
    for table in state.tables.values():
        table.delete()
    lost = record._replace(update=[]).settled()
    assert lost.failure == "one whose arrays were taken by an update that did not finish"
    assert lost._replace(failure=None) == record
    assert record._replace(update=[other]).settled() == Record(other)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_failed_lookup_leaves_the_queue(pipelined, monkeypatch):
    embedding = make_embedding(pipeline_execution_with_tensor_core=pipelined)

    def fail(*_):
        raise ZeroDivisionError

    if pipelined:  # a new head is looked up at once
        with monkeypatch.context() as patched:
            patched.setattr(embedding.engine, "lookup", fail)
            with pytest.raises(ZeroDivisionError):
                embedding.enqueue(batch(0))
        assert embedding.waiting == 0
    for number in range(2):
        embedding.enqueue(batch(number), training=False)
    with monkeypatch.context() as patched:
        patched.setattr(embedding.engine, "lookup", fail)
        with pytest.raises(ZeroDivisionError):
            embedding.dequeue()
    assert embedding.waiting == 2
    for number in range(2):
        placed = embedding.engine.place(batch(number))
        assert_same(embedding.dequeue(), embedding.engine.lookup(embedding.state, placed))
