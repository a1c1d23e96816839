"""The steps of a model's maps that a batch has which is placed later, by another thread.

A batch that is only looked up has the rows of the batches that are admitted. While it waits for its
turn, each process may admit more of them, sooner or later than the others. So the steps are noted
where the loops of all processes stand at the same batch: where the turn is drawn.

Input: the maps. Output: their steps, whose rows can be found until they are freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import final

from tpu_embed.vocabulary import Vocabularies

_numbers = itertools.count(1)


@final
class PinnedSteps:
    """The admitted steps of some maps, whose rows can be found until `free`.

    Args:
      maps: the maps.

    Attributes:
      steps: by map.
    """

    def __init__(self, maps: Iterable[Vocabularies]) -> None:
        self._turn = -next(_numbers)  # none of the maps' own turns, which count from 0
        self.steps = {one: one.pin(self._turn) for one in maps}

    def free(self) -> None:
        """Let the maps forget what was done since; it may be called again."""
        for one in self.steps:
            one.unpin(self._turn)
