"""A small training run: features with their ids, gradients of two steps, and what must come out.

Input: declared features and the forms of their ids. Output: arguments for either API, and findings
where its results differ from the loops in `oracle.py`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tpu_embed.check import oracle
from tpu_embed.check.batches import FeatureInput, Form, draw
from tpu_embed.check.findings import BFLOAT16, FLOAT32, Findings
from tpu_embed.check.rules import Pair
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.initializers import ShardInfo

STEPS = 2
ROWS = 40
"""V of every table: few, so that most rows come several times in a batch."""

Tables = dict[str, np.ndarray]
AllSlots = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class KnownNumbers:
    """An initializer whose numbers are known, exact in bfloat16, and different from row to row.

    Args:
      start: tables that start with other numbers cannot be taken for each other.
    """

    start: int

    def __call__(self, key: Any, shape: Any, dtype: Any, shard_info: ShardInfo) -> Any:
        """Return the rows that `shard_info` names, `[n, D]`."""
        del key
        return self.of(shard_info.rows[:, None], jnp.arange(shape[1])).astype(dtype)

    def of(self, rows: Any, columns: Any) -> Any:
        """Return the numbers at rows and columns, (-48 … 48) / 128."""
        return ((rows * 37 + columns * 11 + self.start) % 97 - 48) / 128


def table(name: str, dim: int, **options: Any) -> TableConfig:
    """Return a table whose first numbers are known."""
    return TableConfig(
        ROWS, dim, name=name, initializer=KnownNumbers(zlib.crc32(name.encode()) % 97), **options
    )


class Declared(NamedTuple):
    """A feature, and how its ids are given.

    Attributes:
      feature: its config, whose table has a name.
      form: the form of its ids.
      weighted: whether they have weights.
    """

    feature: FeatureConfig
    form: Form = "dense"
    weighted: bool = False


def batch_size(devices: int, least: int = 16) -> int:
    """Return the least batch of at least `least` examples that the devices divide."""
    return -(-least // devices) * devices


class Workload:
    """One batch, and gradients for two steps with it.

    Args:
      declared: the features by name.
      batch: B.
    """

    def __init__(self, declared: Mapping[str, Declared], batch: int) -> None:
        rng = np.random.default_rng(0)
        self.features = {name: given.feature for name, given in declared.items()}
        self.inputs: dict[str, FeatureInput] = {
            name: draw(rng, given.feature, given.form, batch, weighted=given.weighted)
            for name, given in declared.items()
        }
        self.gradients: list[dict[str, np.ndarray]] = [
            {name: self._gradient(rng, name) for name in self.features} for _ in range(STEPS)
        ]

    def _gradient(self, rng: np.random.Generator, name: str) -> np.ndarray:
        shape = (*self.inputs[name].bags.shape, self.features[name].table.dim)
        return rng.normal(size=shape).astype(np.float32)

    @property
    def ids(self) -> dict[str, Any]:
        """The ids, as `place` takes them."""
        return {name: one.ids for name, one in self.inputs.items()}

    @property
    def weights(self) -> dict[str, Any] | None:
        """The weights, as `place` takes them."""
        given = {name: one.weights for name, one in self.inputs.items()}
        return None if all(one is None for one in given.values()) else given

    @property
    def tables(self) -> dict[str, TableConfig]:
        """The tables by name."""
        return {str(one.table.name): one.table for one in self.features.values()}


class Expected:
    """Tables and slots as the loops have them, beside those of the package.

    Args:
      workload: the batch and the gradients; its tables are made by `table`.
      tables: the tables `[V, D]` by name before the first step.
      slots: their slots by table, then by slot.
      pairs: the optimizer of each table, by the table's name.
      findings: where differences are noted.
    """

    def __init__(
        self,
        workload: Workload,
        tables: Tables,
        slots: AllSlots,
        pairs: Mapping[str, Pair],
        findings: Findings,
    ) -> None:
        self._workload, self._pairs, self._findings = workload, pairs, findings
        self._tables = {name: table.astype(np.float64) for name, table in tables.items()}
        self._slots, self._step = slots, 0

    def compare_activations(self, got: Mapping[str, Any], what: str = "lookup") -> None:
        """Compare the activations of the step that comes next."""
        for name, feature in self._workload.features.items():
            table = str(feature.table.name)
            right = oracle.lookup(self._tables[table], self._workload.inputs[name].bags)
            where = f"{what}, step {self._step + 1}, table {table!r}, feature {name!r}"
            self._findings.compare(where, right, got[name], tolerance=_tolerance(feature.table))

    def advance(self) -> None:
        """Update the tables of the loops with the gradients of the next step."""
        gradients = self._workload.gradients[self._step]
        self._step += 1
        for name, pair in self._pairs.items():
            found = [
                one
                for feature, config in self._workload.features.items()
                if config.table.name == name
                for one in oracle.occurrences(
                    self._workload.inputs[feature].bags, gradients[feature]
                )
            ]
            found = oracle.summed(found) if pair.accumulates else found
            table, self._slots[name] = oracle.update(
                self._tables[name], self._slots[name], found, pair.rule, self._step
            )
            # Only stored rows are rounded, to nearest even; slots never are.
            if self._workload.tables[name].dtype == "bfloat16":
                table = table.astype(ml_dtypes.bfloat16).astype(np.float64)
            self._tables[name] = table

    def compare_tables(self, tables: Tables, slots: AllSlots, what: str = "update") -> None:
        """Compare tables and slots after the last step."""
        for name, config in self._workload.tables.items():
            tolerance = _tolerance(config)
            where = f"{what}, table {name!r}"
            if name in self._pairs:
                where += f", {type(self._pairs[name].optimizer).__name__}"
            self._findings.compare(where, self._tables[name], tables[name], tolerance=tolerance)
            for slot, right in self._slots[name].items():
                self._findings.compare(
                    f"{where}, slot {slot!r}", right, slots[name][slot], tolerance=tolerance
                )


def _tolerance(table: TableConfig) -> float:
    return BFLOAT16 if table.dtype == "bfloat16" else FLOAT32
