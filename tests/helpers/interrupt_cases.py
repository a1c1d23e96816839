"""Interrupt code before any one of its bytecodes, by a signal or by an exception."""

import contextlib
import os
import signal
import sys
import threading
import time


def from_a_signal():
    signal.raise_signal(signal.SIGINT)


def at_once():
    raise KeyboardInterrupt


class Interrupt:
    """Interrupt what runs in a context once, before one of its bytecodes.

    Attributes:
      seen: the number of bytecodes that ran in code of this kind.
    """

    def __init__(self, kind, at, act):
        self.kind, self.at, self.act, self.seen = kind, at, act, 0

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # Python 3.12's settrace asks whether any frame does
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        if self.act is at_once:  # which may have kept handlers from coming back
            with contextlib.suppress(KeyboardInterrupt):
                from_a_signal()
        return kind is KeyboardInterrupt

    def _enter(self, frame, _event, _):
        if not self.kind(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._inside

    def _inside(self, _frame, event, _):
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                self.act()
        return self._inside


def interrupt_the_wait():
    """Send this process SIGINT once its main thread waits for others, in `_meet`."""
    waiting = 0
    while waiting < 10:  # it is not on its way through only
        frame, names = sys._current_frames()[threading.main_thread().ident], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        waiting = waiting + 1 if "_meet" in names else 0
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
