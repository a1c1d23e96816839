"""Tell the processes of one run when one of them has ended, so that the others end too.

When Python ends with an exception in one process, the process does not die at once: at its exit JAX
waits, for minutes, until all processes have reached their exits. The others meanwhile wait for its
part of a batch, or for a device. (JAX ends them when a process dies, but this one is still alive.)
So a process that leaves writes that, and why, to the key-value store of `jax.distributed`, and a
thread in each process waits for such a message.

Input: the exception with which this process ends, if any. Output: in the other processes, the
reason why a process has left; after a grace period, their end.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import Any

import jax
from jax._src import distributed  # the client of the key-value store has no public name

from tpu_embed._checks import message

GRACE_SECONDS = 10
"""How long a process may take to end by itself when another one has left with an exception."""

_TOLD, _ENDED = "tpu_embed/left/told", "tpu_embed/left/ended"
"""Keys of the store, one per process: why another process left; that this one has ended."""
_ALL_DAY = 24 * 3600 * 1000
"""Milliseconds."""

_lock = threading.Lock()
_listener: Listener | None = None


def client() -> Any:
    """Return the client of the key-value store.

    Raises:
      RuntimeError: `jax.distributed` was not initialized.
    """
    found = distributed.global_state.client
    if found is None:
        expected, remedy = "jax.distributed", "call jax.distributed.initialize first"
        text = message("processes", expected=expected, got="no client", remedy=remedy)
        raise RuntimeError(text)
    return found


def listen() -> Listener:
    """Return the listener of this process; the first call starts it."""
    global _listener
    with _lock:
        # After a new `jax.distributed.initialize` there is a new client, which needs a listener.
        if _listener is None or _listener.client is not client():
            _listener = Listener(client())
        return _listener


class Listener:
    """Learns that another process has left, and tells the others when this one leaves.

    Args:
      client: the client of the key-value store.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._here, self._processes = jax.process_index(), jax.process_count()
        self._heard: str | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="departures", daemon=True)
        self._thread.start()
        # Exit handlers run in reverse order: this one before JAX's, which waits for the others.
        atexit.register(self._leave)

    def left(self, *, ask: bool) -> str | None:
        """Return which process has left, and why; None if none is known to have left.

        Args:
          ask: whether to ask the store, which also knows processes that ended without an exception.
        """
        if self._heard is None and ask:
            ended = self.client.key_value_dir_get(f"{_ENDED}/")
            return next((text for _, text in sorted(ended)), None)
        return self._heard

    def _listen(self) -> None:
        """Wait for the message that a process has left; then end this process.

        The program gets `GRACE_SECONDS` to end by itself. It may be waiting for a device that waits
        for the process that left, and then only the end of the process stops the wait.
        """
        try:
            heard = self._wait_to_be_told()
        except jax.errors.JaxRuntimeError:
            return  # the store is closed: JAX is ending this process, or it ends anyway
        # `_leave` of this process sends an empty text, only to end this thread.
        if not heard:
            return
        self._heard = heard
        print(f"tpu_embed: {heard}; process {self._here} ends with it", file=sys.stderr, flush=True)
        time.sleep(GRACE_SECONDS)
        # The shutdown below may hang, too; the timer ends the process in any case.
        last = threading.Timer(GRACE_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()
        try:
            # Processes that have reached their exits then need not wait for this one.
            self.client.shutdown()
        finally:
            os._exit(1)

    def _wait_to_be_told(self) -> str:
        """Return the message for this process, however long it takes to come."""
        while True:
            try:
                return self.client.blocking_key_value_get(f"{_TOLD}/{self._here}", _ALL_DAY)
            except jax.errors.JaxRuntimeError as error:
                if not is_timeout(error):
                    raise

    def _leave(self) -> None:
        """Say that this process leaves.

        All other processes are told if it leaves with an exception; otherwise the store only keeps
        a note for those that ask.
        """
        if os.getpid() != self._pid:
            return  # this is a fork, whose end is not the end of the process
        # Python keeps the exception that ended the program as `sys.last_value`. In an interactive
        # session (`sys.ps1`) it is an old exception that ended nothing.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        reason = "it has ended"
        if error is not None:
            reason = traceback.format_exception_only(error)[-1].splitlines()[0]
        text = f"process {self._here} left: {reason}"
        try:
            self.client.key_value_set(f"{_ENDED}/{self._here}", text, allow_overwrite=True)
            # If this process was told to end, the others were told as well.
            if self._heard is None:
                others = set(range(self._processes)) - {self._here}
                for other in others if error is not None else ():
                    self.client.key_value_set(f"{_TOLD}/{other}", text, allow_overwrite=True)
                self.client.key_value_set(f"{_TOLD}/{self._here}", "", allow_overwrite=True)
                self._thread.join(GRACE_SECONDS)
        except jax.errors.JaxRuntimeError:
            return  # the store is closed


def is_timeout(error: Exception) -> bool:
    """Tell whether a call of the store raised this error because of its time limit."""
    return "DEADLINE_EXCEEDED" in f"{error}"
