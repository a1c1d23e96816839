"""Waiting for what another thread changes, also where the change comes in the middle of the wait.

Python may run a finalizer between any two lines of a thread, even between a look at a condition and
the sleep that follows it. If that finalizer makes the condition true and notifies, a
`threading.Condition` whose lock can be taken twice by one thread has nobody to wake yet, and the
thread then sleeps for ever. Here a waiter leaves a box for notes before it looks.

Input: changes under a lock, and notes of them. Output: waits that end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Changes:
    """A lock for what threads share, and a way to wait until it has changed.

    Example:
      >>> changes, done = Changes(), []
      >>> def work():
      ...     with changes:
      ...         done.append("it")
      ...         changes.notify_all()
      >>> threading.Thread(target=work).start()
      >>> with changes:
      ...     changes.wait_for(lambda: done)
      >>> done
      ['it']
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may need it in the thread that has it
        self._boxes: set[queue.SimpleQueue[None]] = set()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        """Let those who wait look again; the caller holds the lock."""
        for box in tuple(self._boxes):
            box.put(None)  # it may be called in the middle of a `get` of the same thread

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true.

        Args:
          condition: is called with the lock, which the caller holds once; others have it meanwhile.
        """
        box: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._boxes.add(box)
        try:
            while not condition():
                self._lock.release()
                try:
                    box.get()
                finally:
                    self._lock.acquire()
        finally:
            self._boxes.discard(box)
