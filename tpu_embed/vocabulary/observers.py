"""Those who follow what the maps of an engine do, such as the record of what an export must have.

Input: what the maps do. Output: calls of the observers.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from tpu_embed.vocabulary.table_maps import Moves


class Observer(Protocol):
    """Is told what maps do, in order; it must not raise, because tables may be donated by then."""

    def note_admitted(self, step: int, moves: Moves) -> None:
        """The newest state has the rows of this step, after what the maps did for it."""

    def note_undone(self, step: int) -> None:
        """The batches placed after this step are as if they had never been placed."""

    def note_loaded(self) -> None:
        """The maps were replaced."""


class Observers:
    """The observers of some maps, for as long as somebody else holds them."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Observer] = weakref.WeakSet()

    def add(self, observer: Observer) -> None:
        """Tell an observer what happens from now on."""
        self._all.add(observer)

    def note_admitted(self, step: int, moves: Moves) -> None:
        """Tell all; see `Observer`."""
        for one in list(self._all):
            one.note_admitted(step, moves)

    def note_undone(self, step: int) -> None:
        """Tell all; see `Observer`."""
        for one in list(self._all):
            one.note_undone(step)

    def note_loaded(self) -> None:
        """Tell all; see `Observer`."""
        for one in list(self._all):
            one.note_loaded()
