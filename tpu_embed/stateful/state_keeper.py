"""Keeps the record of a `TPUEmbedding`, and replaces its state when a program has made a new one.

A program that updates the state takes its memory. So the record (`record.py`) first gets what is to
run, an `Exchange`, then the new state. Where an interrupt comes between the two, the next call goes
on with it. Calls that read the state or change it wait for each other.

Input: functions of states. Output: records with valid states; errors about invalid ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpu_embed._calls import Exchange, is_device_error
from tpu_embed._checks import message, refuse, warn_user
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, new_version
from tpu_embed.stateful.record import Enqueued, Record, after_a_device_error, placed_step
from tpu_embed.vocabulary import ValidSteps


class StateKeeper:
    """The record of a `TPUEmbedding`, and how its state changes.

    Args:
      engine: the engine of the states.
      seed: the first state is that of `engine.init(jax.random.key(seed))`.

    Attributes:
      now: the current record.
      lock: held by every call while it reads the state or changes the record.
    """

    def __init__(self, engine: EmbeddingEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self.now, self.lock = Record(), threading.RLock()

    def change(self, **fields: Any) -> None:
        """Replace the record by one with other values for these fields."""
        self.now = self.now._replace(**fields)

    def built(self) -> TableState:
        """Return the state; create it if there is none. The caller holds `lock`."""
        if self.now.state is None:
            self.change(state=self.new_state())
        assert self.now.state is not None
        return self.now.state

    def new_state(self, *, replaced: bool = False) -> TableState:
        """Return a first state; with dynamic vocabularies, of the step that their maps have.

        The random key of their new rows stays that of the state before, which may have been
        restored from a checkpoint; if that cannot be read any more, it is the seed's.

        Args:
          replaced: whether all tables and slots are about to be replaced.

        Raises:
          RuntimeError: the maps have admitted batches of another state, whose rows are lost.
        """
        state, maps = self._engine.init(jax.random.key(self._seed)), self._engine.vocabularies
        if maps is None:
            return state
        before = self.now.state
        lost = before is None and not replaced
        if maps.admitted and (lost or self._engine.storage is not None):
            refuse(
                "state",
                expected="the newest state of these maps",
                got="none",
                remedy="set embedding.state to it, or call engine.vocabularies.rewind("
                "engine.init(…)) and set embedding.state to what init returned, to begin anew",
                error=RuntimeError,
            )
        if before is not None:
            with contextlib.suppress(RuntimeError):  # it cannot be read
                kept = jax.block_until_ready(before.vocabulary)
                state = dataclasses.replace(state, vocabulary=kept)
        assert state.vocabulary is not None, "states of engines with dynamic vocabularies have one"
        vocabulary = new_version(state.vocabulary, maps.now, self._engine.layout.axes)
        return dataclasses.replace(state, vocabulary=vocabulary)

    def forget_lost(self) -> Record:
        """Forget batches of keys that the maps no longer know. The caller holds `lock`."""
        # A batch that an interrupted call has admitted is lost only until that has ended.
        maps, record = self._engine.vocabularies, self.settle()
        if maps is None:
            return record
        # A batch that is only looked up is lost with the training batches before it. Of the queue
        #     step 3, a lookup at step 3, step 4, a lookup at step 4
        # the last two are lost after a rewind that undoes step 4, whether or not another batch has
        # been admitted as step 4 since.
        last, undone, lost = maps.admitted, float("inf"), set()
        for item in filter(None, (record.dequeued, *record.waiting)):
            if not maps.is_current(item.batch):
                lost.add(id(item))  # batches that are equal need not be the same
                undone = min(undone, item.step or undone)
            elif item.step is not None:
                last = item.step
            elif item.activations is None and placed_step(item.batch) > min(last, undone - 1):
                lost.add(id(item))
        waiting = tuple(item for item in record.waiting if id(item) not in lost)
        if count := len(record.waiting) - len(waiting):
            warn_user(
                message(
                    "queue",
                    expected="batches placed since the maps were rewound or loaded, or rows set",
                    got=f"{count} from before, now forgotten",
                    remedy="enqueue their data again",
                )
            )
        dequeued = None if id(record.dequeued) in lost else record.dequeued
        self.change(waiting=waiting, dequeued=dequeued)
        return self.now

    def check_keys(self, what: str, item: Enqueued) -> None:
        """Check that a batch of keys may be enqueued behind those that wait.

        Args:
          what: the call, for the message.
          item: the batch.

        Raises:
          ValueError: it is for training, and not the next one to be admitted: others between them
            are missing, it was placed to be looked up only, or admitted before. Or it is only
            looked up, and then one of its rows will be another key's.
        """
        if (maps := self._engine.vocabularies) is None:
            return
        last = self.now.last_step(maps.admitted)
        if item.step is not None:
            expected, got = f"the batch of step {last + 1}", f"that of step {item.step}"
            remedy = "enqueue training batches in the order in which they were placed; after some "
            remedy += "were thrown away, call engine.vocabularies.rewind(embedding.state)"
        elif item.training:
            expected, got = "a batch to be admitted", "one placed with training=False, or admitted"
            remedy = "place it with training=True, or enqueue it with training=False"
        else:
            steps = ValidSteps(*np.asarray(item.batch.valid_steps).tolist())
            maps.check(maps.at(last), steps, item.batch.keys)
            return
        if item.step != last + 1:
            refuse(what, expected=expected, got=got, remedy=remedy)

    def settle(self) -> Record:
        """Return the record, once what was interrupted has ended. The caller holds `lock`."""
        if self.now.update is not None:
            if self.now.update[0].begun:
                with contextlib.suppress(Exception):  # the record says what is wrong then
                    self._go_on("an interrupted call")
            self.change(update=None)
        return self.now

    def settled(self, what: str) -> Record:
        """Return the record if the state is valid. The caller holds `lock`.

        Raises:
          RuntimeError: the state is invalid.
        """
        if (problem := self.settle().problem()) is not None:
            refuse(
                what,
                expected="a valid state",
                got=problem,
                remedy="load the tables, or set `state`",
                error=RuntimeError,
            )
        return self.now

    def trained_state(self, what: str) -> TableState:
        """Return the state, if no training batch waits for its gradients. The caller holds `lock`.

        Raises:
          RuntimeError: one does, in the queue or after it; or the state is invalid.
        """
        self.settled(what)
        record = self.forget_lost()
        items = filter(None, (record.dequeued, *record.waiting))
        if count := sum(item.training for item in items):
            refuse(
                f"{what}: other",
                expected="no training batch that waits for its gradients",
                got=count,
                remedy="dequeue them and apply their gradients first",
                error=RuntimeError,
            )
        return self.built()

    def run(
        self, what: str, exchange: Exchange[Any], taken: Callable[[Record, Any], Record]
    ) -> None:
        """Run programs in the memory of the state; `taken` makes the record of their result.

        Raises:
          Exception: what a program raises.
        """
        self.change(update=(exchange, taken))
        self._go_on(what)

    def _go_on(self, what: str) -> None:
        """Run what the record says is running, or what is left of it."""
        assert self.now.update is not None
        exchange, taken = self.now.update
        with self._noting_failures(what):
            found = exchange.run()
            self.now = taken(self.now, found)._replace(update=None)

    @contextlib.contextmanager
    def _noting_failures(self, what: str) -> Iterator[None]:
        """Record that the state is invalid if the block raises an error of the device."""
        try:
            yield
        except Exception as error:
            if is_device_error(error):
                self.change(failure=after_a_device_error(f"{what}: {error}"))
            self.change(update=None)
            raise

    def issue(self, what: str, at: int, item: Enqueued) -> None:
        """Admit and look up a batch, unless that was done.

        Args:
          what: the call, for messages.
          at: its place in the queue, where it is once it was admitted or looked up.
          item: the batch.

        Raises:
          Exception: what the engine raises.
        """
        if item.batch.keys.is_training:

            def admitted(now: Record, found: tuple[TableState, Batch]) -> Record:
                return now.with_item(at, item._replace(batch=found[1]))._replace(state=found[0])

            self.run(what, self._engine.prepare_admit(self.built(), item.batch), admitted)
            item = self.now.waiting[at]
        if item.activations is None:
            with self._noting_failures(what):
                activations = self._engine.lookup(self.built(), item.batch)
            self.now = self.now.with_item(at, item._replace(activations=activations))
