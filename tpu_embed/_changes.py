"""Waiting for what another thread changes, also where the change comes in the middle of the wait.

Python may run a finalizer between any two lines of a thread, even between a look at a condition and
the sleep that follows it. If that finalizer makes the condition true and notifies, a
`threading.Condition` whose lock can be taken twice by one thread has nobody to wake yet, and the
thread then sleeps for ever. Here a note waits until somebody has read it.

Ctrl-C may come between any two lines, too. So the lock is taken by a `with` of the lock itself,
which Python never interrupts halfway; a method of ours could be interrupted once it has the lock.

Input: changes under a lock, and notes of them. Output: waits that end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Changes:
    """A lock for what threads share, and a way to wait until it has changed.

    Attributes:
      lock: protects what is shared; a thread may take it more than once.

    Example:
      >>> changes, done = Changes(), []
      >>> def work():
      ...     with changes.lock:
      ...         done.append("it")
      ...         changes.notify_all()
      >>> threading.Thread(target=work).start()
      >>> changes.wait_for(lambda: done)
      ['it']
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may need it in the thread that has it
        self._notes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def notify_all(self) -> None:
        """Let one who waits look again at once, and all others within a second."""
        if self._notes.empty():
            self._notes.put(None)  # it may be called in the middle of a `get` of the same thread

    def wait_for(self, look: Callable[[], _T | None]) -> _T:
        """Wait until a look finds something, and return it; the caller does not hold the lock.

        Args:
          look: is called with the lock, which others have in between. It returns something false
            while there is nothing to be found. It is also called every second, for what nobody
            notes, such as a signal; what it raises ends the wait.
        """
        while True:
            with self.lock:
                found = look()
            if found:
                return found
            with contextlib.suppress(queue.Empty):
                self._notes.get(timeout=1)
