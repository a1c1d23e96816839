"""Keeps the record of a `TPUEmbedding`, and replaces its state when a program has made a new one.

A program that updates the state takes its memory. So the record (`record.py`) first says that the
state is being taken, and then gets the new one, in a way that no signal can interrupt. Calls that
read the state or change it wait for each other.

Input: functions of states. Output: records with valid states; errors about invalid ones.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from tpu_embed._calls import call_into, is_device_error
from tpu_embed._checks import message, warn_user
from tpu_embed._signals import SignalsDeferred
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, new_version
from tpu_embed.stateful.record import (
    Enqueued,
    Record,
    after_a_device_error,
    is_readable,
    placed_step,
)
from tpu_embed.vocabulary import ValidSteps


class StateKeeper:
    """The record of a `TPUEmbedding`, and how its state changes.

    Args:
      engine: the engine of the states.
      seed: the first state is that of `engine.init(jax.random.key(seed))`.

    Attributes:
      now: the current record. Read it once per call, because other threads may replace it.
      lock: held by every call while it reads the state or changes it.
    """

    def __init__(self, engine: EmbeddingEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self.now, self.lock, self._replacing = Record(), threading.RLock(), threading.RLock()

    def change(self, **fields: Any) -> None:
        """Replace the record by one with other values for these fields."""
        self.derive(lambda now: now._replace(**fields))

    def derive(self, make: Callable[[Record], Record]) -> None:
        """Replace the record by `make(now)`; if `make` raises, the record stays."""
        # The lock keeps two threads from deriving two records from the same one.
        with self._replacing:
            self.now = make(self.now)

    def built(self) -> TableState:
        """Return the state; create it if there is none. The caller holds `lock`."""
        if self.now.state is None:
            self.change(state=self.new_state())
        assert self.now.state is not None
        return self.now.state

    def new_state(self) -> TableState:
        """Return a first state; with living vocabularies, of the step that their maps have.

        The random key of their new rows stays that of the state before, which may have been
        restored from a checkpoint; if that cannot be read any more, it is the seed's.
        """
        state, maps = self._engine.init(jax.random.key(self._seed)), self._engine.vocabularies
        if maps is None:
            return state
        if self._engine.storage is not None and maps.admitted:
            expected, got = "the newest state of tables on the host", "none"
            remedy = (
                "set embedding.state to it, or call engine.vocabularies.rewind(engine.init(…)) "
            )
            remedy += "and set embedding.state to what init returned, to begin anew"
            raise RuntimeError(message("state", expected=expected, got=got, remedy=remedy))
        before = self.now.state
        kept = state if before is None or not is_readable(before.vocabulary) else before
        assert kept.vocabulary is not None, "states of engines with living vocabularies have one"
        vocabulary = new_version(kept.vocabulary, maps.now, self._engine.layout.axes)
        return dataclasses.replace(state, vocabulary=vocabulary)

    def forget_lost(self) -> Record:
        """Forget batches of keys that the maps no longer know; return the record."""
        if not self._lost():
            return self.now
        with self.lock:  # what another thread was about to admit is not lost
            lost, record = self._lost(), self.now
            if count := sum(item is not record.dequeued for item in lost):
                expected = "batches placed since the maps were rewound or loaded, or rows set"
                got, remedy = f"{count} from before, now forgotten", "enqueue their data again"
                text = message("queue", expected=expected, got=got, remedy=remedy)
                warn_user(text)
            self.derive(lambda now: now.without(lost))
            return self.now

    def _lost(self) -> list[Enqueued]:
        maps, record = self._engine.vocabularies, self.now
        if maps is None:
            return []
        # A batch that is only looked up is lost with the training batches before it. Of the queue
        #     step 3, a lookup at step 3, step 4, a lookup at step 4
        # the last two are lost after a rewind that undoes step 4, whether or not another batch has
        # been admitted as step 4 since.
        last, lost, undone = maps.admitted, [], float("inf")
        for item in (*([record.dequeued] if record.dequeued else []), *record.waiting):
            if not maps.is_current(item.batch):
                lost.append(item)
                if item.step is not None:
                    undone = min(undone, item.step)
            elif item.step is not None:
                last = item.step
            elif item.activations is None and placed_step(item.batch) > min(last, undone - 1):
                lost.append(item)
        return lost

    def check_keys(self, what: str, item: Enqueued) -> None:
        """Check that a batch of keys may be enqueued behind those that wait.

        Raises:
          ValueError: it is not the next one to be admitted; or it is only looked up, and then one
            of its rows will be another key's.
        """
        maps, record = self._engine.vocabularies, self.now
        if maps is None:
            return
        record.check_next(item, what, maps.admitted)
        if item.step is None:
            now, valid = maps.at(record.last_step(maps.admitted)), item.batch.valid_steps
            assert valid is not None, "every batch that this engine placed has steps"
            maps.check(now, ValidSteps(*valid.tolist()), item.batch.keys)

    def undo_placed(self, step: int) -> None:
        """Undo the training batch that was placed after a step, if the queue does not have it.

        It stays if it was admitted, or if other batches were placed after it.
        """
        maps = self._engine.vocabularies
        if maps is None or maps.placed == step:
            return

        def undo() -> None:
            enqueued = self.now.last_step(maps.admitted)
            if enqueued <= step and maps.placed == step + 1:
                maps.undo(step)

        maps.turns.run_next(undo)  # nobody places a batch meanwhile

    def settle(self) -> Record:
        """Return the record. The caller holds `lock`, so no update is running."""
        if self.now.update is not None:
            self.derive(Record.settled)
        return self.now

    def settled(self, what: str) -> Record:
        """Return the record if the state is valid. The caller holds `lock`.

        Raises:
          RuntimeError: the state is invalid.
        """
        self.settle()
        return self.valid(what)

    def valid(self, what: str) -> Record:
        """Return the record if the state is valid.

        Raises:
          RuntimeError: the state is invalid.
        """
        while True:
            record = self.now
            problem, now = record.problem(), self.now
            # Try again if another thread's update has taken the arrays during the check.
            if now.state is record.state and now.update is record.update:
                break
        if problem is not None:
            expected, remedy = "a valid state", "load the tables, or set `state`"
            raise RuntimeError(message(what, expected=expected, got=problem, remedy=remedy))
        return record

    def trained_state(self, what: str) -> TableState:
        """Return the state, if no training batch waits for its gradients. The caller holds `lock`.

        Raises:
          RuntimeError: one does, in the queue or after it; or the state is invalid.
        """
        self.settled(what)
        record = self.forget_lost()
        dequeued = () if record.dequeued is None else (record.dequeued,)
        count = sum(item.training for item in (*dequeued, *record.waiting))
        if count:
            expected, got = "no training batch that waits for its gradients", f"{count}"
            remedy = "dequeue them and apply their gradients first"
            text = message(f"{what}: other", expected=expected, got=got, remedy=remedy)
            raise RuntimeError(text)
        return self.built()

    def update(self, what: str, update: Callable[[], TableState]) -> None:
        """Run an update in the memory of the state, and take its result as the new state.

        The record holds the list `results` before the update begins, and the new state is appended
        to that list. From its second call on, JAX runs the program without Python code, so nothing
        can be raised between the two. The first call runs Python code, so signals are deferred.
        """
        results: list[TableState] = []
        with SignalsDeferred():
            self.change(update=results)
            try:
                call_into(results, update)
            except Exception as error:
                self._note(what, error)
                raise
            finally:
                self.settle()

    def _note(self, what: str, error: Exception) -> None:
        """Record that the state is invalid, if this is a device error."""
        if is_device_error(error):
            self.change(failure=after_a_device_error(f"{what}: {error}"))

    def issue(
        self, what: str, state: TableState, items: tuple[Enqueued, ...]
    ) -> tuple[TableState, tuple[Enqueued, ...]]:
        """Look up batches that were not yet; admit them before.

        Returns:
          The state, which is a new one if a batch was admitted, and the batches with activations.
        """
        issued = []
        try:
            for item in items:
                if item.batch.keys.is_training:
                    state, item = self._admit(state, item)
                issued.append(item.issued(functools.partial(self._engine.lookup, state)))
        except Exception as error:
            self._note(what, error)
            raise
        return state, tuple(issued)

    def issue_first(self, what: str, item: Enqueued, before: Record) -> None:
        """Look up the only batch of the queue; if that fails, take it out of the queue again.

        If it was admitted before the failure, it stays, and `dequeue` looks it up again.

        Args:
          what: the call, for the message.
          item: the batch.
          before: the record before the batch was put into the queue.
        """
        try:
            _, (found,) = self.issue(what, self.built(), (item,))
        except BaseException:
            self.derive(lambda now: now.withdraw_first(item, before))
            raise
        self.derive(lambda now: now._replace(waiting=(found, *now.waiting[1:])))

    def _admit(self, state: TableState, item: Enqueued) -> tuple[TableState, Enqueued]:
        """Admit a batch of keys, in the memory of the state; record the new state."""
        with SignalsDeferred():
            self.change(update=[])
            try:
                state, batch = self._engine.admit(state, item.batch)
                new = dataclasses.replace(item, batch=batch)
                self.derive(lambda record: record.with_admitted(item, new, state))
            finally:
                self.settle()
        return state, new
