"""Put other maps in the place of an engine's, or of those of many engines at once.

A model may have many layers, each with an engine and maps of its own. A restore changes all of them
or none, so whatever can fail comes first: new maps are made beside the old ones. Then the two are
exchanged, which only changes references, in one call of C that no interrupt can cut; and exchanged
again if anything fails after all.

Input: maps that are ready. Output: they are those of their engines.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tpu_embed.processes import Order
from tpu_embed.vocabulary.table_maps import Observer

_Act = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


class MapLoad(NamedTuple):
    """Maps that are ready to take the place of those of an engine.

    Attributes:
      order: the order in which batches are placed with those maps.
      lock: while a thread holds it, no map of the engine changes.
      wait: waits for rows on their way home.
      stores: the attributes of an object, and those that it is to have.
      observers: are told afterwards.
    """

    order: Order
    lock: contextlib.AbstractContextManager[bool]
    wait: Callable[[], None]
    stores: list[tuple[dict[str, Any], dict[str, Any]]]
    observers: weakref.WeakSet[Observer]


def load_together(loads: Sequence[MapLoad], then: _Act = _nothing, undo: _Act = _nothing) -> None:
    """Put maps in their places and call `then`; if it raises, the old maps are there again.

    Batches that are being placed end first.

    Args:
      loads: of the same maps, the last one counts.
      then: what belongs to it, such as setting the tables of the same step.
      undo: takes back what `then` has done, or a part of it.
    """
    # Layers share their maps where one is a copy of the other. Whoever waits for several waits for
    # them in the same order as others do, so that no two wait for each other.
    different = {id(one.order): one for one in loads}
    _alone([different[number] for number in sorted(different)], [], then, undo)


def _alone(waiting: list[MapLoad], ready: list[MapLoad], then: _Act, undo: _Act) -> None:
    """Exchange all maps when nobody else moves them, or looks at them."""
    if not waiting:
        exchange(ready, then, undo)
        return
    first, *others = waiting

    def locked() -> None:
        with first.lock:
            _alone(others, [*ready, first], then, undo)

    first.order.run(locked)


def exchange(loads: Sequence[MapLoad], then: _Act = _nothing, undo: _Act = _nothing) -> None:
    """Do what `load_together` does, in a thread that has all locks."""
    new = [store for one in loads for store in one.stores]
    for one in loads:
        one.wait()
    old = [(held, {name: held[name] for name in fields}) for held, fields in new]
    try:
        _store(new)
        then()
    except BaseException:
        _store(old)
        undo()
        raise
    try:
        _note_loaded(loads)
    except BaseException:
        _note_loaded(loads)  # an interrupt has come before all were told
        raise


def _note_loaded(loads: Sequence[MapLoad]) -> None:
    for one in loads:
        for observer in list(one.observers):
            observer.note_loaded()


def _store(stores: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Change the attributes of objects, all of them in one call of C."""
    collections.deque(itertools.starmap(dict.update, stores), maxlen=0)
