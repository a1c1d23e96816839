"""Tell the processes of one run why one of them has ended, so that those that wait for it raise it.

When Python ends with an exception in one process, the process does not die at once: at its exit JAX
waits until all processes have reached theirs. So a process writes that it leaves, and why, to the
key-value store of `jax.distributed`. Those that wait for it in Python read that, and raise it.
Those that wait in a program on their devices are ended by JAX, which misses the heartbeat of the
process: `jax.distributed.initialize(heartbeat_timeout_seconds=20, shutdown_timeout_seconds=10)`.

Input: the exception with which this process ends, if any. Output: in the other processes, the
reason why a process has left.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
from typing import Any

import jax
from jax._src import distributed  # the client of the key-value store has no public name

from tpu_embed._checks import refuse

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

    def leave() -> None:
        # A fork's end is not the end of the process; who has shut JAX's part down has left.
        if os.getpid() != pid or distributed.global_state.client is not client:
            return
        # Python keeps the exception that ended the program as `sys.last_value`. In an interactive
        # session (`sys.ps1`) it is an old exception that ended nothing.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        lines = ["it has ended"] if error is None else traceback.format_exception_only(error)
        reason = lines[-1].splitlines()[0]
        try:
            client.key_value_set(f"{_LEFT}/{here}", f"{here} left: {reason}", allow_overwrite=True)
        except jax.errors.JaxRuntimeError as closed:
            print(f"tpu_embed: {here} could not tell the others: {closed}", file=sys.stderr)

    # Exit handlers run in reverse order: this one before JAX's, which waits for the others.
    atexit.register(leave)


def left(client: Any) -> str | None:
    """Return which process has left, and why; None if none has."""
    return next((text for _, text in sorted(client.key_value_dir_get(f"{_LEFT}/"))), None)
