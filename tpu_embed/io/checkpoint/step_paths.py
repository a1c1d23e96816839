"""How orbax finds the numbered directories of a run, and how it makes one appear.

Input: the directory of a run, or one that is being written. Output: steps and their paths; a
directory under its own name, on the disk.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from tpu_embed.io import files

__all__ = ["StepNames", "SyncedPath", "steps_in"]

_NUMBER = re.compile("0|[1-9][0-9]*")
"""Names of directories that are checkpoints."""


def steps_in(directory: Any) -> list[int]:
    """Return the numbers of the checkpoints in a directory, ascending; not one being written."""
    root = Path(directory)
    found = [path.name for path in root.iterdir() if _NUMBER.fullmatch(path.name)]
    return sorted(int(name) for name in found if (root / name).is_dir())


@dataclasses.dataclass(frozen=True)
class _Step:
    """What orbax asks of a checkpoint. Its own note on the time is not read: it may be damaged."""

    step: int
    path: Any

    @property
    def commit_timestamp(self) -> datetime.datetime:
        """When it was written."""
        return datetime.datetime.fromtimestamp(self.path.stat().mtime, tz=datetime.UTC)


class StepNames(ocp.path.step.NameFormat[Any]):
    """Decimal numbers without zeros before them."""

    def build_name(self, step: int) -> str:
        """Return the name of a step's directory."""
        return f"{step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yield all steps in a directory, ascending."""
        return (_Step(step, base_path / f"{step}") for step in steps_in(base_path))

    def find_step(self, base_path: Any, step: int) -> Any:
        """Return a step that is there."""
        return _Step(step, base_path / f"{step}")


class SyncedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's directory that is renamed when it is whole: on the disk before, and afterwards."""

    async def finalize(self) -> None:
        """Put all names in the directory on the disk, rename it, and put its new name there."""
        files.sync_directories(Path(self.get()))
        await super().finalize()
        files.sync(Path(self.get_final()))  # orbax has added notes
        files.sync(Path(self.get_final()).parent)
