"""Place the next batches in a thread, while the devices work on this one.

A step reads ids that the host has checked, sorted and sent. Done in turn, this work adds to each
step; done ahead, it hides behind the steps before. A `Prefetcher` does it ahead: wrap it around the
source of batches, and the loop gets placed batches in the same order.

Its thread, a `Worker`, reads the source and places one batch for each request of the loop, which
asks ahead of time, and keeps them in order. So what is placed ahead depends on the loop alone, not
on the speed of the thread. With each batch it keeps how far the source had been read.

Input: any iterable of batches. Output: an iterator of placed ones, and the position in the data.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import copy
import functools
import itertools
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tpu_embed._checks import check_int, check_type, is_int, message, refuse
from tpu_embed._stop import check_stop
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.engine import check_engine
from tpu_embed.data.items import ItemRules
from tpu_embed.processes import gather_from_all, who
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

    def __init__(
        self, engine: Any, source: Iterator[Any], rules: ItemRules, before: int
    ) -> None:
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

        def place():
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
        # For a loop that waits.
        self._notes: queue.SimpleQueue[None] = queue.SimpleQueue()
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


class Prefetcher:
    """One pass over a source of batches, each placed ahead of its step by a thread.

    The source yields features, and the loop gets a `Batch`; or plain tuples that begin with
    features, such as `(features, label)`, and the loop gets `(batch, label)`, with a copy of the
    label: the source may fill the same arrays with each batch. `EventValues` in the label become a
    `Jagged` each. The thread also runs the source, so what a generator does before it yields is
    done ahead, too.

    What the source or `place` raises is raised by the `next` that would have given that batch; the
    batches before it come first, and it ends the pass. The thread ends with the pass: at the end of
    the source, at an error, at the end of the `with` block, by `close`, or when the prefetcher is
    garbage-collected, as after a `break`.

    Only one loop at a time goes over a prefetcher. A loop that was left by `break` is continued by
    the next one. Another pass, such as the next epoch, needs another prefetcher.

    Args:
      engine: places the batches; `embedding.engine` for a `TPUEmbedding`, whose `enqueue` takes a
        placed batch; `model.rows.engine` for a layer of `tpu_embed.nn`.
      batches: any iterable. With several processes, each gives its own parts of the batches, and
        equally many.
      depth: how many batches are read and placed before the loop asks for them; at least 1. So many
        wait in the devices' memory.
      weighted: whether the items of the source are `(features, weights, …)`.
      spec: the exact shape of every batch; None: a shape of earlier batches if it fits one of them.
      training: False for batches that are only looked up.

    Raises:
      ValueError: `depth` is not an integer of at least 1.
      TypeError: `engine` is no engine, or `batches` cannot be iterated over.

    Example:
      >>> import jax, numpy as np, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=100, dim=2, name="item")
      >>> engine = tpu_embed.EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)})
      >>> state = engine.init(jax.random.key(0))
      >>> source = (({"x": np.full(8, number)}, f"label {number}") for number in range(3))
      >>> with Prefetcher(engine, source) as batches:
      ...     for batch, label in batches:
      ...         print(engine.lookup(state, batch)["x"].shape, label)
      (8, 2) label 0
      (8, 2) label 1
      (8, 2) label 2
      >>> batches.get_state()
      {'batches': 3}
    """

    _worker: Worker | None = None
    _end: weakref.finalize | None = None

    def __init__(
        self,
        engine: Any,
        batches: Iterable[Any],
        depth: int = 2,
        *,
        weighted: bool = False,
        spec: BatchSpec | None = None,
        training: bool = True,
    ) -> None:
        self._depth = check_int("Prefetcher: depth", depth, minimum=1)
        if not hasattr(engine, "intake"):
            check_engine("Prefetcher: engine", engine)
        check_type("Prefetcher: batches", batches, Iterable, expected="an iterable")
        self._engine, self._rules = engine, ItemRules(weighted, spec, training)
        # The iterator moves to the thread with the first batch: a prefetcher that is closed does
        # not keep a generator alive.
        self._source: Iterator[Any] | None = iter(batches)
        self._stateful = isinstance(self._source, Stateful)
        # The last batch that the loop took.
        self._taken = Placed(0, state_of(self._source), None)
        self._over = False
        # The end of the data (None) or an error, until it is raised.
        self._last: tuple[BaseException | None] | None = None
        self._loop: weakref.ref[_Loop] | None = None
        self._lock = threading.Lock()  # one `next` at a time

    # -- batches -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches that were not taken yet.

        Raises:
          RuntimeError: the pass is over, or another loop has not ended.
        """
        if self._over:
            _refuse(
                expected="one that has batches left",
                got="one whose pass is over, or that is closed",
                remedy="make a new Prefetcher for each pass over the data",
            )
        if self._loop is not None and self._loop() is not None:
            _refuse(
                expected="one loop at a time",
                got="a second iterator beside one that is still used",
                remedy="make a Prefetcher for each, or share the iterator",
            )
        loop = _Loop(self)
        self._loop = weakref.ref(loop)
        return loop

    def __next__(self) -> Any:
        """Return the next batch, as `place` or the source's tuple has it.

        Raises:
          StopIteration: there are no more, or the prefetcher was closed.
          RuntimeError: the source itself asks for a batch, which it would have to yield first.
          Exception: what the source or `place` raised instead of this batch.
        """
        if self._worker is threading.current_thread():
            _refuse(
                expected="a call in the loop",
                got="one in its own source",
                remedy="the source yields the features of the next batch",
            )
        with self._lock:
            if self._over:
                raise StopIteration
            # An interrupt may come between any two lines. Until the last one, the batch is not
            # taken, and the next call gives it again.
            worker, number = self._started(), self._taken.number + 1
            if self._last is None:
                worker.request(number)
                outcome = worker.outcome(number)
                if self._over:  # closed meanwhile, by another thread
                    raise StopIteration
                if isinstance(outcome, Placed):
                    worker.request(number + self._depth)
                    self._taken = outcome._replace(item=None)
                    return outcome.item
                self._last = (outcome,)
        # Interrupted, this can be repeated.
        worker.stop()
        worker.join()
        self._detach()
        (error,) = self._last
        self._over, self._last = True, None
        raise StopIteration if error is None else error

    def _started(self) -> Worker:
        """Return the worker; the first call starts it."""
        if self._worker is None:
            assert self._source is not None
            before = self._taken.number
            worker = Worker(
                Feed(self._engine, self._source, self._rules, before), before
            )
            end = weakref.finalize(self, worker.stop)
            end.atexit = False
            try:
                order = self._engine.intake.order(training=self._rules.training)
                if order is not None:
                    order.let(worker)
                worker.start()
                # In one statement: an interrupt before it finds the source where it was.
                self._end, self._worker, self._source = end, worker, None
            except BaseException:
                worker.stop()  # nobody else would
                raise
            self._worker.request(before + self._depth)
        return self._worker

    # -- position ------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data: what was taken, not what was placed ahead.

        It is a JSON value, for `position=` of a checkpoint. If the source's iterator has
        `get_state` and `set_state`, as grain's iterators do, its state after the last batch that
        was taken is part of it. With several processes, all must call this then. If features are
        jagged, so is the room that their batches have got, on which the bits of a network depend.
        """
        number, source_state, shapes, _ = self._taken
        position = _encode(number, source_state, stateful=self._stateful)
        return position if shapes is None else position | {"shapes": shapes}

    def set_state(self, position: dict[str, Any]) -> None:
        """Continue after the batches that were taken at a position; call it before the first batch.

        A source whose iterator has `set_state` is set. Otherwise as many batches are read from the
        beginning and left out.

        Args:
          position: what `get_state` returned.

        Raises:
          RuntimeError: a batch was taken.
          ValueError: it is not a position of such a source, or of as many processes.
        """
        if self._source is None or self._over:
            refuse(
                "Prefetcher.set_state",
                expected="a call before the first batch",
                got="one after it",
                remedy="make a new Prefetcher",
                error=RuntimeError,
            )
        before, source_state = _decode(position, stateful=self._stateful)
        shapes = position.get("shapes")
        if shapes is not None:
            self._engine.intake.expect(shapes)
        if isinstance(self._source, Stateful):
            self._source.set_state(source_state)
        self._taken = Placed(before, source_state, shapes)

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the pass, and wait until the thread has ended; batches that wait are forgotten."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Prefetcher:
        """Return the prefetcher, which is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        """Close; after an exception, let the thread end without waiting for it."""
        self._over, self._source = True, None
        if self._worker is not None:
            self._worker.stop(error)
            if error is None:
                self._worker.join()
        self._detach()

    def _detach(self) -> None:
        """Run nothing when this is freed: a Ctrl-C would be lost there."""
        if self._end is not None:
            self._end.detach()


class _Loop:
    """The iterator of one loop. It lives as long as the loop, which the prefetcher can see."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._prefetcher)


_refuse = functools.partial(refuse, "Prefetcher", error=RuntimeError)


# -- positions as JSON -----------------------------------------------------------------------------


def _encode(batches: int, source_state: Any, *, stateful: bool) -> dict[str, Any]:
    """Return a position, which a checkpoint can hold.

        {"batches": 12}                                              a source without states
        {"batches": 12, "sources": [{"json": …}, {"bytes": "e30="}]}   one state per process

    The first process writes a checkpoint for all, so a position holds the states of all processes.

    Args:
      batches: how many were taken.
      source_state: the state of this process's source; None if it has no states.
      stateful: whether the source has states. If so, all processes must call this.
    """
    if not stateful:
        return {"batches": batches}
    if isinstance(source_state, bytes):
        one = {"bytes": base64.b64encode(source_state).decode()}
    else:
        one = {"json": source_state}
    return {"batches": batches, "sources": gather_from_all("Prefetcher.get_state", one)}


def _decode(position: Any, *, stateful: bool) -> tuple[int, Any]:
    """Return the number of batches and the state of this process's source.

    Raises:
      ValueError: it is no position, or one of a source of another kind or of other processes.
    """
    what, remedy = "Prefetcher.set_state", "give what get_state returned"
    known = isinstance(position, dict) and is_int(position.get("batches"))
    if not known or not 0 <= position["batches"] < 2**63:
        refuse(what, expected="a position", got=repr(position), remedy=remedy)
    if not stateful:
        if "sources" in position:
            refuse(
                what,
                expected="a source with get_state and set_state",
                got="one without them",
                remedy="give a source of the same kind as when the position was saved",
            )
        return position["batches"], None
    sources, (here, processes) = position.get("sources"), who()
    if not isinstance(sources, list) or len(sources) != processes:
        count = len(sources) if isinstance(sources, list) else "no"
        refuse(
            what,
            expected=f"one state per process, {processes} in all",
            got=f"{count} states",
            remedy="continue with as many processes, and a source of the same kind",
        )
    match sources[here]:
        case {"json": state, **rest} if not rest:
            return position["batches"], state
        case {"bytes": str(text), **rest} if not rest and _BASE64.fullmatch(text):
            return position["batches"], base64.b64decode(text)
    refuse(what, expected="a source's state", got=repr(sources[here]), remedy=remedy)


_BASE64 = re.compile("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
