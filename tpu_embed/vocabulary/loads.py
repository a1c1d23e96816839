"""Put other maps in the place of an engine's, or of those of many engines at once.

A model may have many layers, each with an engine and maps of its own. A restore changes all of them
or none, so whatever can fail comes first: new maps are made beside the old ones. Then the two are
exchanged, which only changes references, and exchanged again if anything fails after all.

Input: maps that are ready. Output: they are those of their engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpu_embed._signals import SignalsDeferred
from tpu_embed.processes import Turns
from tpu_embed.storage import HomeContents
from tpu_embed.vocabulary.observers import Observers
from tpu_embed.vocabulary.reports import KeyChanges
from tpu_embed.vocabulary.table_maps import TableMaps
from tpu_embed.vocabulary.timeline import Timeline


class MapContents(NamedTuple):
    """What a load replaces.

    Attributes:
      maps: the maps.
      timeline: their steps.
      counted: totals after the admitted step and each later one.
      last: what changed in the admitted step.
      homes: the rows at home; None without tables on the host.
    """

    maps: TableMaps
    timeline: Timeline
    counted: dict[int, dict[str, dict[str, int]]]
    last: dict[str, KeyChanges]
    homes: HomeContents | None


class MapLoad(NamedTuple):
    """Maps that are ready to take the place of those of an engine.

    Attributes:
      turns: the order in which batches are placed with those maps.
      lock: while a thread holds it, no map of the engine changes.
      exchange: puts the maps there, and takes them back when it is called again.
      observers: are told afterwards.
    """

    turns: Turns
    lock: contextlib.AbstractContextManager[bool]
    exchange: Callable[[], None]
    observers: Observers


def load_together(loads: Sequence[MapLoad], then: Callable[[], None] = lambda: None) -> None:
    """Put maps in their places and call `then`; if it raises, the old maps are there again.

    Batches that are being placed end first. A signal that arrives in between waits: then all is
    done when its handler raises.

    Args:
      loads: of the same maps, the last one counts.
      then: what belongs to it, such as setting the tables of the same step.
    """
    # Layers share their maps where one is a copy of the other. Whoever waits for several turns
    # waits for them in the same order as others do, so that no two wait for each other.
    different = {id(one.turns): one for one in loads}
    _in_turns([different[number] for number in sorted(different)], [], then)


def _in_turns(waiting: list[MapLoad], ready: list[MapLoad], then: Callable[[], None]) -> None:
    """Exchange all maps when it is the turn of each."""
    if not waiting:
        _exchange_all(ready, then)
        return
    first, *others = waiting
    first.turns.run_next(lambda: _in_turns(others, [*ready, first], then))


def _exchange_all(loads: list[MapLoad], then: Callable[[], None]) -> None:
    done: list[MapLoad] = []
    with SignalsDeferred(), contextlib.ExitStack() as locks:
        for one in loads:
            locks.enter_context(one.lock)
        try:
            for one in loads:
                one.exchange()
                done.append(one)
            then()
        except BaseException:
            for one in done:
                one.exchange()
            raise
        for one in loads:
            one.observers.note_loaded()
