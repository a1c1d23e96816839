"""The part of the check that runs each kernel by itself, on every device, beside NumPy.

When a table is wrong, this part says which kernel is to blame. On a TPU with SparseCores these are
the Pallas kernels, on a CPU the compiled ones.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpu_embed.check.report import BFLOAT16, FLOAT32, PartReport
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat, packing_of
from tpu_embed.kernels.operands import RowsToSum, SumLayout

DIMS = (1, 7, 8, 16, 20, 128, 130)
"""One number, multiples of the 8 and 16 lanes of SparseCores and others, and more than a line."""
_ROWS, _ENTRIES, _SUMS = PACKED_ROWS, 300, SumLayout((40,))
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_SPECIAL = (0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1e-39)
"""Both zeros, infinities, NaN, the greatest number, a tie to either side, one below 2⁻¹²⁶."""

# A kernel takes the format of a table, its stored rows [R, D], bfloat16 as uint16, and four arrays:
# index [N], of rows and numbers that are none; segments [N], ascending, the sum of each entry;
# weights [N]; and places [R], the rows to write, every second of which is none.


def _array(form, rows):
    return form.pack(rows).reshape(form.array(_ROWS).shape)


def _read(form, rows, index, *_):
    return form.unpack(dispatch.read_rows(_array(form, rows), index, form))


def _write(form, rows, index, segments, weights, places):
    array = dispatch.write_rows(_array(form, rows), places, rows[::-1], form)
    return form.unpack(form.by_row(array))[:_ROWS]


def _add(form, rows, index, segments, weights, places):
    weights = weights if form.dtype == _FLOAT32 else None
    return dispatch.gather_sum(RowsToSum(rows, index, segments, weights), _SUMS)[0]


def _read_rounded(form, rows, index, *_):
    sent = dataclasses.replace(form, dtype=_BFLOAT16)
    return sent.unpack(rounded.read_rows(_array(form, rows), index, form, sent))


def _add_rounded(form, rows, index, segments, weights, places):
    sent = dataclasses.replace(form, dtype=_BFLOAT16)
    given = RowsToSum(rows, index, segments, weights)
    return storage.widened(sent.unpack(rounded.gather_sum(given, _SUMS, sent)))


# The same in NumPy, of the rows as they are.


def _rows_read(rows, index, *_):
    present = (index >= 0) & (index < _ROWS)
    return np.where(present[:, None], rows[index % _ROWS], rows.dtype.type(0))


def _rows_written(rows, index, segments, weights, places):
    new, written = rows.copy(), places >= 0
    new[places[written]] = rows[::-1][written]
    return new


def _rows_added(rows, index, segments, weights, places):
    sums, found = np.zeros((*_SUMS.bags, rows.shape[1])), _rows_read(rows, index)
    factors = weights[:, None] if rows.dtype == _FLOAT32 else 1.0
    np.add.at(sums, segments, factors * found.astype(np.float64))
    return sums


def _rows_rounded(rows, index, *_):
    return _rows_read(rows.astype(_BFLOAT16), index)


TRIALS = {
    "gather_rows": (_read, _rows_read, 0),
    "set_rows": (_write, _rows_written, 0),
    "gather_sum": (_add, _rows_added, FLOAT32),
    "rounded gather_rows": (_read_rounded, _rows_rounded, 0),
    "rounded gather_sum": (_add_rounded, _rows_added, BFLOAT16),
}
"""Each kernel, what it should do, and how far it may be from that."""


def check_kernels(devices: Sequence[Any], report: PartReport) -> str:
    """Run the kernels for rows of several widths and dtypes on every device."""
    rng, mesh = np.random.default_rng(0), Mesh(np.asarray(devices), ("devices",))
    index = rng.integers(0, _ROWS, _ENTRIES).astype(np.int32)
    index[::9] = rng.choice([-1, _ROWS, -_ROWS, 2**31 - 1], len(index[::9]))
    segments = np.sort(rng.integers(0, *_SUMS.bags, _ENTRIES)).astype(np.int32)
    weights = rng.uniform(0.5, 2, _ENTRIES).astype(np.float32)
    places = np.where(np.arange(_ROWS) % 2, -1, np.arange(_ROWS)[::-1]).astype(np.int32)
    asked = index, segments, weights, places
    for name, (kernel, right, tolerance) in TRIALS.items():
        # Exchanges round rows of float32 alone.
        dtypes = (_FLOAT32,) if "rounded" in name else (_FLOAT32, _BFLOAT16)
        forms = [RowFormat((d,), dtype, packing_of(devices[0])) for dtype in dtypes for d in DIMS]
        tables = [rng.normal(size=(_ROWS, *form.shape)).astype(form.dtype) for form in forms]
        if kernel is _read_rounded:
            tables = [np.resize(np.asarray(_SPECIAL, np.float32), one.shape) for one in tables]

        def of_tables(
            tables: Any, *asked: Any, kernel: Any = kernel, forms: Any = forms
        ) -> list[Any]:
            return [kernel(form, rows, *asked) for form, rows in zip(forms, tables, strict=True)]

        with report.during(f"kernel {name}"):
            results = run(on_each(mesh, of_tables), [_stored(rows) for rows in tables], *asked)
            for form, rows, got in zip(forms, tables, results, strict=True):
                what = f"kernel {name}, D = {form.shape[0]}, {form.dtype}"
                _compare(report, what, _stored(right(rows, *asked)), got, tolerance)
    with report.during("kernel sort_rows"):
        order = np.argsort(index, kind="stable").astype(np.int32)
        ordered, positions = run(on_each(mesh, dispatch.sort_rows), index)
        _compare(report, "kernel sort_rows, rows", index[order], ordered)
        _compare(report, "kernel sort_rows, positions", order, positions)
    return f"{', '.join(TRIALS)}, sort_rows; D = {', '.join(map(str, DIMS))}"


def _stored(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint16) if rows.dtype == _BFLOAT16 else rows


def _compare(report: PartReport, what: str, right: Any, got: Any, tolerance: float = 0) -> None:
    on_each = np.broadcast_to(right, (len(got), *right.shape))
    report.compare(f"{what}, by device", on_each, got, tolerance=tolerance)


def on_each(mesh: Mesh, kernel: Callable[..., Any]) -> Any:
    """Return a jitted kernel that runs on every device, with results `[devices, …]`."""

    def stacked(*operands: Any) -> Any:
        return jax.tree.map(lambda array: array[None], kernel(*operands))

    whole, split = PartitionSpec(), PartitionSpec("devices")
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False)
    )


def run(program: Any, *operands: Any) -> Any:
    """Run a program, and return its results as NumPy arrays."""
    return jax.device_get(program(*operands))
