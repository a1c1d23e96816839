"""Messages between the processes of one run: agree on values, and raise errors together.

When one process raises an error and the others do not, the others wait for it forever. So at each
point where that could happen, all processes exchange a short message: "all is well", a value, or
the error. The messages go through the key-value store of `jax.distributed`, not through the
devices, so the exchange does not wait for running programs.

When Python ends with an exception in one process, the process does not die at once: at its exit JAX
waits until all processes have reached theirs. So a process writes that it leaves, and why, to the
same store. Those that wait for it in Python read that, and raise it. Those that wait in a program
on their devices are ended by JAX, which misses the heartbeat of the process:
`jax.distributed.initialize(heartbeat_timeout_seconds=20, shutdown_timeout_seconds=10)`.

Conversations are about one batch after the other: all processes place their part, or none. Within
one process any order of batches, and of reads of maps from a checkpoint, is as good as another, so
threads wait for each other. Several processes place every batch together. If two threads did so,
nothing would say which of them comes first in the other processes, and one process's part of a
batch would meet the others' parts of another one. So there the second thread is refused, in all
processes, until the first is done (`Order`):

    the user's loop       starts a Prefetcher         places: RuntimeError      closes it, places
    its thread                places   places   places

Input: what this process has to say, or None: of its part of a batch nothing, an error, or that it
has no more batches. Output: what all processes of the same round say; or the error that one of them
reports.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src import distributed  # the client of the key-value store has no public name

from tpu_embed._checks import refuse

# -- processes that leave --------------------------------------------------------------------------

_LEFT = "tpu_embed/left"
"""The store's directory of reasons, one per process."""


def client() -> Any:
    """Return the client of the key-value store; from the first call on, an exit is told.

    Raises:
      RuntimeError: `jax.distributed` was not initialized.
    """
    found = distributed.global_state.client
    if found is None:
        refuse(
            "processes",
            expected="jax.distributed",
            got="no client",
            remedy="call jax.distributed.initialize first",
            error=RuntimeError,
        )
    _tell_at_exit(found)
    return found


@functools.cache
def _tell_at_exit(client: Any) -> None:
    """Say at the exit of this process that it leaves."""
    here, pid = f"process {jax.process_index()}", os.getpid()

    def leave():
        # A fork's end is not the end of the process; who has shut JAX's part down has left.
        if os.getpid() != pid or distributed.global_state.client is not client:
            return
        # Python keeps the exception that ended the program as `sys.last_value`. In an interactive
        # session (`sys.ps1`) it is an old exception that ended nothing.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        lines = (
            ["it has ended"]
            if error is None
            else traceback.format_exception_only(error)
        )
        reason = lines[-1].splitlines()[0]
        try:
            client.key_value_set(
                f"{_LEFT}/{here}", f"{here} left: {reason}", allow_overwrite=True
            )
        except jax.errors.JaxRuntimeError as closed:
            print(
                f"tpu_embed: {here} could not tell the others: {closed}",
                file=sys.stderr,
            )

    # Exit handlers run in reverse order: this one before JAX's, which waits for the others.
    atexit.register(leave)


def left(client: Any) -> str | None:
    """Return which process has left, and why; None if none has."""
    return next(
        (text for _, text in sorted(client.key_value_dir_get(f"{_LEFT}/"))), None
    )


# -- messages --------------------------------------------------------------------------------------

WAIT_SECONDS = 600
"""How long a process waits for the others to place their parts of a batch."""

FILES_SECONDS = 3600
"""How long a process waits for the others to write or read their files."""

SLICE_MS = 1000
"""How long one wait for the store takes, in milliseconds; nothing can interrupt it."""

_WITH_NEWS = 2**15
"""A process that has news adds this to the count of arrivals (an int32), besides 1 for itself."""

_MOST_BYTES = 2**20
"""The bytes of one message: the store takes 4 MiB at a time."""

_T = TypeVar("_T")
_ERRORS = ValueError, TypeError, OSError, FileNotFoundError, FileExistsError
_rounds: dict[str, int] = {}
"""By name of the exchange, how many rounds have ended; ~n while round n has not."""


class _Refusal(NamedTuple):
    """What a process says that raises an error."""

    kind: type[BaseException]
    text: str


class _AloneError(Exception):
    """Another process has left."""


def who() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    return jax.process_index(), jax.process_count()


def raise_on_all(what: str, path: Any, function: Callable[[], _T]) -> _T:
    """Return `function()`; if it raises in one process, raise in every process.

    All processes must call this.

    Args:
      what: what is done, for messages.
      path: the same in every process. Calls with the same `what` and `path` must come in the same
        order in every process.
      function: must not wait for another process.

    Raises:
      Exception: what the function raised. If it raised in another process: an error of the same
        class if that is one of the common classes, otherwise RuntimeError.
      RuntimeError: a process did not come within `FILES_SECONDS`, or ended.
    """
    if jax.process_count() == 1:
        return function()
    name = f"tpu_embed/{what}/{zlib.crc32(f'{path}'.encode()):08x}"
    try:
        result = function()
    except Exception as error:
        tell_refusal(what, name, error, FILES_SECONDS)
        raise
    exchange(
        what, name, None, FILES_SECONDS, refused=f"{what} {path}: process {{}} failed"
    )
    return result


def gather_from_all(what: str, value: Any) -> list[Any]:
    """Return the values of all processes, by process index; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's value.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    if jax.process_count() == 1:
        return [value]
    said = exchange(what, f"tpu_embed/said/{what}", (value,), FILES_SECONDS)
    return [one for (one,) in said.values()]


def gather_bytes(what: str, mine: bytes) -> list[bytes]:
    """Return the bytes of all processes, however many, by process; all must call this.

    Args:
      what: what is done, for messages.
      mine: this process's bytes.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    sizes = gather_from_all(f"{what}: sizes", len(mine))
    steps = range(0, max(sizes), _MOST_BYTES)
    pieces = [gather_from_all(what, mine[at : at + _MOST_BYTES]) for at in steps]
    return [
        b"".join(piece[process] for piece in pieces) for process in range(len(sizes))
    ]


def agree_on(what: str, value: str) -> str:
    """Return the value of the process that calls this first; the same in every process.

    No process waits for another one.

    Args:
      what: what the value is for; it is chosen once in a run.
      value: this process's value.
    """
    if jax.process_count() == 1:
        return value
    store, key = client(), f"tpu_embed/agreed/{what}"
    # Only the first of these calls has an effect: a key is not overwritten.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        store.key_value_set_bytes(key, value.encode())
    return store.blocking_key_value_get_bytes(key, SLICE_MS).decode()


def check_same(
    what: str, value: str, remedy: str = "give a path that all of them can reach"
) -> None:
    """Check that all processes have the same value; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's value.
      remedy: for the message.

    Raises:
      ValueError: another process has another value; raised by every process.
      RuntimeError: as for `raise_on_all`.
    """
    said = gather_from_all(what, value)
    if len(set(said)) > 1:
        refuse(
            what,
            expected="the same in every process",
            got=", ".join(
                f"{value} in process {process}" for process, value in enumerate(said)
            ),
            remedy=remedy,
        )


def tell_refusal(what: str, name: str, error: BaseException, seconds: int) -> None:
    """Take part in an exchange with the error that this process raises; see `exchange`."""
    kind = type(error) if type(error) in _ERRORS else RuntimeError
    with contextlib.suppress(Exception):  # this process raises its own error
        exchange(what, name, _Refusal(kind, f"{error}"), seconds)


def exchange(
    what: str, name: str, news: Any, seconds: int, *, refused: str = "process {} failed"
) -> dict[int, Any]:
    """Give what this process has to say to all, and return what each process says that has news.

    Args:
      what: what is done, for messages.
      name: the name of the exchange, the same in all processes.
      news: any value; None if this process has nothing to say.
      seconds: how long to wait for the other processes.
      refused: what a process has done that reports an error, for messages, with its number.

    Raises:
      Exception: a process reports an error: one of the same class if that is one of the common
        classes, otherwise RuntimeError.
      RuntimeError: another process has left or did not come in time, or this process's last
        exchange of this name was interrupted.
    """
    number = _rounds.get(name, 0)
    if number < 0:
        refuse(
            what,
            expected="calls one after the other, each to its end",
            got=f"call {~number} cut off by an exception, or not done yet in another thread",
            remedy="the processes are out of step: end all, and start again",
            error=RuntimeError,
        )
    store, said_here = client(), None if news is None else pickle.dumps(news)
    _rounds[name] = ~number
    try:
        told = _meet(store, f"{name}/{number}", said_here, seconds)
        # Everyone has arrived at this round, so everyone has read the previous one.
        if number and not jax.process_index():
            store.key_value_delete(f"{name}/{number - 1}/")
    except (jax.errors.JaxRuntimeError, _AloneError) as error:
        remedy = "make the same calls in the same order on every process"
        if isinstance(error, _AloneError):
            remedy = "start all of them again"
        refuse(
            what,
            expected=f"call {number} of all {jax.process_count()} processes within {seconds} s",
            got=error,
            remedy=remedy,
            error=RuntimeError,
            cause=error,
        )
    _rounds[name] = number + 1
    said = {process: pickle.loads(one) for process, one in sorted(told.items())}
    for process, one in said.items():
        if isinstance(one, _Refusal):
            raise one.kind(f"{refused.format(process)}: {one.text}")
    return said


def _meet(
    store: Any, round_: str, news: bytes | None, seconds: int
) -> dict[int, bytes]:
    """Wait until all processes have arrived at this round; return their news by process, pickled.

    The last process to arrive sees from the count that it is the last. It gathers the news and
    publishes them, which lets the others go on. The others wait in short slices; between two
    slices Python can be interrupted, and they check whether a process has left.
    """
    arrival = 1
    if news is not None:
        store.key_value_set_bytes(f"{round_}/news/{jax.process_index()}", news)
        arrival += _WITH_NEWS
    # The low bits of the count are arrivals, the high bits those with news. With 3 processes, one
    # of which has news, the last to arrive reads 2**15 + 3.
    count = store.key_value_increment(f"{round_}/count", arrival)
    if count % _WITH_NEWS == jax.process_count():
        told = (
            store.key_value_dir_get_bytes(f"{round_}/news/")
            if count >= _WITH_NEWS
            else []
        )
        said = {int(key.rsplit("/", 1)[-1]): one for key, one in told}
        store.key_value_set_bytes(f"{round_}/all", pickle.dumps(said))
        return said
    end, main = time.monotonic() + seconds, threading.main_thread()
    while True:
        try:
            return pickle.loads(
                store.blocking_key_value_get_bytes(f"{round_}/all", SLICE_MS)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in f"{error}" or time.monotonic() > end:
                raise
        if (reason := left(store)) is not None:
            raise _AloneError(reason)
        # Python has begun to run exit handlers: then the main thread counts as ended.
        if threading.current_thread() is not main and not main.is_alive():
            raise _AloneError("the end of this process")


# -- conversations ---------------------------------------------------------------------------------


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
        self._name, self.alone, self.order = (
            name,
            jax.process_count() == 1,
            order_of(name),
        )
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
