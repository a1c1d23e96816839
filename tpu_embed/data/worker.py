"""A thread that reads a source of batches one by one, and places each ahead of its step.

The loop asks for batches ahead of time; the thread places one for each request and keeps them in
order. So what is placed ahead depends on the loop alone, not on the speed of the thread. With each
batch it keeps how far the source had been read.

Input: items, and requests. Output: placed batches in order, the last of which may be an error or
the end.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tpu_embed._checks import message, refuse
from tpu_embed._stop import check_stop
from tpu_embed.data.items import ItemRules
from tpu_embed.vocabulary import Pin

EXIT_SECONDS = 3
"""How long the end of the program waits for threads that are in the middle of a batch."""

_NO_MORE = object()
"""In place of a request, the end of all."""

_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@runtime_checkable
class Stateful(Protocol):
    """An iterator that knows its position, as grain's iterators do."""

    def get_state(self) -> Any:
        """Return the position."""

    def set_state(self, state: Any) -> None:
        """Continue from a position."""


class Placed(NamedTuple):
    """A placed batch.

    Attributes:
      number: of the batch, counted from 1; 0 before the first.
      source_state: the state of the source after it; None if it has no states.
      shapes: those that batches get after it, as JSON; None if no feature is jagged.
      item: what the loop gets; None once it has got it.
    """

    number: int
    source_state: Any
    shapes: Any
    item: Any = None


class Feed:
    """The work of a prefetcher's thread: it reads items, and places them.

    Args:
      engine: places them.
      source: yields items.
      rules: how they are placed.
      before: how many batches were taken before.
    """

    def __init__(self, engine: Any, source: Iterator[Any], rules: ItemRules, before: int) -> None:
        self._engine, self._source, self._rules = engine, source, rules
        self._intake = engine.intake
        self._others = self._intake.agreements["update" if rules.training else "lookup"]
        self._number = before
        # Where the source cannot be set to a position, so many items are read and left out first.
        self._skipped = 0 if isinstance(source, Stateful) else before
        # A lookup has the rows of the moment at which the loop asked for it.
        self.pin = (lambda: None) if rules.training else self._intake.pin

    def compute(self, pin: Pin | None, worker: Worker) -> Placed | None:
        """Return the next batch, placed; None if there are no more in any process.

        What was read when the thread was stopped is not placed: the loop may have rewound the maps.

        Raises:
          ValueError: there are more in another process.
          Exception: what the source or `place` raises.
        """
        self._number += 1
        order = self._intake.order(training=self._rules.training)
        try:
            with contextlib.nullcontext() if order is None else order.draws():
                item = self._rules.take_apart(self._read())
            source_state = state_of(self._source)
        except StopIteration:
            self._others.end()
            return None
        except BaseException as error:
            self._others.refuse(error)
            raise

        def place() -> Any:
            if worker.stopped:
                return None
            return self._intake.place_ids(
                item.features,
                item.weights,
                self._rules.spec,
                training=self._rules.training,
                step=pin and pin.step,
            )

        try:
            batch = place() if order is None else order.run(place)
            if batch is None:
                self.leave(worker.reason)
                return None
            placed = item.around(batch, self._engine)
        except Exception as error:
            error.add_note(f"This was batch {self._number} of the source.")
            raise
        return Placed(self._number, source_state, self._intake.shapes(), placed)

    def leave(self, reason: BaseException | None) -> None:
        """Tell the other processes that there are no more batches, or why."""
        # If they have a batch, or have left, their loops raise it.
        with contextlib.suppress(Exception):
            self._others.end(reason)

    def _read(self) -> Any:
        """Return the next item, after those that are left out."""
        wanted, self._skipped = self._skipped, 0
        found = sum(1 for _ in itertools.islice(self._source, wanted))
        if found < wanted:
            refuse(
                "the data",
                expected=f"{wanted} batches before the next one",
                got=found,
                remedy="give the same data again",
            )
        return next(self._source)


def state_of(source: Iterator[Any]) -> Any:
    """Return a copy of the source's state; None if it has no states."""
    # A source may return the object that it will change when it is read again.
    return copy.deepcopy(source.get_state()) if isinstance(source, Stateful) else None


class Worker(threading.Thread):
    """A thread with the requests that wait for it and the outcomes that wait for the loop.

    The thread does not hold the object that made it, so that one can be garbage-collected while the
    thread runs. What the loop calls may be interrupted anywhere, and be called again.

    Args:
      feed: computes the results.
      before: the number of the result before the first one.

    Attributes:
      stopped: whether the thread ends after what it is computing.
      reason: the exception that has ended the loop, if one did.
    """

    def __init__(self, feed: Feed, before: int) -> None:
        super().__init__(name="tpu_embed prefetch", daemon=True)
        self.stopped = False
        self._feed: Feed | None = feed
        self._pin = feed.pin
        # A finalizer may stop this in the middle of any call, also of one that puts or gets.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[None] = queue.SimpleQueue()  # for a loop that waits
        self._before = self._requested = before
        self._outcomes: dict[int, Placed | BaseException | None] = {}
        self.reason: BaseException | None = None
        _running.add(self)
        _stop_all_at_exit()

    # -- the loop's side -----------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Ask for all results up to that of this number."""
        for each in range(self._requested + 1, number + 1):
            self._requests.put(self._pin())
            self._requested = each

    def outcome(self, number: int) -> Placed | BaseException | None:
        """Return a result, waiting for it, and forget the one before.

        In a `Stop`, a signal ends the wait.

        Returns:
          A batch, or an error in its place; None after the last one, or once stopped.
        """
        self._outcomes.pop(number - 1, None)
        while True:
            check_stop()
            if number in self._outcomes or self.stopped:
                return self._outcomes.get(number)
            with contextlib.suppress(queue.Empty):
                self._notes.get(timeout=1)

    def stop(self, reason: BaseException | None = None) -> None:
        """Let the thread end after what it is computing, and forget the outcomes that wait.

        Args:
          reason: the exception that ends the loop, which the other processes are told; or None.
        """
        self.reason = reason or self.reason  # it is stopped once more at the exit
        self.stopped = True
        self._outcomes.clear()
        # Requests hold pins. Of those that nobody computes any more, one is left, for the thread to
        # tell the other processes.
        left_out = False
        with contextlib.suppress(queue.Empty):
            while True:
                left_out |= self._requests.get_nowait() is not _NO_MORE
        self._requests.put(None if left_out else _NO_MORE)
        self._note()

    def _note(self) -> None:
        """Let the loop look again at once if it waits."""
        if self._notes.empty():
            self._notes.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, if it was started; it does not wait for itself."""
        if self is not threading.current_thread() and self.is_alive():
            super().join(timeout)

    # -- the thread's side ---------------------------------------------------------------------

    def run(self) -> None:
        """Compute what is requested; at a stop, leave out the first of the other requests.

        With several processes, all have as many requests. The first one that any of them leaves out
        is the last one that they talk about.
        """
        number, feed, goes_on = self._before, self._feed, True
        assert feed is not None, "a thread runs once"
        while goes_on:
            pin = self._requests.get()
            if self.stopped:
                if pin is not _NO_MORE:
                    feed.leave(self.reason)
                break
            number += 1
            self._outcomes[number] = outcome = _outcome_of(feed, pin, self)
            goes_on = isinstance(outcome, Placed)
            self._note()
        if self.stopped:
            self._outcomes.clear()
        # A generator that nobody else holds is closed by this, in the thread that has run it.
        del feed
        self._feed = None


def _outcome_of(feed: Feed, pin: Any, worker: Worker) -> Placed | BaseException | None:
    try:
        return feed.compute(pin, worker)
    except StopIteration as error:  # it would end the loop as if the data had ended
        wrapped = RuntimeError(
            message(
                "place",
                expected="a batch, or another exception",
                got="StopIteration",
                remedy="see the cause of this error for the call that raised it",
            )
        )
        wrapped.__cause__ = error
        return wrapped
    except BaseException as error:  # the loop raises it, whatever it is
        return error


@functools.cache
def _stop_all_at_exit() -> None:
    """Have all threads end before Python does: JAX must not be called from threads at its end."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    running, end = list(_running), time.monotonic() + EXIT_SECONDS
    for worker in running:
        worker.stop()
    for worker in running:
        worker.join(max(0.0, end - time.monotonic()))
