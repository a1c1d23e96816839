"""The part of the check that runs each kernel by itself, on every device, beside NumPy.

When a table is wrong, this part says which kernel is to blame. On a TPU with SparseCores these are
the Pallas kernels, on a CPU the compiled ones.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import dataclasses
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
# weights [N]; and places [R], the rows to write, every second of which is none. A format to be
# sent in has rows rounded on their way.


def _read(form, rows, index, *_, sent=None):
    array = form.pack(rows).reshape(form.array(_ROWS).shape)
    if sent:
        return sent.unpack(rounded.read_rows(array, index, form, sent))
    return form.unpack(dispatch.read_rows(array, index, form))


def _write(form, rows, index, segments, weights, places, sent=None):
    array = form.pack(rows).reshape(form.array(_ROWS).shape)
    array = dispatch.write_rows(array, places, rows[::-1], form)
    return form.unpack(form.by_row(array))[:_ROWS]


def _add(form, rows, index, segments, weights, places, sent=None):
    given = RowsToSum(rows, index, segments, weights if form.dtype == _FLOAT32 else None)
    if sent:
        return storage.widened(sent.unpack(rounded.gather_sum(given, _SUMS, sent)))
    return dispatch.gather_sum(given, _SUMS)[0]


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


TRIALS = {
    "gather_rows": (_read, _rows_read, 0),
    "set_rows": (_write, _rows_written, 0),
    "gather_sum": (_add, _rows_added, FLOAT32),
    "rounded gather_rows": (_read, _rows_read, 0),
    "rounded gather_sum": (_add, _rows_added, BFLOAT16),
}
"""Each kernel, what it should do, and how far it may be from that."""


def check_kernels(devices: list[Any], report: PartReport) -> str:
    """Run the kernels for rows of several widths and dtypes on every device."""
    rng, packing = np.random.default_rng(0), packing_of(devices[0])
    index = rng.integers(0, _ROWS, _ENTRIES).astype(np.int32)
    index[::9] = rng.choice([-1, _ROWS, -_ROWS, 2**31 - 1], len(index[::9]))
    segments = np.sort(rng.integers(0, _SUMS.bags[0], _ENTRIES)).astype(np.int32)
    weights = rng.uniform(0.5, 2, _ENTRIES).astype(np.float32)
    places = np.where(np.arange(_ROWS) % 2, -1, np.arange(_ROWS)[::-1]).astype(np.int32)
    asked = index, segments, weights, places
    for name, (kernel, right, tolerance) in TRIALS.items():
        rounds = name.startswith("rounded")  # exchanges round rows of float32 alone
        dtypes = (_FLOAT32,) if rounds else (_FLOAT32, _BFLOAT16)
        forms = [RowFormat((d,), dtype, packing) for dtype in dtypes for d in DIMS]
        tables = [rng.normal(size=(_ROWS, *form.shape)).astype(form.dtype) for form in forms]
        for rows in tables if not tolerance else ():
            rows[: len(_SPECIAL)] = np.array(_SPECIAL, rows.dtype)[:, None]

        def of_tables(tables, *asked, kernel=kernel, forms=forms, rounds=rounds):
            sent = [rounds and dataclasses.replace(form, dtype=_BFLOAT16) for form in forms]
            whole = zip(forms, tables, sent, strict=True)
            return [kernel(form, rows, *asked, sent=to) for form, rows, to in whole]

        with report.during(f"kernel {name}"):
            found = on_each(devices, of_tables)([_stored(rows) for rows in tables], *asked)
            for form, rows, got in zip(forms, tables, jax.device_get(found), strict=True):
                expected = right(rows, *asked)
                expected = expected.astype(_BFLOAT16) if rounds and not tolerance else expected
                what = f"kernel {name}, D = {form.shape[0]}, {form.dtype}"
                _compare(report, what, _stored(expected), got, tolerance)
    with report.during("kernel sort_rows"):
        order = np.argsort(index, kind="stable").astype(np.int32)
        ordered, positions = jax.device_get(on_each(devices, dispatch.sort_rows)(index))
        _compare(report, "kernel sort_rows, rows", index[order], ordered)
        _compare(report, "kernel sort_rows, positions", order, positions)
    return f"{', '.join(TRIALS)}, sort_rows; D = {', '.join(map(str, DIMS))}"


def _stored(rows):
    return rows.view(np.uint16) if rows.dtype == _BFLOAT16 else rows


def _compare(report, what, right, got, tolerance=0):
    on_all = np.broadcast_to(right, (len(got), *right.shape))
    report.compare(f"{what}, by device", on_all, got, tolerance=tolerance)


def on_each(devices, kernel):
    """Return a jitted kernel that runs on every device, with results `[devices, …]`."""

    def stacked(*operands):
        return jax.tree.map(lambda array: array[None], kernel(*operands))

    mesh, split = Mesh(np.asarray(devices), ("devices",)), PartitionSpec("devices")
    whole = PartitionSpec()
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False)
    )
