"""Messages between the processes of one run: agree on values, and raise errors together.

When one process raises an error and the others do not, the others wait for it forever. So at each
point where that could happen, all processes exchange a short message: "all is well", a value, or
the error. The messages go through the key-value store of `jax.distributed`, not through the
devices, so the exchange does not wait for running programs.

Input: a text of this process, or None if it has nothing to say. Output: the texts of all processes
of the same round.
"""

from __future__ import annotations

import collections
import contextlib
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpu_embed._checks import message
from tpu_embed.processes import departures

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
_ERRORS = {
    error.__name__: error
    for error in (ValueError, TypeError, OSError, FileNotFoundError, FileExistsError)
}
# By name of the exchange: how many rounds were begun; which names have a round that did not end.
_rounds: collections.Counter[str] = collections.Counter()
_unfinished: set[str] = set()


class _AloneError(Exception):
    """Another process has left."""


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
    name = f"tpu_embed/{what}/{zlib.crc32(str(path).encode()):08x}"
    try:
        result = function()
    except Exception as error:
        exchange(what, name, refusal_of(error), FILES_SECONDS)
        raise
    raise_refusals(f"{what} {path}", "failed", exchange(what, name, None, FILES_SECONDS))
    return result


def gather_from_all(what: str, value: Any) -> list[Any]:
    """Return the values of all processes, by process index; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's value; JSON must be able to hold it.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    if jax.process_count() == 1:
        return [value]
    said = exchange(what, f"tpu_embed/said/{what}", json.dumps(value), FILES_SECONDS)
    return [said[process] for process in sorted(said)]


def own_state(what: str, states: Any, *, remedy: str) -> Any:
    """Return this process's state of what `gather_from_all` returned, perhaps in another run.

    Args:
      what: what is done, for the message.
      states: what a user gives as that.
      remedy: for the message.

    Raises:
      ValueError: it is no list of one state per process.
    """
    if not isinstance(states, list) or len(states) != jax.process_count():
        count = len(states) if isinstance(states, list) else "no"
        expected, got = f"one state per process, {jax.process_count()} in all", f"{count} states"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return states[jax.process_index()]


def gather_bytes(what: str, mine: bytes) -> list[bytes]:
    """Return the bytes of all processes, however many, by process; all must call this.

    Args:
      what: what is done, for messages.
      mine: this process's bytes.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    sizes = gather_from_all(f"{what}: sizes", len(mine))
    if len(sizes) == 1:
        return [mine]
    parts: list[list[bytes]] = [[] for _ in sizes]
    for first in range(0, max(sizes), _MOST_BYTES):
        news = mine[first : first + _MOST_BYTES] or None
        said = exchange_bytes(what, f"tpu_embed/bytes/{what}", news, FILES_SECONDS)
        for process, some in said.items():
            parts[process].append(some)
    return [b"".join(some) for some in parts]


def agree_on(what: str, value: str) -> str:
    """Return the value of the process that calls this first; the same in every process.

    No process waits for another one.

    Args:
      what: what the value is for; it is chosen once in a run.
      value: this process's value.
    """
    if jax.process_count() == 1:
        return value
    client, key = departures.listen().client, f"tpu_embed/agreed/{what}"
    # Only the first of these calls has an effect: a key is not overwritten.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set_bytes(key, value.encode())
    return client.blocking_key_value_get_bytes(key, SLICE_MS).decode()


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
        got = ", ".join(f"{value} in process {process}" for process, value in enumerate(said))
        expected = "the same in every process"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def refusal_of(error: BaseException) -> str:
    """Return the message which says that this process raises an error."""
    return json.dumps({"error": f"{error}", "kind": type(error).__name__})


def raise_refusals(what: str, did: str, said: dict[int, Any]) -> None:
    """Raise the first error that a process has reported, if there is one.

    Args:
      what: what was being done, for the message.
      did: what the process did, for the message: "failed", for example.
      said: the messages, by process.
    """
    for process, one in sorted(said.items()):
        if "error" in one:
            text = f"{what}: process {process} {did}: {one['error']}"
            raise _ERRORS.get(one["kind"], RuntimeError)(text)


def exchange(what: str, name: str, news: str | None, seconds: int) -> dict[int, Any]:
    """Wait for all processes, and return the news of those that have some, by process.

    Args:
      what: what is done, for messages.
      name: the name of the exchange, the same in all processes.
      news: JSON, or None if this process has nothing to say.
      seconds: how long to wait for the other processes.

    Raises:
      RuntimeError: as for `exchange_bytes`.
    """
    said = exchange_bytes(what, name, None if news is None else news.encode(), seconds)
    return {process: json.loads(text) for process, text in said.items()}


def exchange_bytes(what: str, name: str, news: bytes | None, seconds: int) -> dict[int, bytes]:
    """Give this process's bytes to all processes, and return the bytes of each.

    Args:
      what: what is done, for messages.
      name: the name of the exchange, the same in all processes.
      news: bytes, or None if this process has nothing to say.
      seconds: how long to wait for the other processes.

    Returns:
      The news by process; a process with nothing to say is missing.

    Raises:
      RuntimeError: another process has left or did not come in time, or this process's last
        exchange of this name was interrupted.
    """
    listener, number = departures.listen(), _rounds[name]
    if name in _unfinished:
        got = f"call {number - 1} cut off by an exception, or not done yet in another thread"
        expected = "calls one after the other, each to its end"
        remedy = "the processes are out of step: end all, and start again"
        raise RuntimeError(message(what, expected=expected, got=got, remedy=remedy))
    _unfinished.add(name)
    _rounds[name] += 1
    try:
        said = _meet(listener, f"{name}/{number}", news, seconds)
        # Everyone has arrived at this round, so everyone has read the previous one.
        if number and not jax.process_index():
            listener.client.key_value_delete(f"{name}/{number - 1}/")
    except (jax.errors.JaxRuntimeError, _AloneError) as error:
        expected = f"call {number} of all {jax.process_count()} processes within {seconds} s"
        remedy = "make the same calls in the same order on every process"
        if isinstance(error, _AloneError):
            remedy = "start all of them again"
        text = message(what, expected=expected, got=f"{error}", remedy=remedy)
        raise RuntimeError(text) from error
    _unfinished.remove(name)
    return said


def _meet(
    listener: departures.Listener, round_: str, news: bytes | None, seconds: int
) -> dict[int, bytes]:
    """Wait until all processes have arrived at this round; return their news by process.

    The last process to arrive sees from the count that it is the last. It gathers the news and
    publishes them, which lets the others go on. The others wait in short slices; between two
    slices Python can be interrupted, and they check whether a process has left.
    """
    client, arrival = listener.client, 1
    _check_nobody_left(listener, ask=False)
    if news is not None:
        client.key_value_set_bytes(f"{round_}/news/{jax.process_index()}", news)
        arrival += _WITH_NEWS
    # The low bits of the count are arrivals, the high bits those with news. With 3 processes, one
    # of which has news, the last to arrive reads 2**15 + 3.
    count = client.key_value_increment(f"{round_}/count", arrival)
    if count % _WITH_NEWS == jax.process_count():
        told = client.key_value_dir_get_bytes(f"{round_}/news/") if count >= _WITH_NEWS else []
        said = {int(key.rsplit("/", 1)[-1]): news for key, news in told}
        client.key_value_set_bytes(f"{round_}/all", _join_news(said))
        return said
    end = time.monotonic() + seconds
    while True:
        try:
            return _part_news(client.blocking_key_value_get_bytes(f"{round_}/all", SLICE_MS))
        except jax.errors.JaxRuntimeError as error:
            if not departures.is_timeout(error) or time.monotonic() > end:
                raise
        _check_nobody_left(listener, ask=True)


_HEADER = struct.Struct("<IQ")
"""What stands before the news of a process: its number, and how many bytes follow."""


def _join_news(said: dict[int, bytes]) -> bytes:
    """Return the news of all processes in one piece."""
    return b"".join(_HEADER.pack(process, len(news)) + news for process, news in said.items())


def _part_news(joined: bytes) -> dict[int, bytes]:
    """Return the news by process; the inverse of `_join_news`."""
    said, at = {}, 0
    while at < len(joined):
        process, size = _HEADER.unpack_from(joined, at)
        at += _HEADER.size + size
        said[process] = joined[at - size : at]
    return said


def _check_nobody_left(listener: departures.Listener, *, ask: bool) -> None:
    """Raise `_AloneError` if another process has left; `ask`: ask the store as well.

    A thread also stops waiting when its own process is at its end: Python has begun to run exit
    handlers, and the main thread counts as ended.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main and not main.is_alive():
        raise _AloneError("the end of this process")
    left = listener.left(ask=ask)
    if left is not None:
        raise _AloneError(left)
