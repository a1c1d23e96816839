"""Keeps the record of a `TPUEmbedding`: the state, and batches that wait or were dequeued last.

All of it is in one immutable record. A call of the stateful API makes a new record and stores it in
place of the old one with a single assignment. So an exception or a signal, wherever it comes,
leaves either the old record or the new one, and no thread ever sees half of a call.

In a pipelined loop, lookups are issued at these moments:

    enqueue 1, 2   dequeue 1   apply 1   enqueue 3   dequeue 2   apply 2   dequeue 3 …
    lookup  1              2                                 3

A program that updates the state takes its memory. So the record first gets what is to run, an
`Exchange`, then the new state. Where an interrupt comes between the two, the next call goes on with
it. Calls that read the state or change it wait for each other.

Input: batches; functions of states. Output: records with valid states; errors about invalid ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._calls import Exchange, is_device_error
from tpu_embed._checks import check_int, message, refuse, warn_user
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.state import TableState, describe_leaf, new_version
from tpu_embed.vocabulary import ValidSteps


def placed_step(batch: Batch) -> int:
    """Return the step of dynamic vocabularies that a placed batch is, or whose rows it has."""
    steps = batch.valid_steps if batch.keys.steps is None else batch.keys.steps
    assert steps is not None, "batches of dynamic vocabularies have steps"
    return int(steps[0])


class Enqueued(NamedTuple):
    """A batch that waits in the queue, or was dequeued.

    Attributes:
      batch: the ids. Their transfer to the devices starts when a batch is placed, so the batches
        that wait are prefetched.
      training: whether gradients will be applied.
      name: the caller's label, or None.
      activations: the activations, or None before the lookup is issued.
    """

    batch: Batch
    training: bool
    name: str | None
    activations: PyTree | None = None

    @property
    def step(self) -> int | None:
        """Which step of dynamic vocabularies the batch is, if it is to be admitted; or None."""
        return placed_step(self.batch) if self.batch.keys.is_training else None

    @property
    def size(self) -> tuple[int, ...] | None:
        """The examples of every feature per replica; None of a batch that is not for training."""
        return self.batch.spec.local_sizes if self.training else None


class Record(NamedTuple):
    """The immutable record.

    Attributes:
      state: the state of the tables; None before they are built.
      per_replica: examples of every feature of a training batch on one device; None: not set yet.
      waiting: the enqueued batches, oldest first.
      dequeued: the batch dequeued last, until its gradients are applied.
      failure: why the state is invalid, or None.
      update: None, or what is running in the memory of the state, and how to record its result. An
        interrupted one is gone on with by the next call.
    """

    state: TableState | None = None
    per_replica: tuple[int, ...] | None = None
    waiting: tuple[Enqueued, ...] = ()
    dequeued: Enqueued | None = None
    failure: str | None = None
    update: tuple[Exchange[Any], Callable[[Record, Any], Record]] | None = None

    @property
    def progress(self) -> str:
        """How far the training is, in words: `step 3, 2 batches waiting`."""
        step = (
            "not built"
            if self.state is None
            else f"step {describe_leaf(self.state.step)}"
        )
        return f"{step}, {len(self.waiting)} batches waiting"

    def with_size(self, size: tuple[int, ...] | None, what: str, remedy: str) -> Record:
        """Return the record with the size of training batches set.

        Args:
          size: examples of every feature per replica; None for a batch that is not for training.
          what: the call, for the message.
          remedy: the remedy, for the message.

        Raises:
          ValueError: a different size is set already.
        """
        if size is None:
            return self
        if self.per_replica not in (None, size):
            refuse(
                f"{what}: batch size per replica",
                expected=f"{shown(self.per_replica or size)}, the size it was built with",
                got=shown(size),
                remedy=remedy,
            )
        return self._replace(per_replica=size)

    def last_step(self, admitted: int) -> int:
        """Return the step of dynamic vocabularies that the queue ends with.

        Args:
          admitted: the step that the state has.
        """
        return max(
            (item.step for item in self.waiting if item.step is not None),
            default=admitted,
        )

    def with_item(self, at: int, item: Enqueued) -> Record:
        """Return the record with a batch at a place of its queue, or behind the last one."""
        waiting = *self.waiting[:at], item, *self.waiting[at + 1 :]
        return self._replace(waiting=waiting, per_replica=item.size or self.per_replica)

    def described_sizes(self, paths: Sequence[str]) -> Any:
        """Return `per_replica` as a plain object: one number if all are equal, or one per path."""
        sizes = self.per_replica
        if sizes is None or len({*sizes}) == 1:
            return sizes and sizes[0]
        return dict(zip(paths, sizes, strict=True))

    def waiting_for_gradients(self, what: str) -> tuple[TableState, Enqueued]:
        """Return the state, and the dequeued training batch whose gradients are due.

        Raises:
          RuntimeError: there is no such batch.
        """
        item, remedy = self.dequeued, "call enqueue and dequeue first"
        if self.state is None:
            got = "tables that were not built"
        elif item is None:
            got = "none since the last apply_gradients"
        elif not item.training:
            got, remedy = (
                "one enqueued with training=False",
                "enqueue it with training=True",
            )
        else:
            return self.state, item
        refuse(
            what,
            expected="a dequeued training batch",
            got=got,
            remedy=remedy,
            error=RuntimeError,
        )

    def problem(self) -> str | None:
        """Return why the state is invalid, or None if it is valid."""
        if self.failure is not None or self.state is None:
            return self.failure
        leaves = jax.tree.leaves(self.state)
        try:
            # Programs run asynchronously. The results of one that failed after its dispatch are
            # "ready" and raise its error here. Results that are still computed are not waited for.
            jax.block_until_ready([x for x in leaves if x.is_deleted() or x.is_ready()])
        except RuntimeError as error:  # jax.errors.JaxRuntimeError is one too
            if any(leaf.is_deleted() for leaf in leaves):
                return "one whose arrays were donated to another function, or deleted"
            return after_a_device_error(f"{error}")
        return None


def shown(sizes: tuple[int, ...]) -> str:
    """Return batch sizes for a message: one number if they are equal."""
    return f"{sizes[0]}" if len({*sizes}) == 1 else f"{sizes}"


def batch_sizes(declared: Structure, given: PyTree | None) -> tuple[int, ...] | None:
    """Return one batch size per feature.

    Args:
      declared: the features.
      given: one number for all features, or one per feature in their structure; None: no sizes.

    Raises:
      ValueError: a size is not an integer of at least 1, or the structure differs.
      TypeError: a container has another type than in the configuration.
    """
    if given is None:
        return None
    what = "per_replica_batch_size"
    if structure.children(given) is None:
        return (check_int(what, given, minimum=1),) * len(declared.paths)
    pairs = zip(declared.labels, declared.match(given, what=what), strict=True)
    return tuple(
        check_int(f"{what}: {label}", size, minimum=1) for label, size in pairs
    )


def after_a_device_error(error: str) -> str:
    """Return the description of a state after a device error.

    Args:
      error: the error's message, which may contain a traceback; its first and last line are kept.
    """
    lines = error.strip().splitlines()
    said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    return f"one after a device error ({said})"


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
        state, maps = (
            self._engine.init(jax.random.key(self._seed)),
            self._engine.vocabularies,
        )
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
        assert state.vocabulary is not None, (
            "states of engines with dynamic vocabularies have one"
        )
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
            elif item.activations is None and placed_step(item.batch) > min(
                last, undone - 1
            ):
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
            remedy += (
                "were thrown away, call engine.vocabularies.rewind(embedding.state)"
            )
        elif item.training:
            expected, got = (
                "a batch to be admitted",
                "one placed with training=False, or admitted",
            )
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
                with contextlib.suppress(
                    Exception
                ):  # the record says what is wrong then
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

            def admitted(now, found):
                return now.with_item(at, item._replace(batch=found[1]))._replace(
                    state=found[0]
                )

            self.run(
                what, self._engine.prepare_admit(self.built(), item.batch), admitted
            )
            item = self.now.waiting[at]
        if item.activations is None:
            with self._noting_failures(what):
                activations = self._engine.lookup(self.built(), item.batch)
            self.now = self.now.with_item(at, item._replace(activations=activations))
