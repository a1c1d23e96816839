"""Conversations of the processes about one batch after the other: all place their part, or none.

Within one process any order of batches, and of reads of maps from a checkpoint, is as good as
another, so threads wait for each other. Several processes place every batch together. If two
threads did so, nothing would say which of them comes first in the other processes, and one
process's part of a batch would meet the others' parts of another one. So there the second thread is
refused, in all processes, until the first is done (`Order`):

    the user's loop       starts a Prefetcher         places: RuntimeError      closes it, places
    its thread                places   places   places

Input: what a process has to say of its part of a batch: nothing, an error, or that it has no more
batches. Output: what the others say, or an error in every process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from tpu_embed._checks import refuse
from tpu_embed.processes.messages import WAIT_SECONDS, client, exchange, tell_refusal

_T = TypeVar("_T")


class Order:
    """Lets threads act one after the other, or one alone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._worker: Any = None
        self._drawing: set[threading.Thread] = set()
        self._is_cut = False

    def let(self, worker: Any) -> None:
        """With several processes, refuse all other threads until this one, not started yet, ends.

        Args:
          worker: a thread, with an attribute `stopped`: whether its loop has ended it.

        Raises:
          RuntimeError: another one has not ended.
        """
        if jax.process_count() > 1:
            self.run(lambda: setattr(self, "_worker", worker))

    @contextlib.contextmanager
    def draws(self) -> Iterator[None]:
        """Refuse this thread while it asks a source for the batch that it will place next."""
        thread = threading.current_thread()
        self._drawing.add(thread)
        try:
            yield
        finally:
            self._drawing.discard(thread)

    def run(self, act: Callable[[], _T]) -> _T:
        """Return `act()`, which no other thread does anything beside; it may call this, too.

        Raises:
          RuntimeError: this is called in the source of a `Prefetcher`. With several processes:
            another thread is in the middle of its own; or one was interrupted, so this process has
            left out what the others have done.
        """
        if threading.current_thread() in self._drawing:
            refuse(
                "place",
                expected="a call in the loop",
                got="one in the source of a Prefetcher",
                remedy="a source must not place training batches of the same engine, nor rewind, "
                "load or restore its maps",
                error=RuntimeError,
            )
        if jax.process_count() == 1:
            with self._lock:
                return act()
        # What its loop has done decides, not how far the thread is: so all processes agree.
        worker = self._worker
        beside = worker not in (None, threading.current_thread())
        if worker is not None and beside and worker.stopped:
            if worker.is_alive():  # it may never have been started
                worker.join()
            self._worker, beside = None, False
        got = ""
        if self._is_cut:
            got = "one that was interrupted; end all processes, and start again"
        elif beside:
            got = "one beside a Prefetcher that has not ended; close it first"
        elif not self._lock.acquire(blocking=False):
            got = "one beside another thread's; place in one thread"
        if got:
            refuse(
                "place",
                expected="calls one after the other, each to its end",
                got=got,
                error=RuntimeError,
            )
        try:
            return act()
        except Exception:
            raise
        except BaseException:
            self._is_cut = True
            raise
        finally:
            self._lock.release()


@functools.cache
def order_of(name: str) -> Order:
    """Return the order of a conversation, the same for all who take part in it here."""
    return Order()


_END = "no more batches"


class Conversation:
    """What the processes tell each other of batches; where there is one process, nothing.

    Args:
      name: of the conversation, the same in all processes.

    Attributes:
      alone: whether there is one process.
      order: of the calls, the same in all processes; all who take part in a conversation here share
        it.
    """

    def __init__(self, name: str) -> None:
        self._name, self.alone, self.order = name, jax.process_count() == 1, order_of(name)
        if not self.alone:
            client()  # from now on, the others are told if this process ends

    def exchange(self, news: Any) -> dict[int, Any]:
        """Return what the processes say that have news; None is no news.

        Raises:
          ValueError, TypeError, RuntimeError: another process refused its part, or has no more
            batches; raised by every process.
        """
        said = exchange(
            "place",
            self._name,
            news,
            WAIT_SECONDS,
            refused="place: process {} refused its part of the batch",
        )
        ended = [process for process, one in said.items() if one == _END]
        if ended and len(ended) < jax.process_count():
            refuse(
                "place",
                expected="a batch in every process, or in none",
                got=f"no more batches in process {', '.join(map(str, ended))}",
                remedy="give every process equally many batches, and leave their loops at the "
                "same batch",
            )
        return said

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Tell the other processes of an error in the block."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def refuse(self, error: BaseException) -> None:
        """Tell the other processes that this one raises an error and does not place its part."""
        if not self.alone:
            tell_refusal("place", self._name, error, WAIT_SECONDS)

    def end(self, reason: BaseException | None = None) -> None:
        """Tell the other processes that this one has no more batches, or why.

        Raises:
          ValueError: another process has one; raised by every process.
          ValueError, TypeError, RuntimeError: another process refused its part.
        """
        if reason is not None:
            self.refuse(reason)
        elif not self.alone:
            self.exchange(_END)
