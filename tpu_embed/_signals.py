"""Protect a piece of code from signals: their handlers wait until the code is done.

Python runs signal handlers in the main thread, between any two bytecodes. Ctrl-C raises
KeyboardInterrupt at such a point, and other handlers may raise other exceptions. While arrays are
donated and their replacements are not stored yet, an exception would lose both, so handlers have
to wait.

Input: a `with` block. Output: the block runs to its end; then the handlers of the signals that
arrived meanwhile run.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # beneath `signal`, whose enums take longer
import signal
import sys
import threading
from types import FrameType
from typing import Any

_NUMBERS = tuple(sorted(map(int, signal.valid_signals())))


class SignalsDeferred:
    """A context in which no signal handler runs; the handlers run at its end.

    What a handler raises is raised at the end of the context. Only the main thread runs handlers,
    so in other threads this does nothing. Only handlers written in Python are deferred.

    Example:
      >>> done = []
      >>> try:
      ...     with SignalsDeferred():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("all of it")
      ... except KeyboardInterrupt:
      ...     print(done)
      ['all of it']
    """

    def __init__(self) -> None:
        # The frame with the `with` block: a signal is deferred only while it is on the call stack.
        self._frame = sys._getframe(1)
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._defer)
        except BaseException:
            self._restore()
            raise

    def _defer(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal, in place of the handler that would run now."""
        running = frame
        while running not in (self._frame, None):
            running = running.f_back
        if running is not None:
            self._came.append(number)
        else:
            # An exception ended the context before `__exit__` could run: the block is over.
            self._restore()
            self._handlers[number](number, frame)

    def _restore(self) -> None:
        """Install the original handlers again."""
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        except BaseException:
            # A handler that is installed again may run, and raise, before the loop is done.
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._run_handlers()

    def _run_handlers(self) -> None:
        """Run the handlers of the deferred signals; run the rest even if one of them raises."""
        try:
            while self._came:
                number = self._came.pop(0)
                # The code that was running then may be over. A handler may be `_defer` of a context
                # around this one, which looks for its own frame among the callers.
                self._handlers[number](number, self._frame)
        finally:
            if self._came:
                self._run_handlers()
