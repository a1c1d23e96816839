"""Which implementation of a kernel runs on which platform.

A program traced for a mesh of CPUs or GPUs lowers for both, and for TPUs: the platform is chosen
then. One traced for a mesh of TPUs has its rows packed for that chip, and SparseCores' kernels if
the chip has them. The core takes its kernels, and the choice between its own ways of an update,
from here. On CPU the compiled kernels run, where they were built; `reference` says what all mean.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.kernels import cpu, lanes, reference, sparsecore
from tpu_embed.kernels.formats import RowFormat

VARIABLE = "TPU_EMBED_KERNELS"
"""The environment variable that chooses the CPU kernels: `native` or `reference`."""


_REMEDY = "install the package again where a C++ compiler is on PATH"
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Trace without compiled kernels, in this thread alone, whatever the environment says.

    A function that was jitted and traced before keeps the kernels of that trace.
    """
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def kernels_in_use() -> str:
    """Return `"native"` or `"reference"`: which kernels a program traced now runs on a CPU.

    Raises:
      ValueError: `TPU_EMBED_KERNELS` is another word.
      RuntimeError: it is `native`, and the compiled kernels cannot be used.
    """
    if _reference_only.get():
        return "reference"
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "native", "reference"):
        raise ValueError(message(VARIABLE, expected="native, reference or unset", got=repr(wanted)))
    if wanted == "reference":
        return "reference"
    loaded = cpu.load()
    if loaded.path is not None:
        return "native"
    if wanted == "native":
        raise RuntimeError(
            message(VARIABLE, expected="compiled kernels", got=loaded.why_not, remedy=_REMEDY)
        )
    _say_once(loaded.why_not)
    return "reference"


@functools.cache
def _say_once(why_not: str) -> None:
    text = "tpu_embed runs its CPU kernels in XLA's operations, with the same results but slower: "
    logging.getLogger("tpu_embed").warning("%s%s; %s", text, why_not, _REMEDY)


def choose(
    *operands: Any,
    otherwise: Callable[..., Any],
    native: Callable[..., Any] | None = None,
    gpu: Callable[..., Any] | None = None,
    sparse: Callable[..., Any] | None = None,
) -> Any:
    """Return `f(*operands)`, with another f on a CPU, a GPU or SparseCores where given.

    Args:
      operands: pytrees of arrays.
      otherwise: the meaning; what every platform runs that has no other.
      native: on a CPU with compiled kernels.
      gpu: on a GPU.
      sparse: on a TPU whose SparseCores Pallas can program.
    """
    if sparse is not None and sparsecore.here():
        return sparse(*operands)
    others = {} if gpu is None else {"cuda": gpu, "rocm": gpu}
    if native is not None and kernels_in_use() == "native":
        others["cpu"] = native
    if not others:
        return otherwise(*operands)
    return jax.lax.platform_dependent(*operands, default=otherwise, **others)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return zeros for a table or its slots: on CPU, in memory laid out for access by rows."""
    filled = functools.partial(jnp.zeros, shape, dtype)
    return choose(otherwise=filled, native=functools.partial(cpu.zeros, shape, dtype))


def read_rows(array: Array, rows: Array, form: RowFormat) -> Array:
    """Return rows of a table or slot, zeros where one is absent.

    Args:
      array: of `form`.
      rows: integer `[N]`.
      form: how its rows lie.

    Returns:
      `[N, words]` as they lie if `form` is packed (`form.unpack` them), else `[N, …]`.
    """
    if form.in_lines:
        return lanes.gather_rows(array, rows, form.words)
    sparse = sparsecore.gather_rows if form.moved_by_sparse_cores else None
    return choose(form.by_row(array), rows, otherwise=gather_rows, sparse=sparse)


def write_rows(array: Array, rows: Array, values: Array, form: RowFormat) -> Array:
    """Return a table or slot with stored `values` at `rows`; absent rows are not written.

    Args:
      array: of `form`.
      rows: integer `[U]`; present rows are different from each other.
      values: `[U, …]`, in the stored dtype.
      form: how its rows lie.
    """
    if form.in_lines:
        rows, values = _ascending(rows, values)
    return write_ascending_rows(array, rows, values, form)


def _ascending(rows: Array, values: Array) -> tuple[Array, Array]:
    """Return present rows in ascending order, then absent ones; of a repeated row, the first."""
    absent = jnp.iinfo(rows.dtype).max
    ordered, first = sort_rows(jnp.where(rows < 0, absent, rows))
    again = jnp.zeros(rows.shape, bool).at[1:].set(ordered[1:] == ordered[:-1])
    ordered, then = sort_rows(jnp.where(again, absent, ordered))
    return ordered, values[first[then]]


def write_ascending_rows(array: Array, rows: Array, values: Array, form: RowFormat) -> Array:
    """Do what `write_rows` does where present rows ascend.

    No two of them may be farther apart in `rows` than their numbers are.
    """
    if form.in_lines:
        return lanes.set_rows(array, rows, form.pack(values))
    sparse = sparsecore.set_rows if form.moved_by_sparse_cores else None
    operands = form.by_row(array), rows, form.pack(values)
    return choose(*operands, otherwise=set_rows, sparse=sparse).reshape(array.shape)


def gather_rows(table: Array, rows: Array) -> Array:
    """Return `table[rows]`, zeros where a row is absent; see `reference.gather_rows`."""
    native = cpu.gather_rows if cpu.takes_rows(table, rows) else None
    native = native and _with_tangents(native, reference.gather_rows)
    return choose(table, rows, otherwise=reference.gather_rows, native=native)


def set_rows(table: Array, rows: Array, values: Array) -> Array:
    """Return `table` with `values` at `rows`; see `reference.set_rows`."""
    native = cpu.set_rows if cpu.takes_rows(table, rows, values) else None
    return choose(table, rows, values, otherwise=reference.set_rows, native=native)


def sort_rows(rows: Array) -> tuple[Array, Array]:
    """Return sorted rows and the position each came from; see `reference.sort_rows`."""
    native = cpu.sort_rows if cpu.takes_rows(rows) else None
    return choose(rows, otherwise=reference.sort_rows, native=native)


def segment_sum(values: Array, segments: Array, num_segments: int) -> Array:
    """Sum runs of entries; see `reference.segment_sum`. On GPU, the repeatable scan."""
    summed = functools.partial(reference.segment_sum, num_segments=num_segments)
    scan = functools.partial(reference.segment_sum_scan, num_segments=num_segments)

    def one_by_one(values: Array, segments: Array) -> Array:
        positions = jax.lax.iota(segments.dtype, segments.shape[0])
        rows = values.reshape(values.shape[0], -1)
        options = {"weights": None, "factors": None, "bags": (1,), "examples": num_segments}
        sums = cpu.gather_sum(rows, positions, segments, **options)[0]
        return sums.reshape(num_segments, *values.shape[1:])

    able = values.dtype == jnp.float32 and cpu.takes_rows(values)
    native = _with_tangents(one_by_one, summed) if able else None
    return choose(values, segments, otherwise=summed, native=native, gpu=scan)


def gather_sum(
    source: Array,
    index: Array,
    segments: Array,
    *,
    weights: Array | None = None,
    factors: Array | None = None,
    bags: tuple[int, ...],
    examples: int,
) -> tuple[Array, ...]:
    """Return weighted sums of rows of `source`; see `reference.gather_sum`."""
    optional = {"weights": weights, "factors": factors}
    given = {name: array for name, array in optional.items() if array is not None}

    def with_options(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(source: Array, index: Array, segments: Array, given: dict[str, Array]) -> Any:
            options = {"weights": None, "factors": None} | given
            return kernel(source, index, segments, **options, bags=bags, examples=examples)

        return run

    otherwise = with_options(reference.gather_sum)
    scan = functools.partial(reference.gather_sum, segment_sum=reference.segment_sum_scan)
    able = cpu.takes_rows(index) and cpu.takes_numbers(source, *given.values())
    native = _with_tangents(with_options(cpu.gather_sum), otherwise) if able else None
    operands = (source, index, segments, given)
    return choose(*operands, otherwise=otherwise, native=native, gpu=with_options(scan))


def _with_tangents(native: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return `native`, differentiated as `otherwise` with respect to what is perturbed."""
    differentiable = jax.custom_jvp(native)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def tangents_of(primals: tuple, tangents: tuple) -> tuple:
        values, structure = jax.tree.flatten(primals)
        directions = jax.tree.leaves(tangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        moving = [i for i, x in enumerate(directions) if not isinstance(x, SymbolicZero)]

        def of_moving(*moved: Array) -> Any:
            now = dict(zip(moving, moved, strict=True))
            leaves = [now.get(i, value) for i, value in enumerate(values)]
            return otherwise(*jax.tree.unflatten(structure, leaves))

        return jax.jvp(of_moving, [values[i] for i in moving], [directions[i] for i in moving])

    return differentiable
