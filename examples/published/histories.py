"""Histories of users, cut by "leave one out", the files they come from, and the rank of items.

"Leave one out": the last item of each user is the test, and sometimes the one before it the
validation. The rest is trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpu_embed import EmbeddingEngine, metrics, retrieval


@dataclass(frozen=True)
class Histories:
    """What users have chosen, in order of time.

    Attributes:
      rows: int32 arrays, the items of each user.
      items: V; ids are from 0 to V - 1.
      times: int32 arrays, the time of each event, in seconds; None: not known.
      next_times: int32 arrays, the time of the event after each, even if that was left out.
    """

    rows: list[np.ndarray]
    items: int
    times: list[np.ndarray] | None = None
    next_times: list[np.ndarray] | None = None

    def without(self, last: int) -> Histories:
        """Return the histories without their last events, at least one."""
        times = (self.times, self.next_times)
        known = (None if of is None else [row[:-last] for row in of] for of in times)
        return Histories([row[:-last] for row in self.rows], self.items, *known)


def read(path: str | Path, known: dict[str, str]) -> bytes:
    """Return what a file holds; print its SHA-256, of which `known` has the beginning by name."""
    content, expected = Path(path).read_bytes(), known.get(Path(path).name)
    found = hashlib.sha256(content).hexdigest()
    verdict = ", as published" if expected and found.startswith(expected) else ", another file"
    print(f"{Path(path).name}: SHA-256 {found[:12]}{verdict if expected else ''}")
    return content


def batches_in(examples: int, batch_size: int) -> int:
    """Return how many batches there are in an epoch.

    Raises:
      ValueError: there is none.
    """
    if examples < batch_size:
        raise ValueError(f"batch_size: expected at most {examples} examples, got {batch_size}")
    return examples // batch_size


def padded(rows: list[np.ndarray]) -> np.ndarray:
    """Return rows of different lengths as the lines of an int32 array, padded with -1.

    Their length is a multiple of 64, so that a search is compiled for few of them.
    """
    lengths = np.array([len(row) for row in rows])
    lines = np.full((len(rows), -(-max(1, lengths.max()) // 64) * 64), -1, np.int32)
    lines[np.arange(lines.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return lines


def rank(
    engine: EmbeddingEngine,
    state: Any,
    parts: Iterable[tuple[jax.Array, np.ndarray]],
    wanted: np.ndarray,
    top: int,
    **scores: Any,
) -> tuple[float, float]:
    """Return recall and NDCG of what is wanted among the best rows of the table "items".

    Args:
      engine: of the table.
      state: its state.
      parts: of the users, one after the other: queries `[N, D]` and ids to leave out `[N, E]`.
      wanted: int32 [users, R], padded with -1; what `parts` has beyond the last user is left out.
      top: how many of the best rows count.
      scores: options of `retrieval.top_k`.
    """
    found = [
        np.asarray(
            retrieval.top_k(engine, state, "items", queries, top, exclude=seen, **scores).ids
        )
        for queries, seen in parts
    ]
    ids = np.concatenate(found)[: len(wanted)]
    return float(metrics.recall_at_k(ids, wanted)), float(metrics.ndcg_at_k(ids, wanted))
