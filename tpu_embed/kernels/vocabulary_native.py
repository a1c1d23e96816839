"""The map of `vocabulary_reference` in C++, called with the GIL released.

A step takes time in proportion to the keys of the batch, whatever the number of rows. Per row the
map takes 40 bytes (44 with `evict="lfu"`), and at most 20 per key that may wait.

Input: NumPy arrays. Output: NumPy arrays, the same numbers as those of `vocabulary_reference`.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np

from tpu_embed.kernels import cpu
from tpu_embed.kernels.vocabulary_reference import (
    COUNTERS,
    ConflictError,
    MapState,
    Options,
    Taken,
)

_EVICT = {"lru": 0, "lfu": 1, "none": 2}
_NEVER = -1  # a ttl of None
_CONFLICTS = {1: "row", 2: "key"}
_NO_MEMORY = "no memory for a map from keys to rows"


class KeyMap:
    """A map from keys to rows, as `vocabulary_reference.KeyMap`.

    Args:
      options: how keys are admitted and evicted.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._native = _Native(options)

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return self._native.step

    @property
    def earliest(self) -> int:
        """The earliest step to which the log reaches."""
        return self._native.numbers().earliest

    @property
    def counters(self) -> np.ndarray:
        """Totals of all steps, int64 `[5]`, as `COUNTERS` names them."""
        return np.array(self._native.numbers().counters, np.int64)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the map has asked for."""
        return self._native.numbers().bytes

    def __len__(self) -> int:
        return self._native.numbers().size

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key; see `vocabulary_reference.KeyMap.find`."""
        native = self._native  # another thread may load a state meanwhile
        rows = np.empty(keys.size, np.int64)
        native.call("find", _address(keys), keys.size, _address(rows))
        return rows

    def take(self, known: np.ndarray, unknown: np.ndarray, *, at_once: bool = False) -> Taken:
        """Take a training batch; see `vocabulary_reference.KeyMap.take`."""
        rows = np.empty(unknown.size, np.int64)
        arrays = _address(known), known.size, _address(unknown), unknown.size, _address(rows)
        task = _TakeTask(*arrays, at_once=int(at_once))
        self._native.call("take", ctypes.addressof(task))
        if task.conflict:
            kind = _CONFLICTS[task.conflict]
            raise ConflictError(kind, task.number % 2**64 if kind == "key" else task.number)
        (new_keys, new_rows), (evicted_keys, evicted_rows) = (
            (np.empty(n, np.uint64), np.empty(n, np.int64))
            for n in (task.num_new, task.num_evicted)
        )
        reports = new_keys, new_rows, evicted_rows, evicted_keys
        self._native.call("taken", *map(_address, reports))
        return Taken(self.step, rows, *reports, task.unseen)

    def rewind(self, step: int) -> None:
        """Undo the batches after `step`, which the log must reach."""
        self._native.call("rewind", step)

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to `step`; they can no longer be undone."""
        self._native.call("forget", step)

    def state(self, step: int) -> MapState:
        """Return the state after `step`, which the log must reach."""
        numbers = self._native.numbers()
        dtypes = np.uint64, np.int64, np.int64, np.int64
        columns = [np.empty(numbers.most_keys, dtype) for dtype in dtypes]
        waiting = [np.empty(numbers.most_waiting, dtype) for dtype in dtypes[:2]]
        task = _StateTask(*map(_address, (*columns, *waiting)), step=step)
        self._native.call("state", ctypes.addressof(task))
        return MapState(
            *(column[: task.n] for column in columns),
            *(column[: task.w] for column in waiting),
            step=np.array(step, np.int64),
            counters=np.array(task.counters, np.int64),
        )

    def load_state(self, state: MapState) -> None:
        """Replace everything by a valid state; the log is empty then."""
        arrays = [np.ascontiguousarray(array) for array in state[:6]]
        sizes = state.keys.size, state.waiting_keys.size
        task = _StateTask(*map(_address, arrays), *sizes, int(state.step), tuple(state.counters))
        native = _Native(self._options)
        native.call("load", ctypes.addressof(task))
        self._native = native


class _Native:
    """Owns a map of the library; one that nobody refers to any more is deleted."""

    def __init__(self, options: Options) -> None:
        ttl = _NEVER if options.ttl is None else options.ttl
        numbers = options._replace(evict=_EVICT[options.evict], ttl=ttl)
        self._map = _function("new")(_address(np.array(numbers, np.int64)))
        if self._map is None:
            raise MemoryError(_NO_MEMORY)
        # When Python ends, other threads may still use it, and the system takes back the memory.
        weakref.finalize(self, _function("delete"), self._map).atexit = False

    def call(self, name: str, *arguments: int) -> None:
        """Call a function of the library for this map."""
        if _function(name)(self._map, *arguments) is False:
            raise MemoryError(_NO_MEMORY)

    @property
    def step(self) -> int:
        """The number of steps; it is asked for more often than all that `numbers` tells."""
        return _function("step")(self._map)

    def numbers(self) -> _Numbers:
        """Return what the map tells of itself."""
        numbers = _Numbers()
        self.call("numbers", ctypes.addressof(numbers))
        return numbers


def _fields(names: str, counters: bool = False) -> list[tuple[str, Any]]:
    """Return the fields of a C struct: numbers or addresses of 8 bytes, then counters."""
    fields: list[tuple[str, Any]] = [(name, ctypes.c_int64) for name in names.split()]
    return [*fields, ("counters", ctypes.c_int64 * len(COUNTERS))] if counters else fields


class _TakeTask(ctypes.Structure):
    _fields_ = _fields("known k unknown m rows conflict number num_new num_evicted unseen at_once")


class _StateTask(ctypes.Structure):
    _fields_ = _fields(
        "keys rows last_seen batches_seen waiting_keys waiting_counts n w step", counters=True
    )


class _Numbers(ctypes.Structure):
    _fields_ = _fields("step earliest size bytes most_keys most_waiting", counters=True)


def _address(array: np.ndarray) -> int:
    """Return where the numbers of an array are; the C++ code takes only contiguous ones."""
    assert array.flags.c_contiguous
    return array.ctypes.data


@functools.cache
def _function(name: str) -> Any:
    """Return a function of the library; ctypes releases the GIL while it runs."""
    function = getattr(ctypes.CDLL(str(cpu.load().path)), f"tpu_embed_vocabulary_{name}")
    arguments, result = _SIGNATURES[name]
    function.argtypes, function.restype = (ctypes.c_void_p, *arguments), result
    return function


_INT, _AT = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "new": ((), ctypes.c_void_p),
    "delete": ((), None),
    "find": ((_AT, _INT, _AT), None),
    "take": ((_AT,), ctypes.c_bool),
    "taken": ((_AT, _AT, _AT, _AT), None),
    "rewind": ((_INT,), None),
    "forget": ((_INT,), None),
    "step": ((), _INT),
    "numbers": ((_AT,), None),
    "state": ((_AT,), ctypes.c_bool),
    "load": ((_AT,), ctypes.c_bool),
}
"""Functions of the library -> what they take besides the map (`new`: options), what they return."""
