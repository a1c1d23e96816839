"""Click data: batches of examples from memory-mapped files.

`criteo.py` writes the files and `Stored` reads them; `planted.py` makes examples up. There is one
id per table and example; `multi_hot.py` turns the ids into bags.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

DENSE, TABLES = 13, 26
META = "meta.json"  # written last: without it the files are incomplete
COLUMNS = {"label": ("u1", ()), "dense": ("<f4", (DENSE,)), "ids": ("<i4", (TABLES,))}


class Examples(NamedTuple):
    """A batch. A padding example has label -1 and ids -1; loss and metric ignore it."""

    label: np.ndarray  # float32 [B]: 1 a click, 0 none
    dense: np.ndarray  # float32 [B, 13]
    ids: np.ndarray  # int32 [B, tables]

    def padded(self, size: int) -> Examples:
        """Return the batch padded to `size` examples."""
        more = size - len(self.label)
        return Examples(
            np.pad(self.label, (0, more), constant_values=-1),
            np.pad(self.dense, ((0, more), (0, 0))),
            np.pad(self.ids, ((0, more), (0, 0)), constant_values=-1),
        )


@dataclasses.dataclass(frozen=True)
class Stored:
    """Examples in `label.bin`, `dense.bin` and `ids.bin` of a directory, mapped into memory."""

    label: np.ndarray  # uint8 [N]
    dense: np.ndarray  # float32 [N, 13]
    ids: np.ndarray  # int32 [N, 26]

    @classmethod
    def open(cls, directory: Path, rows: Iterable[int]) -> Stored:
        """Map the files of `directory`, which must be made for tables of `rows` rows.

        Raises:
          ValueError: the files are missing, cut short, or made for tables of other sizes.
        """
        if not (directory / META).exists():
            raise ValueError(f"{directory}: expected {META}: convert with examples/criteo.py")
        meta, rows = json.loads((directory / META).read_text()), list(rows)
        if (made := meta["rows"]) != rows:
            raise ValueError(f"{directory}: expected ids mod {rows}, got mod {made}: same --scale?")
        columns = {}
        for name, (dtype, shape) in COLUMNS.items():
            path, shape = directory / f"{name}.bin", (meta["examples"], *shape)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if path.stat().st_size != size:
                raise ValueError(f"{path}: expected {size} bytes, got {path.stat().st_size}")
            columns[name] = np.memmap(path, dtype, "r", shape=shape)
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.label)

    def at(self, rows: np.ndarray | slice) -> Examples:
        """Return the examples in these rows."""
        return Examples(self.label[rows].astype(np.float32), self.dense[rows], self.ids[rows])

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, block: int = 64
    ) -> Iterator[Examples]:
        """Yield one epoch to train on; a last batch that is not full is dropped.

        Blocks of neighbours are shuffled, so that a batch is read in few pieces and the order needs
        8 bytes per block; `block=1` shuffles single examples. The order depends only on seed and
        epoch, so every epoch drops other examples.

        Raises:
          ValueError: there are fewer examples than one batch.
        """
        if (size := len(self)) < batch_size:
            raise ValueError(f"batch size: expected at most {size}, the examples, got {batch_size}")
        order = np.random.default_rng([seed, epoch]).permutation(-(-len(self) // block))
        for start in range(0, len(self) - batch_size + 1, batch_size):
            yield self.at(_rows(np.arange(start, start + batch_size), order, len(self), block))

    def in_order(self, batch_size: int) -> Iterator[Examples]:
        """Yield every example once, for evaluation; the last batch is padded to full size."""
        for start in range(0, len(self), batch_size):
            yield self.at(slice(start, start + batch_size)).padded(batch_size)


def _rows(positions: np.ndarray, order: np.ndarray, size: int, block: int) -> np.ndarray:
    """Return the rows at positions of a shuffled order; the block of the last rows may be short."""
    lacking = len(order) * block - size
    end_of_short = (int(np.argmax(order)) + 1) * block - lacking
    positions = positions + np.where(positions >= end_of_short, lacking, 0)
    return order[positions // block] * block + positions % block
