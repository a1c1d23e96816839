"""MovieLens-100K as NumPy arrays: 100,000 ratings of 1,682 movies by 943 users.

The files are part of the wheel of the recommender library recbole, which pip fetches once from the
package registry that you already use. `load(directory)` reads your own copy instead:
`ml-100k.inter`, `.item` and `.user`, or the original `u.data`, `u.item` and `u.user`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WHEEL = "recbole==1.2.1"
INSIDE = "recbole/dataset_example/ml-100k/"
FILES = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
GENRES: Sequence[str] = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
).split()
AGES = (18, 25, 35, 45, 50, 56)  # bucket k holds ages below AGES[k], the last bucket the rest
FIRST_DECADE, DECADES = 1920, 8


@dataclasses.dataclass(frozen=True)
class MovieLens:
    """N ratings, and attributes of users and items; ids count from 0."""

    user: np.ndarray  # int32 [N]
    item: np.ndarray  # int32 [N]
    rating: np.ndarray  # float32 [N], 1 to 5
    timestamp: np.ndarray  # int64 [N], seconds
    genres: np.ndarray  # int32 [items, most genres of an item], -1 is padding
    decade: np.ndarray  # int32 [items], 0 to DECADES - 1
    age: np.ndarray  # int32 [users], bucket 0 to len(AGES)
    gender: np.ndarray  # int32 [users], 0 or 1
    occupation: np.ndarray  # int32 [users], in alphabetical order

    def split(self, seed: int, test: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the training ratings and of the test ratings."""
        order = np.random.default_rng(seed).permutation(len(self.rating))
        held_out = int(len(order) * test)
        return order[held_out:], order[:held_out]

    def only(self, rows: np.ndarray) -> MovieLens:
        """Return the ratings at some positions, with all users and items."""
        names = "user", "item", "rating", "timestamp"
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in names})


def default_directory() -> Path:
    """Return where fetched files are kept: $TPU_EMBED_DATA, or the user's cache."""
    root = os.environ.get("TPU_EMBED_DATA") or Path.home() / ".cache" / "tpu_embed"
    return Path(root) / "ml-100k"


def fetch(directory: Path) -> None:
    """Let pip download the wheel, and unpack all three files into `directory` at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", work, WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"MovieLens-100K is not in {directory}, and pip could not fetch {WHEEL}:\n"
                f"{done.stderr.strip()}\n"
                f"Give a directory that holds {FILES[0]} or u.data: --data DIR"
            )
        unpacked = Path(work) / "unpacked"
        unpacked.mkdir()
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            for name in FILES:
                (unpacked / name).write_bytes(wheel.read(INSIDE + name))
        try:
            unpacked.rename(directory)
        except OSError:  # another process was first
            if not (directory / FILES[0]).exists():
                raise


def load(directory: str | Path | None = None) -> MovieLens:
    """Read a directory of MovieLens-100K files; None takes the cache, which is filled once."""
    path = Path(directory or default_directory())
    if directory is None and not (path / FILES[0]).exists():
        fetch(path)
    if (path / "u.data").exists():
        return _original(path)
    if (path / FILES[0]).exists():
        return _atomic(path)
    raise SystemExit(f"--data {path}: expected {FILES[0]} or u.data in it")


def _lines(path: Path, separator: str, *, skip: int, encoding: str = "utf-8") -> list[list[str]]:
    return [line.split(separator) for line in path.read_text(encoding).splitlines()[skip:]]


def _atomic(path: Path) -> MovieLens:
    """Read tab-separated files whose first line names the columns."""
    ratings = _lines(path / "ml-100k.inter", "\t", skip=1)
    users = [row[:4] for row in _lines(path / "ml-100k.user", "\t", skip=1)]
    items = [
        (number, year, classes.split() if classes else ["unknown"])
        for number, _, year, classes in _lines(path / "ml-100k.item", "\t", skip=1)
    ]
    return _assemble(ratings, users, items)


def _original(path: Path) -> MovieLens:
    """Read the files of the original archive."""
    items = [
        (row[0], row[2][-4:], [g for g, flag in zip(GENRES, row[5:24], strict=True) if flag == "1"])
        for row in _lines(path / "u.item", "|", skip=0, encoding="latin-1")
    ]
    users = [row[:4] for row in _lines(path / "u.user", "|", skip=0)]
    return _assemble(_lines(path / "u.data", "\t", skip=0), users, items)


def _assemble(
    ratings: list[list[str]], users: list[list[str]], items: list[tuple[str, str, list[str]]]
) -> MovieLens:
    users = sorted(users, key=lambda row: int(row[0]))
    items = sorted(items, key=lambda row: int(row[0]))
    user_ids = np.array([int(row[0]) for row in users])
    item_ids = np.array([int(row[0]) for row in items])
    columns = list(zip(*ratings, strict=True))
    genres = np.full((len(items), max(len(row[2]) for row in items)), -1, np.int32)
    for i, (_, _, names) in enumerate(items):
        genres[i, : len(names)] = [GENRES.index(name) for name in names]
    years = np.array([int(year) if year.isdigit() else 0 for _, year, _ in items])
    occupations = [row[3] for row in users]
    return MovieLens(
        user=np.searchsorted(user_ids, np.array(columns[0], int)).astype(np.int32),
        item=np.searchsorted(item_ids, np.array(columns[1], int)).astype(np.int32),
        rating=np.array([float(x) for x in columns[2]], np.float32),
        timestamp=np.array([int(float(x)) for x in columns[3]]),
        genres=genres,
        decade=np.clip((years - FIRST_DECADE) // 10, 0, DECADES - 1).astype(np.int32),
        age=np.searchsorted(AGES, [int(row[1]) for row in users], side="right").astype(np.int32),
        gender=np.array([row[2] == "F" for row in users], np.int32),
        occupation=np.unique(occupations, return_inverse=True)[1].astype(np.int32),
    )
