"""Messages between the processes of one run: agree on values, and raise errors together.

When one process raises an error and the others do not, the others wait for it forever. So at each
point where that could happen, all processes exchange a short message: "all is well", a value, or
the error. The messages go through the key-value store of `jax.distributed`, not through the
devices, so the exchange does not wait for running programs.

Input: what this process has to say, or None. Output: what all processes of the same round say; or
the error that one of them reports.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpu_embed._checks import message
from tpu_embed.processes.departures import client, left

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


Said = dict[int, tuple[Any, bytes]]
"""By process, a JSON value and bytes; a process that has nothing to say is missing."""


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
        refuse(what, name, error, FILES_SECONDS)
        raise
    exchange(what, name, None, FILES_SECONDS, refused=f"{what} {path}: process {{}} failed")
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
    said = exchange(what, f"tpu_embed/said/{what}", {"value": value}, FILES_SECONDS)
    return [said[process][0]["value"] for process in sorted(said)]


def gather_bytes(what: str, mine: bytes) -> list[bytes]:
    """Return the bytes of all processes, however many, by process; all must call this.

    Args:
      what: what is done, for messages.
      mine: this process's bytes.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    if jax.process_count() == 1:
        return [mine]
    parts: dict[int, bytes] = collections.defaultdict(bytes)
    for first in itertools.count(0, _MOST_BYTES):
        rest = mine[first:]
        news, name = {"more": len(rest) > _MOST_BYTES}, f"tpu_embed/bytes/{what}"
        said = exchange(what, name, news, FILES_SECONDS, rest[:_MOST_BYTES])
        for process, (_, some) in said.items():
            parts[process] += some
        if not any(one["more"] for one, _ in said.values()):
            break
    return [parts[process] for process in sorted(parts)]


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


def check_same(what: str, value: str) -> None:
    """Check that all processes have the same value; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's value.

    Raises:
      ValueError: another process has another value; raised by every process.
      RuntimeError: as for `raise_on_all`.
    """
    said = gather_from_all(what, value)
    if len(set(said)) > 1:
        got = ", ".join(f"{value} in process {process}" for process, value in enumerate(said))
        expected, remedy = "the same in every process", "give a path that all of them can reach"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def refuse(what: str, name: str, error: BaseException, seconds: int) -> None:
    """Take part in an exchange with the error that this process raises; see `exchange`."""
    _exchange(what, name, {"error": f"{error}", "kind": type(error).__name__}, b"", seconds)


def exchange(
    what: str,
    name: str,
    news: Any,
    seconds: int,
    body: bytes = b"",
    *,
    refused: str = "process {} failed",
) -> Said:
    """Give what this process has to say to all processes, and return what each of them says.

    Args:
      what: what is done, for messages.
      name: the name of the exchange, the same in all processes.
      news: a dictionary as JSON has it; None if this process has nothing to say.
      seconds: how long to wait for the other processes.
      body: bytes that belong to the news.
      refused: what a process has done that reports an error, for messages, with its number.

    Raises:
      Exception: a process reports an error: one of the same class if that is one of the common
        classes, otherwise RuntimeError.
      RuntimeError: another process has left or did not come in time, or this process's last
        exchange of this name was interrupted.
    """
    said = _exchange(what, name, news, body, seconds)
    for process, (one, _) in sorted(said.items()):
        if "error" in one:
            kind = _ERRORS.get(one["kind"], RuntimeError)
            raise kind(f"{refused.format(process)}: {one['error']}")
    return said


def _exchange(what: str, name: str, news: Any, body: bytes, seconds: int) -> Said:
    number = _rounds[name]
    if name in _unfinished:
        got = f"call {number - 1} cut off by an exception, or not done yet in another thread"
        expected = "calls one after the other, each to its end"
        remedy = "the processes are out of step: end all, and start again"
        raise RuntimeError(message(what, expected=expected, got=got, remedy=remedy))
    store = client()
    _unfinished.add(name)
    _rounds[name] += 1
    try:
        # A line of JSON, and the bytes that follow it.
        mine = None if news is None else json.dumps(news, default=vars).encode() + b"\n" + body
        said = _meet(store, f"{name}/{number}", mine, seconds)
        # Everyone has arrived at this round, so everyone has read the previous one.
        if number and not jax.process_index():
            store.key_value_delete(f"{name}/{number - 1}/")
    except (jax.errors.JaxRuntimeError, _AloneError) as error:
        expected = f"call {number} of all {jax.process_count()} processes within {seconds} s"
        remedy = "make the same calls in the same order on every process"
        if isinstance(error, _AloneError):
            remedy = "start all of them again"
        text = message(what, expected=expected, got=f"{error}", remedy=remedy)
        raise RuntimeError(text) from error
    _unfinished.remove(name)
    lines = {process: one.partition(b"\n") for process, one in said.items()}
    return {process: (json.loads(line), rest) for process, (line, _, rest) in lines.items()}


def _meet(store: Any, round_: str, news: bytes | None, seconds: int) -> dict[int, bytes]:
    """Wait until all processes have arrived at this round; return their news by process.

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
        told = store.key_value_dir_get_bytes(f"{round_}/news/") if count >= _WITH_NEWS else []
        said = {int(key.rsplit("/", 1)[-1]): news for key, news in told}
        store.key_value_set_bytes(f"{round_}/all", _join_news(said))
        return said
    end, main = time.monotonic() + seconds, threading.main_thread()
    while True:
        try:
            return _part_news(store.blocking_key_value_get_bytes(f"{round_}/all", SLICE_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in f"{error}" or time.monotonic() > end:
                raise
        if (reason := left(store)) is not None:
            raise _AloneError(reason)
        # Python has begun to run exit handlers: then the main thread counts as ended.
        if threading.current_thread() is not main and not main.is_alive():
            raise _AloneError("the end of this process")


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
