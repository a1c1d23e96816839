"""Interrupt code before any one of its bytecodes, by a signal or by an exception."""

import contextlib
import dis
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import types


def from_a_signal():
    signal.raise_signal(signal.SIGINT)


def at_once():
    raise KeyboardInterrupt


class Interrupt:
    """Interrupt what runs in a context once, before one of its bytecodes.

    Args:
      kind: tells whether code is of the kind.
      at: the number of the bytecode, counted from 1.
      act: interrupts.
      only_signals: whether only bytecodes count before which Python looks for signals. Where two
        threads share locks it has to: a trace may raise between the end of a `with` and the release
        of its lock, a signal may not.

    Attributes:
      seen: the number of bytecodes that ran in code of this kind.
    """

    def __init__(self, kind, at, act, *, only_signals=False):
        self.kind, self.at, self.act, self.seen = kind, at, act, 0
        self.only_signals = only_signals

    def __enter__(self):
        if _MONITOR is not None:
            self._monitor(sys.monitoring.events.INSTRUCTION, self._monitored)
            return self
        self.before = sys.gettrace()  # of a tool that measures coverage, which goes on afterwards
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind, *_):
        if _MONITOR is not None:
            self._monitor(0, None)
        else:
            sys.settrace(self.before)
        if self.act is at_once:  # which may have kept handlers from coming back
            with contextlib.suppress(KeyboardInterrupt):
                from_a_signal()
        return kind is KeyboardInterrupt

    def _monitor(self, events, callback):
        """Have all bytecodes of the kind reported to a callback; with no events, none any more."""
        for code in _codes_of(self.kind):
            sys.monitoring.set_local_events(_MONITOR, code, events)
        sys.monitoring.register_callback(_MONITOR, sys.monitoring.events.INSTRUCTION, callback)

    def _enter(self, frame, _event, _):
        if not self.kind(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._inside

    def _inside(self, frame, event, _):
        if event == "opcode":
            self._count(frame.f_code, frame.f_lasti)
        return self._inside

    def _monitored(self, code, offset):
        if self.kind(code) and threading.current_thread() is threading.main_thread():
            self._count(code, offset)

    def _count(self, code, offset):
        if not self.only_signals or offset in _signal_points(code):
            self.seen += 1
            if self.seen == self.at:
                self.act()


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


def _first_free_tool():
    """Return a number for `sys.monitoring`; None before Python 3.12, which has `settrace` alone.

    From 3.12 on `settrace` does not report the bytecodes of the first call of a function.
    """
    if sys.version_info < (3, 12):
        return None
    tool = next(n for n in range(6) if sys.monitoring.get_tool(n) is None)
    sys.monitoring.use_tool_id(tool, "interrupts")
    return tool


_MONITOR = _first_free_tool()


@functools.cache
def _codes_of(kind):
    """Return the code of a kind that is there: of all functions, and of the functions in these."""
    gc.unfreeze()  # the fixture that freezes objects hides them from `get_objects`
    waiting = [one.__code__ for one in gc.get_objects() if isinstance(one, types.FunctionType)]
    found = {code for code in waiting if kind(code)}
    inner = [*found]
    while inner:
        inner = [one for code in inner for one in code.co_consts if isinstance(one, types.CodeType)]
        found |= set(inner)
    return found


@functools.cache
def _signal_points(code):
    """Return the offsets of the bytecodes that follow a call, a jump back or the beginning.

    What a call raises after its work is caught where the call stands. So there is no such point
    where the next bytecode stands outside of the `try` or `with` of the call.
    """
    found, every = set(), [*dis.get_instructions(code)]
    for before, one in itertools.pairwise(every):
        name = before.opname
        looks = name == "RESUME" or "JUMP_BACKWARD" in name
        looks |= name.startswith("CALL") and not name.startswith("CALL_INTRINSIC")
        if looks and _handler_of(code, before.offset) == _handler_of(code, one.offset):
            found.add(one.offset)
    return found


def _handler_of(code, offset):
    """Return where Python goes on if the bytecode at an offset raises; None: in the caller."""
    entries = dis._parse_exception_table(code)
    return next((one.target for one in entries if one.start <= offset < one.end), None)


@contextlib.contextmanager
def ends_within(seconds):
    """Raise in the main thread if the block does not end in time: then something waits for ever."""

    def raise_late(*_):
        raise TimeoutError(f"the block did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, raise_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
