"""Code that no signal interrupts: the handlers of signals wait until it is done.

Python runs the handler of a signal between any two bytecodes of the main thread. Ctrl-C raises
KeyboardInterrupt there; other handlers raise what they like. Where memory has been given away and
its replacement is not stored yet, nothing may be raised.
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
    """A context in which no handler runs; those of the signals that came run at its end.

    What a handler raises is raised there. Only the main thread runs handlers, so in another thread
    this does nothing. Handlers that are not Python's are left alone.

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
        self._frame = sys._getframe(1)
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

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
        running = frame
        while running not in (self._frame, None):
            running = running.f_back
        if running is not None:
            self._came.append((number, frame))
        else:  # something that is no signal has cut the context off before its end
            self._restore()
            self._handlers[number](number, frame)

    def _restore(self) -> None:
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        except BaseException:  # of a handler that was back already
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._run_handlers()

    def _run_handlers(self) -> None:
        try:
            while self._came:
                number, frame = self._came.pop(0)
                self._handlers[number](number, frame)
        finally:
            if self._came:
                self._run_handlers()
