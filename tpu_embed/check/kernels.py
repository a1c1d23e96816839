"""The part of the check that runs each kernel by itself, on every device, beside a loop.

When a table is wrong, this part says which kernel is to blame. On a TPU with SparseCores these are
the Pallas kernels, on a CPU the compiled ones.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpu_embed.check import merging
from tpu_embed.check.findings import BFLOAT16, FLOAT32, Findings
from tpu_embed.check.trials import Trial
from tpu_embed.kernels import dispatch, rounded, sparsecore, storage
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat, packing_of
from tpu_embed.kernels.operands import RowsToSum, SumLayout

DIMS = (1, 7, 8, 16, 20, 128, 130)
"""One number, multiples of the 8 and 16 lanes of SparseCores and others, and more than a line."""
_ROWS, _ENTRIES, _SUMS = PACKED_ROWS, 300, 40


class Source(NamedTuple):
    """A table as the kernels get it.

    Attributes:
      what: its dim and dtype, for findings.
      row_format: how its rows are stored.
      rows: the stored rows `[R, D]`, bfloat16 as uint16.
      weighted: whether sums of its rows have weights.
    """

    what: str
    row_format: RowFormat
    rows: np.ndarray
    weighted: bool

    @property
    def rounded_format(self) -> RowFormat:
        """The format in which its rows are sent if the exchange rounds them."""
        return dataclasses.replace(self.row_format, dtype=np.dtype(ml_dtypes.bfloat16))

    @property
    def widened(self) -> np.ndarray:
        """The rows as float64."""
        logical = self.rows.view(ml_dtypes.bfloat16) if self.rows.itemsize == 2 else self.rows
        return logical.astype(np.float64)


class Entries(NamedTuple):
    """What the kernels are asked for, as NumPy arrays, or traced inside a kernel.

    Attributes:
      index: rows int32 `[N]`, some of them outside of the table.
      segments: the sum of each entry, int32 `[N]`, ascending.
      weights: float32 `[N]`.
    """

    index: Any
    segments: Any
    weights: Any


def check_kernels(devices: Sequence[Any], findings: Findings) -> str:
    """Run the kernels for rows of several widths and dtypes on every device."""
    rng = np.random.default_rng(0)
    sources = [_source(rng, dim, dtype, devices[0]) for dtype in ("float32", "bfloat16")
               for dim in DIMS]  # fmt: skip
    index = rng.integers(0, _ROWS, _ENTRIES).astype(np.int32)
    index[::9] = rng.choice([-1, _ROWS, -_ROWS, 2**31 - 1], len(index[::9]))
    segments = np.sort(rng.integers(0, _SUMS, _ENTRIES)).astype(np.int32)
    weights = rng.uniform(0.5, 2, _ENTRIES).astype(np.float32)
    entries = Entries(index, segments, weights)
    checks = {
        "gather_rows": _try_gather_rows,
        "set_rows": _try_set_rows,
        "gather_sum": _try_gather_sum,
        "rounded gather_rows": _try_rounded_rows,
        "rounded gather_sum": _try_rounded_sums,
        "sort_rows": _try_sort_rows,
    }
    # Elsewhere the sums are merged by `gather_sum`, and the rules are tried with engines.
    if sparsecore.has_sparse_cores(devices[0]):
        checks["merge_update"] = lambda sources, entries: merging.trial(rng)
    mesh = Mesh(np.asarray(devices), ("devices",))
    for name, prepare in checks.items():
        with findings.during(f"kernel {name}"):
            _compare(mesh, f"kernel {name}", prepare(sources, entries), findings)
    widths = f"D = {', '.join(map(str, DIMS))}"
    return f"{', '.join(checks)}; {widths}"


def _source(rng: np.random.Generator, dim: int, dtype: str, device: Any) -> Source:
    logical = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    rows = rng.normal(size=(_ROWS, dim)).astype(logical)
    form = RowFormat((dim,), np.dtype(logical), packing_of(device))
    stored = rows.view(np.uint16) if dtype == "bfloat16" else rows
    return Source(f"D = {dim}, {dtype}", form, stored, weighted=dtype == "float32")


def _array(source: Source, rows: Any) -> Any:
    """Return stored rows `[R, D]` as the array that holds them on the device."""
    return source.row_format.pack(rows).reshape(source.row_format.array(_ROWS).shape)


def program(mesh: Mesh, kernel: Callable[..., Any]) -> Any:
    """Return a jitted function that runs a kernel on every device, all with the same operands.

    Each of its results has an axis in front, `[devices, …]`.
    """

    def stacked(*operands: Any) -> Any:
        return jax.tree.map(lambda array: array[None], kernel(*operands))

    whole, split = PartitionSpec(), PartitionSpec("devices")
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False)
    )


def _compare(mesh: Mesh, where: str, trial: Trial, findings: Findings) -> None:
    """Compare a kernel's results on every device, `[devices, …]`, with the right ones."""
    results = jax.device_get(program(mesh, trial.kernel)(*trial.operands))
    for (what, expected), got in zip(trial.right, results, strict=True):
        on_each = np.broadcast_to(expected, (mesh.size, *expected.shape))
        findings.compare(f"{where}, {what}, by device", on_each, got, tolerance=trial.tolerance)


def _try_gather_rows(sources: Sequence[Source], entries: Entries) -> Trial:
    def kernel(tables: list[Any], index: Any) -> list[Any]:
        pairs = zip(sources, tables, strict=True)
        return [
            s.row_format.unpack(dispatch.read_rows(_array(s, rows), index, s.row_format))
            for s, rows in pairs
        ]

    right = []
    for source in sources:
        found = np.zeros((_ENTRIES, source.rows.shape[1]), source.rows.dtype)
        for i, row in enumerate(entries.index):
            if 0 <= row < _ROWS:
                found[i] = source.rows[row]
        right.append((source.what, found))
    return Trial(kernel, ([s.rows for s in sources], entries.index), right)


def _try_set_rows(sources: Sequence[Source], entries: Entries) -> Trial:
    # Every second row is written, in another order, between numbers that are no rows.
    places = np.full(_ROWS, -1, np.int32)
    places[::2] = np.arange(0, _ROWS, 2)[::-1]

    def kernel(tables: list[Any], values: list[Any], places: Any) -> list[Any]:
        found = []
        for s, rows, new in zip(sources, tables, values, strict=True):
            array = dispatch.write_rows(_array(s, rows), places, new, s.row_format)
            found.append(s.row_format.unpack(s.row_format.by_row(array))[:_ROWS])
        return found

    values = [source.rows[::-1].copy() for source in sources]
    right = []
    for source, new in zip(sources, values, strict=True):
        found = source.rows.copy()
        for i, row in enumerate(places):
            if row >= 0:
                found[row] = new[i]
        right.append((source.what, found))
    return Trial(kernel, ([s.rows for s in sources], values, places), right)


def _try_gather_sum(sources: Sequence[Source], entries: Entries) -> Trial:
    def kernel(tables: list[Any], entries: Entries) -> list[Any]:
        sums = []
        for source, rows in zip(sources, tables, strict=True):
            weights = entries.weights if source.weighted else None
            given = RowsToSum(rows, entries.index, entries.segments, weights)
            sums += dispatch.gather_sum(given, SumLayout((_SUMS,)))
        return sums

    right = []
    for source in sources:
        found, rows = np.zeros((_SUMS, source.rows.shape[1])), source.widened
        weights = entries.weights if source.weighted else np.ones(_ENTRIES)
        for row, segment, weight in zip(entries.index, entries.segments, weights, strict=True):
            if 0 <= row < _ROWS:
                found[segment] += weight * rows[row]
        right.append((source.what + ", weights" * source.weighted, found))
    return Trial(kernel, ([s.rows for s in sources], entries), right, FLOAT32)


def _try_rounded_rows(sources: Sequence[Source], entries: Entries) -> Trial:
    exact = _float32(sources)
    # Both zeros, infinities, NaN, the greatest number, a tie to either side, a number below 2⁻¹²⁶.
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1e-39], np.float32
    )
    tables = [np.resize(special, s.rows.shape) for s in exact]

    def kernel(tables: list[Any], index: Any) -> list[Any]:
        found = []
        for s, rows in zip(exact, tables, strict=True):
            sent = s.rounded_format
            found.append(sent.unpack(rounded.read_rows(_array(s, rows), index, s.row_format, sent)))
        return found

    right, present = [], (entries.index >= 0) & (entries.index < _ROWS)
    for source, rows in zip(exact, tables, strict=True):
        bits = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
        found = bits[np.where(present, entries.index, 0)]
        found[~present] = 0
        right.append((source.what, found))
    return Trial(kernel, (tables, entries.index), right)


def _try_rounded_sums(sources: Sequence[Source], entries: Entries) -> Trial:
    exact = _float32(sources)
    sums = _try_gather_sum(exact, entries)

    def kernel(tables: list[Any], entries: Entries) -> list[Any]:
        found = []
        for source, rows in zip(exact, tables, strict=True):
            given = RowsToSum(rows, entries.index, entries.segments, entries.weights)
            sent = source.rounded_format
            added = rounded.gather_sum(given, SumLayout((_SUMS,)), sent)
            found.append(storage.widened(sent.unpack(added)))
        return found

    return sums._replace(kernel=kernel, tolerance=BFLOAT16)


def _float32(sources: Sequence[Source]) -> list[Source]:
    return [source for source in sources if source.rows.dtype == np.float32]


def _try_sort_rows(sources: Sequence[Source], entries: Entries) -> Trial:
    del sources
    order = sorted(range(_ENTRIES), key=lambda i: entries.index[i])  # stable
    right = [
        ("rows", entries.index[order]),
        ("positions", np.asarray(order, np.int32)),
    ]
    return Trial(dispatch.sort_rows, (entries.index,), right)
