"""Read the maps of living vocabularies in a checkpoint without an engine, to look at them.

Input: the directory of a checkpoint. Output: by table, its keys with their scores, and totals.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tpu_embed._checks import message
from tpu_embed.io.checkpoint import manifest, maps
from tpu_embed.io.checkpoint.commit import LAYERS, TABLES, check_items, find_checkpoint
from tpu_embed.io.checkpoint.module_checkpoint import directory_of, read_paths
from tpu_embed.vocabulary import COUNTERS, KeyScores


class SavedMap(NamedTuple):
    """The map of one table as it was saved.

    Attributes:
      scores: its keys, and what decides which of them stay.
      capacity: how many rows the table has.
      totals: the keys that were "admitted", "evicted", "expired", "unseen" and "forgotten".
    """

    scores: KeyScores
    capacity: int
    totals: dict[str, int]


def read_maps(path: str | Path) -> dict[str, SavedMap]:
    """Return the maps of a checkpoint, by table; of a model, by path of the layer and table.

    Only the maps are read, no row of a table; nothing is computed on a device.

    Args:
      path: what `save` or `save_modules` wrote.

    Raises:
      FileNotFoundError: there is no checkpoint, or a file of it is missing.
      ValueError: a file is damaged, or no table has a living vocabulary.
    """
    root, found = find_checkpoint(path), {}
    if (root / LAYERS).is_dir():
        layers = read_paths(root / LAYERS)[1]
        parts = {f"{layer}: ": directory_of(root, layer) for layer in layers}
    else:
        check_items(root, [TABLES], writer="save or save_modules")
        parts = {"": root / TABLES}
    for prefix, directory in parts.items():
        checkpoint, _, checksums = manifest.read_described(directory, None)
        described = maps.read_description(directory, checkpoint)
        if described is None:
            continue
        step = described["step"]
        for name, saved in described["tables"].items():
            state = maps.read_state(directory, name, saved, step, checksums)
            totals: dict[str, int] = dict(zip(COUNTERS, state.counters.tolist(), strict=True))
            scores = KeyScores(*state[:6], step=step)
            found[f"{prefix}{name}"] = SavedMap(scores, saved["capacity"], totals)
    if not found:
        expected, got = "tables with vocabulary=DynamicVocabulary(…)", "tables of row numbers alone"
        remedy = "only their ids are keys, which come and go"
        what = f"checkpoint {root}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return found
