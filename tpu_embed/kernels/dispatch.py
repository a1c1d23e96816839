"""Choose which implementation of a kernel runs on which platform.

Every kernel has a reference in JAX's own operations, which runs everywhere and defines its results.
Beside it there may be a faster one: compiled C++ on CPUs, a repeatable scan on GPUs, Pallas kernels
on TPUs with SparseCores. CPU, GPU and reference are chosen when a program is lowered, so one traced
program can be exported for any platform. Rows packed for a TPU, and SparseCore kernels, are chosen
earlier, when a program is traced for a mesh of such chips.

Input: arrays. Output: arrays, the same on every platform but for the rounding of GPU sums.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tpu_embed._checks import refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels import (
    cpu,
    host_native,
    host_reference,
    lanes,
    reference,
    row_store_reference,
    sparsecore,
    vocabulary_reference,
)
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import RowsToSum, SumLayout

Kernel = Callable[..., Any]
"""One implementation of an operation."""

VARIABLE = "TPU_EMBED_KERNELS"
"""The environment variable that chooses the CPU kernels: `native` or `reference`."""


_REMEDY = "install the package again where a C++ compiler is on PATH"
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within this context, trace programs without compiled kernels, in this thread only.

    It takes precedence over `TPU_EMBED_KERNELS`. A function that was jitted and traced before keeps
    the kernels of that trace.
    """
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def kernels_in_use() -> str:
    """Return `"native"` or `"reference"`: the kernels that a program traced now runs on a CPU.

    Raises:
      ValueError: `TPU_EMBED_KERNELS` has an unknown value.
      RuntimeError: it is `native`, but the compiled kernels cannot be used.
    """
    if _reference_only.get():
        return "reference"
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "native", "reference"):
        refuse(VARIABLE, expected="native, reference or unset", got=repr(wanted))
    if wanted == "reference":
        return "reference"
    loaded = cpu.load()
    if loaded.path is not None:
        return "native"
    if wanted == "native":
        refuse(
            VARIABLE,
            expected="compiled kernels",
            got=loaded.why_not,
            remedy=_REMEDY,
            error=RuntimeError,
        )
    _say_once(loaded.why_not)
    return "reference"


def host_kernels() -> ModuleType:
    """Return the module whose functions run on the host: `host_native` or `host_reference`."""
    return host_native if kernels_in_use() == "native" else host_reference


def vocabulary_kernels() -> ModuleType:
    """Return the module whose `KeyMap` maps keys to rows."""
    return host_native if kernels_in_use() == "native" else vocabulary_reference


def row_store_kernels() -> ModuleType:
    """Return the module whose `RowStore` keeps rows on the host."""
    return host_native if kernels_in_use() == "native" else row_store_reference


@functools.cache
def _say_once(why_not: str) -> None:
    """Log a warning that compiled kernels are missing, once per process and reason."""
    text = "tpu_embed runs its CPU kernels in XLA's operations, with the same results but slower: "
    logging.getLogger("tpu_embed").warning("%s%s; %s", text, why_not, _REMEDY)


def choose(
    *operands: Any,
    otherwise: Kernel,
    native: Kernel | None = None,
    gpu: Kernel | None = None,
    sparse: Kernel | None = None,
) -> Any:
    """Return `f(*operands)`, where f is the implementation for the platform of the program.

    Args:
      operands: pytrees of arrays.
      otherwise: the reference; it runs on every platform without an implementation of its own.
      native: runs on a CPU that has the compiled kernels.
      gpu: runs on a GPU.
      sparse: runs on a TPU whose SparseCores Pallas can program.
    """
    # Decided while tracing, from the mesh: these kernels cannot be lowered for other platforms.
    if sparse is not None and sparsecore.here():
        return sparse(*operands)
    # Decided when lowering: `platform_dependent` keeps all branches until the platform is known.
    others = {} if gpu is None else {"cuda": gpu, "rocm": gpu}
    if native is not None and kernels_in_use() == "native":
        others["cpu"] = native
    if not others:
        return otherwise(*operands)
    return jax.lax.platform_dependent(*operands, default=otherwise, **others)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return zeros for a table or its slots; on a CPU, in memory that suits access by rows."""
    filled = functools.partial(jnp.zeros, shape, dtype)
    return choose(otherwise=filled, native=functools.partial(cpu.zeros, shape, dtype))


def read_rows(array: Array, row_ids: Array, row_format: RowFormat) -> Array:
    """Return rows of a table or slot, zeros where one is absent.

    Args:
      array: the table or slot, in `row_format`.
      row_ids: integer `[N]`.
      row_format: how the rows lie in the array.

    Returns:
      `[N, …]`; of a packed array, packed rows `[N, words]`, which `row_format.unpack` converts.
    """
    # Several rows share a line of 128 words: read whole lines, then pick the rows out of them.
    if row_format.in_lines:
        return lanes.gather_rows(array, row_ids, row_format.words)
    sparse = sparsecore.gather_rows if row_format.moved_by_sparse_cores else None
    return choose(
        row_format.by_row(array), row_ids, otherwise=gather_rows, sparse=sparse
    )


def write_rows(
    array: Array, row_ids: Array, values: Array, row_format: RowFormat
) -> Array:
    """Return a table or slot with stored `values` at `row_ids`; absent rows are not written.

    Args:
      array: the table or slot, in `row_format`.
      row_ids: integer `[U]`; present rows are all different.
      values: `[U, …]`, in the stored dtype.
      row_format: how the rows lie in the array.
    """
    # Rows that share a line must be next to each other, to be written together.
    if row_format.in_lines:
        row_ids, values = _ascending(row_ids, values)
    return write_ascending_rows(array, row_ids, values, row_format)


def _ascending(row_ids: Array, values: Array) -> tuple[Array, Array]:
    """Return rows in ascending order, absent ones last, and their values in the same order.

    Of a repeated row the first is kept, and the others become absent.
    """
    # Rows (7, 3, -1, 3) sort to (3, 3, 7, MAX) from positions (1, 3, 0, 2). The second 3 becomes
    # MAX, and the second sort moves it behind 7: (3, 7, MAX, MAX), values from (1, 0, 3, 2).
    absent = jnp.iinfo(row_ids.dtype).max
    ordered, first = sort_rows(jnp.where(row_ids < 0, absent, row_ids))
    again = jnp.zeros(row_ids.shape, bool).at[1:].set(ordered[1:] == ordered[:-1])
    ordered, then = sort_rows(jnp.where(again, absent, ordered))
    return ordered, values[first[then]]


def write_ascending_rows(
    array: Array, row_ids: Array, values: Array, row_format: RowFormat
) -> Array:
    """Do what `write_rows` does, without its sorts, for present rows that ascend already.

    If two present rows are k positions apart in `row_ids`, their numbers must differ by at least k:
    (3, absent, 5) is allowed, (3, absent, 4) is not.
    """
    if row_format.in_lines:
        return lanes.set_rows(array, row_ids, row_format.pack(values))
    sparse = sparsecore.set_rows if row_format.moved_by_sparse_cores else None
    operands = row_format.by_row(array), row_ids, row_format.pack(values)
    return choose(*operands, otherwise=set_rows, sparse=sparse).reshape(array.shape)


def gather_rows(table: Array, row_ids: Array) -> Array:
    """Return `table[row_ids]`, zeros where a row is absent; see `reference.gather_rows`."""
    native = cpu.gather_rows if cpu.takes_rows(table, row_ids) else None
    native = native and _with_tangents(native, reference.gather_rows)
    return choose(table, row_ids, otherwise=reference.gather_rows, native=native)


def set_rows(table: Array, row_ids: Array, values: Array) -> Array:
    """Return `table` with `values` at `row_ids`; see `reference.set_rows`."""
    native = cpu.set_rows if cpu.takes_rows(table, row_ids, values) else None
    return choose(table, row_ids, values, otherwise=reference.set_rows, native=native)


def sort_rows(row_ids: Array) -> tuple[Array, Array]:
    """Return sorted rows and the position each came from; see `reference.sort_rows`."""
    ordered, positions, _ = sort_with(row_ids, ())
    return ordered, positions


def sort_with(row_ids: Array, payload: PyTree) -> tuple[Array, Array, PyTree]:
    """Return sorted rows, their positions and the payload; see `reference.sort_with`."""
    # TPUs carry the payload along. CPUs and GPUs sort pairs fastest, and gathers cost them little.
    native, gpu = _sorts_of_pairs(row_ids)
    return choose(
        row_ids, payload, otherwise=reference.sort_with, native=native, gpu=gpu
    )


def sort_pairs(row_ids: Array, values: Array) -> tuple[Array, Array]:
    """Return sorted rows and their values; see `reference.sort_pairs`."""

    def only_pairs(sort):
        return sort and (lambda *operands: sort(*operands)[::2])

    native, gpu = map(only_pairs, _sorts_of_pairs(row_ids))
    return choose(
        row_ids, values, otherwise=reference.sort_pairs, native=native, gpu=gpu
    )


def _sorts_of_pairs(row_ids: Array) -> tuple[Kernel | None, Kernel]:
    """Return `sort_with` for a CPU, if its kernels take the rows, and for a GPU."""
    native = None
    if cpu.takes_rows(row_ids):
        native = _sort_then_gather(
            cpu.sort_rows, _with_tangents(cpu.gather_rows, reference.gather_rows)
        )
    return native, _sort_then_gather(reference.sort_rows, reference.gather_rows)


def _sort_then_gather(sort: Kernel, gather: Kernel) -> Kernel:
    """Return `sort_with`, made of `sort_rows` and `gather_rows`."""

    def run(row_ids, payload):
        ordered, positions = sort(row_ids)
        return (
            ordered,
            positions,
            jax.tree.map(lambda array: gather(array, positions), payload),
        )

    return run


def compact(values: Array, kept: Array, fill: int) -> Array:
    """Return the kept values, then `fill`; see `reference.compact`."""

    def indexed(set_rows):
        def run(values, kept):
            # Kept (1, 1, 0, 1) go to 0, 1 and 2; the one left out goes to N, which is outside.
            rank = jnp.cumsum(kept.astype(jnp.int32)) - 1
            places = jnp.where(kept, rank, values.shape[0])
            return set_rows(jnp.full_like(values, fill), places, values)

        return run

    sorts = functools.partial(reference.compact, fill=fill)
    native = indexed(cpu.set_rows) if cpu.takes_rows(values) else None
    return choose(
        values, kept, otherwise=sorts, native=native, gpu=indexed(reference.set_rows)
    )


def occurs(row_ids: Array, size: int) -> Array:
    """Tell of each row whether it is among `row_ids`; see `reference.occurs`."""

    def marked(row_ids):
        nowhere = jnp.zeros((size,), bool)
        return nowhere.at[row_ids].set(True, mode="drop", wrap_negative_indices=False)

    sorts = functools.partial(reference.occurs, size=size)
    return choose(row_ids, otherwise=sorts, native=marked, gpu=marked)


def segment_sum(values: Array, segments: Array, num_segments: int) -> Array:
    """Return sums of runs of entries; see `reference.segment_sum`."""
    # A GPU's scatter-add uses atomics, whose order changes from run to run; the scan's does not.
    summed = functools.partial(reference.segment_sum, num_segments=num_segments)
    scan = functools.partial(reference.segment_sum_scan, num_segments=num_segments)

    # On a CPU: `gather_sum` with index 0 … N - 1 reads [N, …], flattened to [N, d], in its order.
    def one_by_one(values, segments):
        positions = jax.lax.iota(segments.dtype, segments.shape[0])
        rows = values.reshape(values.shape[0], -1)
        layout = SumLayout((num_segments,))
        (sums,) = cpu.gather_sum(RowsToSum(rows, positions, segments), layout)
        return sums.reshape(num_segments, *values.shape[1:])

    able = values.dtype == jnp.float32 and cpu.takes_rows(values)
    native = _with_tangents(one_by_one, summed) if able else None
    return choose(values, segments, otherwise=summed, native=native, gpu=scan)


def gather_sum(rows: RowsToSum, layout: SumLayout) -> tuple[Array, ...]:
    """Return weighted sums of rows; see `reference.gather_sum`."""

    def sum_rows(rows):
        from tpu_embed.kernels import sparsecore_sums  # Pallas takes long to import

        return sparsecore_sums.sum_rows(rows, layout)

    otherwise = functools.partial(reference.gather_sum, layout=layout)
    native = functools.partial(cpu.gather_sum, layout=layout)
    gpu = functools.partial(otherwise, segment_sum=reference.segment_sum_scan)
    numbers = (rows.source,) if rows.weights is None else (rows.source, rows.weights)
    able = cpu.takes_rows(rows.index) and cpu.takes_numbers(*numbers)
    sums_rows = (
        rows.source.dtype in (jnp.float32, jnp.uint16) and rows.source.shape[1] > 0
    )
    return choose(
        rows,
        otherwise=otherwise,
        native=_with_tangents(native, otherwise) if able else None,
        gpu=gpu,
        sparse=_with_tangents(sum_rows, otherwise) if sums_rows else None,
    )


def _with_tangents(native: Kernel, otherwise: Kernel) -> Kernel:
    """Return `native` with the derivative of `otherwise`, because custom calls have none.

    Args:
      native: the compiled kernel.
      otherwise: the reference, with the same arguments.
    """
    differentiable = jax.custom_jvp(native)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def tangents_of(primals, tangents):
        values, structure = jax.tree.flatten(primals)
        directions = jax.tree.leaves(
            tangents, is_leaf=lambda x: isinstance(x, SymbolicZero)
        )
        # Only operands that really vary are differentiated; integers, for example, have no tangent.
        moving = [
            i for i, x in enumerate(directions) if not isinstance(x, SymbolicZero)
        ]

        def of_moving(*moved):
            now = dict(zip(moving, moved, strict=True))
            leaves = [now.get(i, value) for i, value in enumerate(values)]
            return otherwise(*jax.tree.unflatten(structure, leaves))

        return jax.jvp(
            of_moving, [values[i] for i in moving], [directions[i] for i in moving]
        )

    return differentiable
