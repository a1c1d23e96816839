"""End a loop between two steps when Ctrl-C or SIGTERM asks for it.

Python runs signal handlers between any two bytecodes. A step gives its tables away and gets new
ones, so what a handler raises there would lose both. In a `Stop`, the handlers only note that a
signal came. The loop looks between two steps, where everything is whole and can be saved.

    the loop   step 7        | looks: nothing came   | step 8        | looks: SystemExit(143)
    signals                                            ^ SIGTERM is noted

Several processes have to stop at the same step. JAX agrees on one after SIGTERM to any of them.

Input: signals. Output: the exception that each stands for, where the loop looks.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

_current: Stop | None = None
"""The one whose handlers are installed."""


class Stop:
    """A context in which Ctrl-C and SIGTERM wait until the loop looks.

    Ctrl-C is raised as KeyboardInterrupt then, and SIGTERM as `SystemExit(143)`, the status of a
    process that SIGTERM ended. Where the program has a handler of its own for one of the two, that
    runs instead; if it raises nothing, the loop goes on. A second Ctrl-C does not wait. The end of
    the block looks, too, so no signal is lost; the handlers of before are installed again by then.

    In other threads than the main one no handler runs, and this changes nothing. With several
    processes, Ctrl-C ends one of them as ever, and JAX's own handler notes SIGTERM for `at`.

    Attributes:
      at_once: whether a second Ctrl-C came, which nothing may delay.

    Example:
      >>> done = []
      >>> try:
      ...     with Stop() as stop:
      ...         for step in range(9):
      ...             signal.raise_signal(signal.SIGINT)
      ...             done.append(step)
      ...             stop.at(step)
      ... except KeyboardInterrupt:
      ...     print(done)
      [0]
    """

    def __init__(self) -> None:
        self.at_once = False
        self._asked: int | None = None
        self._has_raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        global _current
        if (
            threading.current_thread() is not threading.main_thread()
            or jax.process_count() > 1
        ):
            return self
        if _current is not None:  # a loop inside a step of another one
            return _current
        try:
            _current = self
            for number in (signal.SIGINT, signal.SIGTERM):
                # None: it is not Python's, and could not be installed again.
                if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                    self._before[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # a handler that is still installed ran, and raised
            self._restore()
            raise
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, in place of its handler; a second Ctrl-C does not wait."""
        again = number == signal.SIGINT and (self._asked == number or self._has_raised)
        self._asked = number
        if again:
            self.at_once = True
            self._restore()
            self.check()

    def check(self) -> None:
        """Raise what a signal stands for if one came.

        Raises:
          KeyboardInterrupt: Ctrl-C.
          SystemExit: SIGTERM.
          BaseException: what a handler of the program's own raises.
        """
        number = self._asked
        if number is None:
            return
        self._asked, self._has_raised = None, True
        handler = self._before.get(number)
        if not callable(handler):
            raise SystemExit(128 + number)
        handler(number, None)  # Python's own one raises KeyboardInterrupt
        self._has_raised = self.at_once = False

    def at(self, step: int) -> bool:
        """Look after a step; return whether several processes all stop at this one.

        They save together then, and call `check`, which raises.

        Args:
          step: how many steps were made; each process calls this after each.

        Raises:
          BaseException: as for `check`.
        """
        self.check()
        noticed = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
        together = noticed and jax.process_count() > 1
        if not (together and multihost_utils.reached_preemption_sync_point(step)):
            return False
        self._asked = signal.SIGTERM
        return True

    def __exit__(self, *error: object) -> None:
        self._restore()
        self.check()

    def _restore(self) -> None:
        """Install the handlers of before again."""
        global _current
        if _current is self:
            _current = None
        try:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        except BaseException:  # a handler that is installed again may run, and raise
            self._restore()
            raise


def check_stop() -> None:
    """Raise what a signal stands for if one came in a `Stop` around the caller."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.check()
