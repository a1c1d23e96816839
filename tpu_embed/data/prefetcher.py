"""Place the next batches in a thread, while the devices work on this one.

A step reads ids that the host has checked, sorted and sent. Done in turn, this work adds to each
step; done ahead, it hides behind the steps before. A `Prefetcher` does it ahead: wrap it around the
source of batches, and the loop gets placed batches in the same order.

Input: any iterable of batches. Output: an iterator of placed ones, and the position in the data.
"""

from __future__ import annotations

import base64
import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from tpu_embed._checks import check_int, is_int, refuse
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.engine import check_engine
from tpu_embed.data.items import ItemRules
from tpu_embed.data.worker import Feed, Placed, Stateful, Worker, state_of
from tpu_embed.processes import gather_from_all, who


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
        if not isinstance(batches, Iterable):
            refuse(
                "Prefetcher: batches",
                expected="an iterable",
                got=type(batches).__name__,
                error=TypeError,
            )
        self._engine, self._rules = engine, ItemRules(weighted, spec, training)
        # The iterator moves to the thread with the first batch: a prefetcher that is closed does
        # not keep a generator alive.
        self._source: Iterator[Any] | None = iter(batches)
        self._stateful = isinstance(self._source, Stateful)
        self._taken = Placed(0, state_of(self._source), None)  # the last batch that the loop took
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
            worker = Worker(Feed(self._engine, self._source, self._rules, before), before)
            try:
                order = self._engine.intake.order(training=self._rules.training)
                if order is not None:
                    order.let(worker)
                worker.start()
                self._worker, self._source = worker, None
                self._end = weakref.finalize(self, worker.stop)
                self._end.atexit = False
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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


def _refuse(*, expected: str, got: str, remedy: str) -> NoReturn:
    refuse("Prefetcher", expected=expected, got=got, remedy=remedy, error=RuntimeError)


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
