"""Teach orbax how to name and find the checkpoints of a run, and how to put one safely on disk.

Input: the directory of a run, or one that is being written. Output: steps and their paths; a
directory under its final name, on disk.
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

_NUMBER = re.compile("0|[1-9][0-9]*")
"""Matches the names of finished checkpoints; those of unfinished ones have a suffix."""


def steps_in(directory: Any) -> list[int]:
    """Return the numbers of the finished checkpoints in a directory, ascending."""
    root = Path(directory)
    found = [path.name for path in root.iterdir() if _NUMBER.fullmatch(path.name)]
    return sorted(int(name) for name in found if (root / name).is_dir())


@dataclasses.dataclass(frozen=True)
class _Step:
    """The description of a checkpoint that orbax asks for.

    The time comes from the file system, because orbax's own record of it may be damaged.
    """

    step: int
    path: Any

    @property
    def commit_timestamp(self) -> datetime.datetime:
        """When the checkpoint was written."""
        return datetime.datetime.fromtimestamp(self.path.stat().mtime, tz=datetime.UTC)


class StepNames(ocp.path.step.NameFormat[Any]):
    """Names steps by decimal numbers without leading zeros."""

    def build_name(self, step: int) -> str:
        """Return the name of a step's directory."""
        return f"{step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yield all steps in a directory, ascending."""
        return (_Step(step, base_path / f"{step}") for step in steps_in(base_path))

    def find_step(self, base_path: Any, step: int) -> Any:
        """Return a step, which must exist."""
        return _Step(step, base_path / f"{step}")


class SyncedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary directory, synced to disk before and after it gets its final name."""

    async def finalize(self) -> None:
        """Sync the directory and all inside it, rename it, and sync its new name."""
        files.sync_directories(Path(self.get()))
        await super().finalize()
        files.sync(Path(self.get_final()))  # orbax has added files
        files.sync(Path(self.get_final()).parent)
