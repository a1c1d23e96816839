"""Turn single ids into bags, as MLPerf does: id i stands for row i of a fixed matrix [V, H] of ids.

Column 0 is the id itself; the other columns are ids of the table, drawn uniformly once. There are
two sources of these matrices. Both are an `Expand`, from ids [B, F] to one bag [B, H] per table:

- `hashed_bags`: every entry is a hash of table, row and column, so nothing is stored. The numbers
  have the same distribution as MLPerf's, but are others.
- `stored_bags`: exactly MLPerf's matrices, as NumPy's old generator draws them from seed 0, table
  after table. `write_matrices` draws them once, block by block, into files that are then
  memory-mapped: 23.1 GB at full size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import dlrm_model
import numpy as np

from tpu_embed import hash_ids

Expand = Callable[[np.ndarray], dict[str, np.ndarray]]
DONE = "matrices.json"  # written last
DRAWN = 2**22  # numbers per block


def bags(config, directory: Path | None) -> Expand:
    """Return MLPerf's bags, drawn into `directory` if it lacks them; without it, hashed bags."""
    if directory is None:
        return hashed_bags(config)
    write_matrices(config, directory)
    return stored_bags(config, directory)


def hashed_bags(config) -> Expand:
    """Return bags whose ids are hashed: int32 [B, H] by table name, -1 where the id is -1."""
    names = dlrm_model.table_names(len(config.rows))

    # Entry (i, column) of a matrix [V, H] is the hash of its flat index i * H + column.
    def bag(table: int, ids: np.ndarray) -> np.ndarray:
        columns = np.arange(config.hots[table])
        keys = ids[:, None].astype(np.int64) * len(columns) + columns
        drawn = hash_ids(keys, config.rows[table], seed=table)
        drawn[:, 0] = ids
        return np.where(ids[:, None] < 0, -1, drawn)

    return lambda ids: {name: bag(i, ids[:, i]) for i, name in enumerate(names)}


def write_matrices(config, directory: Path) -> None:
    """Draw MLPerf's matrices into `directory`, unless it has them already.

    There is one file per table, int32 [V, H - 1]; column 0 is not stored. The numbers are those of
    `np.random.seed(0)`, then `np.random.randint(0, V, (V, H - 1))` for each table in order. That
    generator draws one number after the other, so drawing block by block gives the same numbers.
    """
    if _done(config, directory):
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / DONE).unlink(missing_ok=True)
    generator = np.random.RandomState(0)
    for path, rows, drawn in _files(config, directory):
        matrix = np.lib.format.open_memmap(path, "w+", np.int32, (rows, drawn))
        block = max(1, DRAWN // drawn)
        for start in range(0, rows, block):
            size = (min(block, rows - start), drawn)
            matrix[start : start + block] = generator.randint(0, rows, size, dtype=np.int64)
        matrix.flush()
    (directory / DONE).write_text(json.dumps(_made_for(config)))


def stored_bags(config, directory: Path) -> Expand:
    """Return bags from MLPerf's matrices: int32 [B, H] by table name, -1 where the id is -1.

    Raises:
      ValueError: `directory` does not hold the matrices of this workload.
    """
    if not _done(config, directory):
        raise ValueError(f"{directory}: expected matrices of these tables: call write_matrices")
    matrices = {p.stem: np.load(p, mmap_mode="r") for p, _, _ in _files(config, directory)}
    names = dlrm_model.table_names(len(config.rows))

    def bag(name: str, ids: np.ndarray) -> np.ndarray:
        if name not in matrices:
            return ids[:, None]
        bags = np.concatenate([ids[:, None], matrices[name][ids]], axis=1)
        return np.where(ids[:, None] < 0, -1, bags)

    return lambda ids: {name: bag(name, ids[:, i]) for i, name in enumerate(names)}


def _files(config, directory: Path) -> list[tuple[Path, int, int]]:
    """Return path, V and H - 1 of each table whose bags have more than one id."""
    names = dlrm_model.table_names(len(config.rows))
    sizes = zip(names, config.rows, config.hots, strict=True)
    return [(directory / f"{name}.npy", rows, hot - 1) for name, rows, hot in sizes if hot > 1]


def _made_for(config) -> dict[str, list[int]]:
    return {"rows": list(config.rows), "hots": list(config.hots)}


def _done(config, directory: Path) -> bool:
    done = directory / DONE
    return done.exists() and json.loads(done.read_text()) == _made_for(config)
