"""The stateful API holds one record, which a call replaces completely or not at all."""

import jax
import numpy as np
import pytest
from facade_cases import assert_same, batch, gradients, make_embedding


def test_a_lookup_is_issued_once(monkeypatch):
    """For each state that the queue has seen."""
    made, lookups = make_embedding(pipeline_execution_with_tensor_core=True), []
    lookup = made.engine.lookup
    monkeypatch.setattr(made.engine, "lookup", lambda *given: lookups.append(1) or lookup(*given))
    made.enqueue(batch(0), training=False)
    made.state = made.state
    made.dequeue()
    assert len(lookups) == 2


def test_what_was_interrupted_is_gone_on_with_or_the_state_is_invalid():
    """The batch waits for its gradients until the update is done."""

    def keeper():
        made = make_embedding()
        made.enqueue(batch(0))
        given = gradients(made.dequeue())
        keeper, item = made._keeper, made._keeper.now.dequeued
        return keeper, made.engine.prepare_update(keeper.now.state, item.batch, given)

    def done(now, state):
        return now._replace(state=state, dequeued=None)

    def interrupted(keeper, exchange, *, before):
        def work(call):
            if not before:
                return_all(call)
            raise KeyboardInterrupt

        return_all = exchange._work
        exchange._work = work
        with pytest.raises(KeyboardInterrupt):
            keeper.run("apply_gradients", exchange, done)
        exchange._work = return_all
        return keeper.now

    kept, exchange = keeper()
    state = interrupted(kept, exchange, before=True).state
    assert kept.settle().state is state
    assert kept.now.dequeued is not None
    kept, exchange = keeper()
    state = interrupted(kept, exchange, before=False).state
    assert int(kept.settle().state.step) == 1
    assert kept.now.dequeued is None
    with pytest.raises(RuntimeError):
        np.asarray(jax.tree.leaves(state.tables)[0])
    lost, exchange = keeper()
    for table in interrupted(lost, exchange, before=True).state.tables.values():
        table.delete()
    said = "got one whose arrays were donated to another function, or deleted; load the tables"
    with pytest.raises(RuntimeError, match=said):
        lost.settled("dequeue")


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
