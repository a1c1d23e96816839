"""CRC-32 of what is on disk.

Enters: a file, or what a JSON file says. Leaves: a number. Called by `checked.py`, `directory.py`
and `delta_files.py`. Rows of checkpoints have tensorstore's own (`rows.py`).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

__all__ = ["of_file", "of_json"]

_BLOCK = 2**20
"""Bytes of a file that are held at a time."""


def of_file(path: Path) -> int:
    """Return the checksum of a file's bytes."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def of_json(value: Any) -> int:
    """Return the checksum of a JSON value, whatever the order of its keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
