"""How the processes of one run hear that one of them has left.

A process whose Python ends with an exception is not dead: at its exit JAX waits until all processes
have come to theirs, for minutes, while the others wait for its part of a batch, or on a device. JAX
ends them when one dies, but this one lives. So a process that leaves says so, and why, in the
key-value store of `jax.distributed`; a thread in each process listens.

Input: nothing; `listen` is called once there is something to wait for. Output: the reason why there
is nothing to wait for any more.
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
"""Keys by process: what it is told by one that left; that it has come to its own exit."""
_ALL_DAY = 24 * 3600 * 1000

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
    """Listen from now on; return the one that does, the same at every call."""
    global _listener
    with _lock:
        if _listener is None or _listener.client is not client():
            _listener = Listener(client())
        return _listener


class Listener:
    """Hears that another process has left, and says at the exit of this one that it does.

    Args:
      client: of the key-value store.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._here, self._processes = jax.process_index(), jax.process_count()
        self._heard: str | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="departures", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # runs before JAX's own, which waits for the others

    def left(self, *, ask: bool) -> str | None:
        """Return who has left, and why; None if nobody is known to.

        Args:
          ask: ask the store too, which also knows those that ended without an exception.
        """
        if self._heard is None and ask:
            ended = self.client.key_value_dir_get(f"{_ENDED}/")
            return next((text for _, text in sorted(ended)), None)
        return self._heard

    def _listen(self) -> None:
        """Wait to be told; then let the program end, and end it if it does not.

        It may be on a device that waits for the one that left: nothing else ends that.
        """
        try:
            heard = self._wait_to_be_told()
        except jax.errors.JaxRuntimeError:
            return  # the store is closed: JAX ends this process, or it is at its end
        if not heard:
            return
        self._heard = heard
        print(f"tpu_embed: {heard}; process {self._here} ends with it", file=sys.stderr, flush=True)
        time.sleep(GRACE_SECONDS)
        last = threading.Timer(GRACE_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()
        try:
            self.client.shutdown()  # those that are at their exit need not wait for this one
        finally:
            os._exit(1)

    def _wait_to_be_told(self) -> str:
        while True:
            try:
                return self.client.blocking_key_value_get(f"{_TOLD}/{self._here}", _ALL_DAY)
            except jax.errors.JaxRuntimeError as error:
                if not is_timeout(error):
                    raise

    def _leave(self) -> None:
        """Say that this process leaves: to all if with an exception, else to those who ask."""
        if os.getpid() != self._pid:
            return  # a fork is another process
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        reason = "it has ended"
        if error is not None:
            reason = traceback.format_exception_only(error)[-1].splitlines()[0]
        text = f"process {self._here} left: {reason}"
        try:
            self.client.key_value_set(f"{_ENDED}/{self._here}", text, allow_overwrite=True)
            if self._heard is None:
                others = set(range(self._processes)) - {self._here}
                for other in others if error is not None else ():
                    self.client.key_value_set(f"{_TOLD}/{other}", text, allow_overwrite=True)
                self.client.key_value_set(f"{_TOLD}/{self._here}", "", allow_overwrite=True)
                self._thread.join(GRACE_SECONDS)
        except jax.errors.JaxRuntimeError:
            return  # the store is closed


def is_timeout(error: Exception) -> bool:
    """Tell whether a call of the store raised this because its time was over."""
    return "DEADLINE_EXCEEDED" in f"{error}"
