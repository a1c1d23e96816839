"""Moments of training runs, and which runs go on from which.

A run that is restored from a checkpoint goes on from the moment of the checkpoint. What the first
run did after that moment is not part of the second one, even if both have steps of these numbers:

    run a    step 0 ─── 900 ─── 1000        a model of step 1000 was exported, then the run ended
    run b               900 ───────── 1100  restored from the checkpoint of step 900

So a delta of run b fits a model of run a up to step 900, and no later one.

Input: moments. Output: their order, or that they have none.
"""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """A moment of a training run.

    Attributes:
      run: the unique name of the run, from the making of its `TouchedRows`, or from its restoring;
        all processes of the run have the same one.
      step: `state.step`, the number of updates applied.
      edits: how often `record_rows` was called; it orders what was published at the same step.
      keys: the number of training batches that living vocabularies, or tables on the host, have
        admitted; 0 without any.
    """

    run: str
    step: int
    edits: int = 0
    keys: int = 0

    def is_up_to(self, later: Version) -> bool:
        """Return whether this moment is not after another one of the same run."""
        # Each number only grows, so the earlier moment has no greater one.
        pairs = zip(self[1:], later[1:], strict=True)
        return self.run == later.run and all(mine <= other for mine, other in pairs)


class Lineage(NamedTuple):
    """A run, and the moments of earlier runs that it goes on from.

    Attributes:
      run: the name of the run.
      ancestors: by earlier run, its last moment that is part of this run's history.
    """

    run: str
    ancestors: tuple[Version, ...] = ()

    def has(self, version: Version) -> bool:
        """Return whether a moment is one of this run, or of what it goes on from."""
        return version.run == self.run or any(version.is_up_to(one) for one in self.ancestors)
