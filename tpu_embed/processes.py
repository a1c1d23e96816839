"""What the processes of one run tell each other, beside the devices: shapes, and what went wrong.

Enters: a text of this process, or None where it has nothing new to say. Leaves: what all of them
said in the same round. Called by `place.py` for every batch, and by `io/` where files are written
and read. The texts go through the key-value store of `jax.distributed`, so that nothing waits for
the devices.
"""

from __future__ import annotations

import collections
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from tpu_embed import departures
from tpu_embed._checks import message

WAIT_SECONDS = 600
"""How long a process waits for the others to place their parts of a batch."""

FILES_SECONDS = 3600
"""How long a process waits for the others to write or read their files."""

SLICE_MS = 1000
"""How long a wait is, in milliseconds, that nothing can interrupt."""

_WITH_NEWS = 2**15
"""What a process that has news adds to the count, an int32, of those that have come."""

_T = TypeVar("_T")
_ERRORS = {
    error.__name__: error
    for error in (ValueError, TypeError, OSError, FileNotFoundError, FileExistsError)
}
_rounds: collections.Counter[str] = collections.Counter()
_unfinished: set[str] = set()


class _AloneError(Exception):
    """Another process has left."""


def raise_on_all(what: str, path: Path, function: Callable[[], _T]) -> _T:
    """Return `function()`, or raise in every process if it raises in one; all must call this.

    Args:
      what: what is done, for messages.
      path: the same in every process; calls of one name at one path must have one order.
      function: waits for no other process.

    Raises:
      Exception: what the function raised; where another process's did, the same class of error, if
        it is a usual one, else RuntimeError.
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
    """Return what every process says, in their order; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's, a JSON value.

    Raises:
      RuntimeError: as for `raise_on_all`.
    """
    if jax.process_count() == 1:
        return [value]
    said = exchange(what, f"tpu_embed/said/{what}", json.dumps(value), FILES_SECONDS)
    return [said[process] for process in sorted(said)]


def check_same(what: str, value: str) -> None:
    """Check that all processes have the same value; all must call this, in one thread.

    Args:
      what: what is done, for messages.
      value: this process's.

    Raises:
      ValueError: another process has another value; raised by every process.
      RuntimeError: as for `raise_on_all`.
    """
    said = gather_from_all(what, value)
    if len(set(said)) > 1:
        got = ", ".join(f"{value} in process {process}" for process, value in enumerate(said))
        expected, remedy = "the same in every process", "give a path that all of them can reach"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def refusal_of(error: Exception) -> str:
    """Return the news that this process raises an error."""
    return json.dumps({"error": f"{error}", "kind": type(error).__name__})


def raise_refusals(what: str, did: str, said: dict[int, Any]) -> None:
    """Raise the first error that another process has told of."""
    for process, one in sorted(said.items()):
        if "error" in one:
            text = f"{what}: process {process} {did}: {one['error']}"
            raise _ERRORS.get(one["kind"], RuntimeError)(text)


def exchange(what: str, name: str, news: str | None, seconds: int) -> dict[int, Any]:
    """Wait for all processes; return the news of those that have some, by process.

    Raises:
      RuntimeError: another process has left or did not come in time, or this one's last exchange of
        this name was cut off.
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
        if number and not jax.process_index():  # all have read the round before this one
            listener.client.key_value_delete(f"{name}/{number - 1}/")
    except (jax.errors.JaxRuntimeError, _AloneError) as error:
        expected = f"call {number} of all {jax.process_count()} processes within {seconds} s"
        remedy = "make the same calls in the same order on every process"
        if isinstance(error, _AloneError):
            remedy = "start all of them again"
        text = message(what, expected=expected, got=f"{error}", remedy=remedy)
        raise RuntimeError(text) from error
    _unfinished.remove(name)
    return {int(process): json.loads(text) for process, text in said.items()}


def _meet(
    listener: departures.Listener, round_: str, news: str | None, seconds: int
) -> dict[str, str]:
    """Wait until all processes have come to this round; return their news by process.

    The last one to come sees from the count that it is, gathers the news, and lets all go on. They
    wait in slices, between which Python can be interrupted, and which find that one has left.
    """
    client, arrival = listener.client, 1
    _check_nobody_left(listener, ask=False)
    if news is not None:
        client.key_value_set(f"{round_}/news/{jax.process_index()}", news)
        arrival += _WITH_NEWS
    count = client.key_value_increment(f"{round_}/count", arrival)
    if count % _WITH_NEWS == jax.process_count():
        told = client.key_value_dir_get(f"{round_}/news/") if count >= _WITH_NEWS else []
        said = {key.rsplit("/", 1)[-1]: text for key, text in told}
        client.key_value_set(f"{round_}/all", json.dumps(said))
        return said
    end = time.monotonic() + seconds
    while True:
        try:
            return json.loads(client.blocking_key_value_get(f"{round_}/all", SLICE_MS))
        except jax.errors.JaxRuntimeError as error:
            if not departures.is_timeout(error) or time.monotonic() > end:
                raise
        _check_nobody_left(listener, ask=True)


def _check_nobody_left(listener: departures.Listener, *, ask: bool) -> None:
    """Raise `_AloneError` if another process is known to have left; `ask` the store for it."""
    left = listener.left(ask=ask)
    if left is not None:
        raise _AloneError(left)
