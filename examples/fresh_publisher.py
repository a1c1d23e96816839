"""What a trainer publishes and a server finds: models, deltas, and a note beside each.

A note is written last, so whoever sees it finds the rest. The notes form a tree: each delta names
the version that it begins from, and each full export begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_embed.io import FollowingModel, Version, load_model
from tpu_embed.metrics import auc


class Note(NamedTuple):
    """What is said of a publication.

    Attributes:
      batch: how many batches it has been trained on.
      kind: "full" or "delta".
      path: of the directory.
      since: the version that a delta begins from; of a full export its own.
      version: of tables that have it.
      digest: of the keys that then have rows.
      born: when the first clicks came on the items that got rows since the publication before.
    """

    batch: int
    kind: str
    path: str
    since: Version
    version: Version
    digest: str
    born: list[float]


def digest(keys: np.ndarray) -> str:
    """Return the same text for the same set of keys, uint64 `[n]`."""
    return hashlib.sha256(np.sort(keys).tobytes()).hexdigest()


def publish(root: Path, note: Note) -> None:
    """Write a note; it appears whole."""
    path = root / f"{note.batch:06d}-{note.kind}-{note.version.run[:8]}.json"
    hidden = path.with_suffix(".new")
    hidden.write_text(json.dumps(note._asdict()))
    os.replace(hidden, path)


def notes(root: Path) -> list[Note]:
    """Return all notes, those published last at the end."""
    paths = sorted(root.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(path.read_text()) for path in paths]
    return [Note(**one | {v: Version(*one[v]) for v in ("since", "version")}) for one in found]


def chain(wanted: Note, known: list[Note]) -> list[Note]:
    """Return a full export and the deltas after it, up to the wanted publication."""
    found = [wanted]
    while found[0].kind == "delta":
        before = [one for one in known if one.version == found[0].since]
        # A full export of this version is as good as a delta to it, and shorter.
        before.sort(key=lambda one: one.kind == "full")
        found.insert(0, before[-1])
    return found


class Follower:
    """A served model that is brought to one publication after the other.

    Args:
      root: the folder of the publications.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.model: Any = None

    def wait(self, batch: int, kinds: tuple[str, ...]) -> Note:
        """Return the latest publication of so many batches, once there is one."""
        while True:
            found = [n for n in notes(self._root) if n.batch == batch and n.kind in kinds]
            if found:
                return found[-1]
            time.sleep(0.01)

    def follow(self, note: Note) -> None:
        """Bring the model to a publication, and compare its keys with the trainer's."""
        if self.model is not None and self.model.version == note.since and note.kind == "delta":
            self.model.apply(note.path)
        else:  # the first time; or the trainer was restored, and went on from an earlier step
            first, *deltas = chain(note, notes(self._root))
            self.model = FollowingModel(load_model(first.path))
            for one in deltas:
                self.model.apply(one.path)
        if digest(self.model.keys("items")[0]) != note.digest:
            raise AssertionError(f"the keys of {note.path} are not the trainer's")


def report(work: Path, first: int) -> tuple[float, float]:
    """Print and return the AUC of both servers, and print the lags.

    Args:
      work: the folder that trainer and server have shared.
      first: the batch from which scores count. Before the first full export of a trained model, the
        server of full exports knows nothing.
    """
    paths = sorted((work / "scores").glob("*.npz"))
    windows = {int(path.stem): np.load(path) for path in paths}
    lags = np.concatenate([one["lags"] for one in windows.values()])
    click, fresh, stale = (
        np.concatenate([one[name] for begin, one in windows.items() if begin >= first])
        for name in ("click", "fresh", "stale")
    )
    found = float(auc(fresh, click)), float(auc(stale, click))
    print(f"AUC from batch {first} on: {found[0]:.5f} by deltas, {found[1]:.5f} by full exports")
    print(f"{lags.size} items, served {np.median(lags):.2f} s after the first click", end="")
    print(" (median), ", end="")
    print(f"{lags.max():.2f} s at worst; {len(windows)} times with the trainer's keys")
    return found
