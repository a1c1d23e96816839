"""Read the maps of dynamic vocabularies in a checkpoint without an engine, to look at them.

So `python -m tpu_embed vocabulary` does.

Input: the directory of a checkpoint. Output: by table, its keys with their scores, and totals; the
same as text, or as plain objects for JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_embed._checks import check_int, did_you_mean, refuse
from tpu_embed.io.checkpoint import manifest, maps
from tpu_embed.io.checkpoint.commit import LAYERS, TABLES, check_items, find_checkpoint
from tpu_embed.io.checkpoint.module_checkpoint import directory_of, read_paths
from tpu_embed.vocabulary import COUNTERS, KeyScores, describe_keys


def read_maps(path: str | Path) -> dict[str, tuple[KeyScores, int, dict[str, int]]]:
    """Return the maps of a checkpoint, by table; of a model, by path of the layer and table.

    Only the maps are read, no row of a table; nothing is computed on a device.

    Args:
      path: what `save` or `save_modules` wrote.

    Returns:
      By table: its keys, and what decides which of them stay; how many rows the table has; and the
      numbers of keys that were "admitted", "evicted", "expired", "unseen" and "forgotten".

    Raises:
      FileNotFoundError: there is no checkpoint, or a file of it is missing.
      ValueError: a file is damaged, or no table has a dynamic vocabulary.
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
            totals: dict[str, int] = dict(
                zip(COUNTERS, state.counters.tolist(), strict=True)
            )
            scores = KeyScores(*state[:6], step=step)
            found[f"{prefix}{name}"] = scores, saved["capacity"], totals
    if not found:
        refuse(
            f"checkpoint {root}",
            expected="tables with vocabulary=DynamicVocabulary(…)",
            got="tables of row numbers alone",
            remedy="only their ids are keys, which come and go",
        )
    return found


def statistics_of(
    path: str | Path, *, hottest: int = 10, table: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the figures of the vocabularies in a checkpoint, by table.

    Args:
      path: the directory of the checkpoint.
      hottest: how many keys to list in each order.
      table: the only table to look at; None: all.

    Returns:
      What `metrics.vocabulary_statistics` tells of an engine.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: a file is damaged, no vocabulary lives, or none of this name.
    """
    most, maps = check_int("--hottest", hottest, minimum=0), read_maps(path)
    if table is not None and table not in maps:
        refuse(
            "--table",
            expected=f"one of {sorted(maps)}",
            got=repr(table),
            remedy=did_you_mean(table, maps),
        )
    return {
        name: describe_keys(*one, hottest=most)
        for name, one in maps.items()
        if table in (None, name)
    }


def explain(statistics: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures of vocabularies as text.

    Args:
      statistics: what `statistics_of` returned.

    Example:
      >>> import numpy as np
      >>> from tpu_embed.vocabulary import KeyScores
      >>> keys, rows = np.array([7, 5], np.uint64), np.array([0, 1])
      >>> scores = KeyScores(keys, rows, np.array([1, 4]), rows + 1, keys[:0], rows[:0], 4)
      >>> print(explain({"films": describe_keys(scores, 8, {"admitted": 2}, 0)}))
      table 'films' at step 4: 2 of 8 rows have a key (25.0 %), 0 keys wait
        steps since a key was seen: 10 % 0, 25 % 0, 50 % 0, 75 % 3, 90 % 3, 99 % 3, all 3
                             in all    per step
        admitted                  2       0.500
    """
    return "\n\n".join("\n".join(_lines(name, one)) for name, one in statistics.items())


def _lines(name: str, one: Mapping[str, Any]) -> list[str]:
    lines = [
        f"table {name!r} at step {one['step']:,}: {one['keys']:,} of {one['capacity']:,} rows have "
        f"a key ({100 * one['occupancy']:.1f} %), {one['waiting']:,} keys wait"
    ]
    ages = [
        f"{'all' if float(share) == 1 else f'{100 * float(share):g} %'} {age:,}"
        for share, age in one["ages"].items()
    ]
    if ages:
        lines.append(f"  steps since a key was seen: {', '.join(ages)}")
    lines.append(f"  {'':10}{'in all':>17}{'per step':>12}")
    for what, total in one["totals"].items():
        lines.append(f"  {what:10}{total:>17,}{one['per_step'][what]:>12,.3f}")
    for title, field in _LISTS.items():
        if keys := one[field]:
            widths = {column: 20 if column == "key" else 14 for column in keys[0]}
            heads = {column: column.replace("_", " ") for column in widths}
            lines.append(f"  {title}")
            for row in (heads, *keys):
                lines.append(
                    "  " + "".join(f"{row[c]:>{width}}" for c, width in widths.items())
                )
    return lines


_LISTS = {
    "keys that the most batches had": "most_batches",
    "keys seen last": "seen_last",
    "keys that wait, with the largest counts": "waiting_most",
}
