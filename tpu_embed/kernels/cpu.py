"""The compiled CPU kernels: C++ loops over rows, which a program calls as XLA custom calls.

On a CPU, XLA's gathers, scatters and sorts are slower than plain loops over rows. The loops are in
a shared library that is built when the package is installed; `load` registers its functions with
XLA. They give the same bits as `reference`.

Input: arrays with at least one element (`takes_rows`), of dtypes that the kernels know
(`takes_numbers`). Output: arrays, some of them in the memory of an operand.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.kernels.operands import (
    KINDS,
    CompiledRule,
    GradientLayout,
    RowGradients,
    RowsToSum,
    SumLayout,
)
from tpu_embed.kernels.stochastic import Rounding, RowPlaces
from tpu_embed.kernels.tracing import as_varying, varying_axes

TARGETS = ("zeros", "gather_rows", "set_rows", "sort_rows", "gather_sum", "update")
"""The custom calls, registered as `tpu_embed_<name>`."""

_INT, _AT, _BOOL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
_TASKS = (
    "sort_ids",
    "take",
    "put",
    "distinct_keys",
    "split_by_row",
    "are_among",
    "rows_at",
)

FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    **{f"host_{name}": ((_AT, _INT, _INT), _BOOL) for name in _TASKS},
    "storage_new": ((_AT, _INT, _INT), _AT),
    "storage_delete": ((_AT,), None),
    "storage_write": ((_AT, _AT, _INT, _AT, _AT, _INT), _INT),
    "storage_read": ((_AT, _AT, _INT, _AT, _AT, _AT), _INT),
    "storage_find": ((_AT, _AT, _INT, _AT), _INT),
    "storage_remove": ((_AT, _AT, _INT, _AT), _INT),
    "storage_list": ((_AT, _INT, _AT, _INT), _INT),
    "storage_compact": ((_AT,), _INT),
    "storage_numbers": ((_AT, _AT), None),
    "vocabulary_new": ((_AT,), _AT),
    "vocabulary_delete": ((_AT,), None),
    "vocabulary_find": ((_AT, _AT, _INT, _AT), None),
    "vocabulary_take": ((_AT, _AT), _BOOL),
    "vocabulary_taken": ((_AT, _AT, _AT, _AT, _AT), None),
    "vocabulary_rewind": ((_AT, _INT), None),
    "vocabulary_forget": ((_AT, _INT), None),
    "vocabulary_step": ((_AT,), _INT),
    "vocabulary_numbers": ((_AT, _AT), None),
    "vocabulary_state": ((_AT, _AT), _BOOL),
    "vocabulary_load": ((_AT, _AT), _BOOL),
}
"""What `host_native` calls, as `tpu_embed_<name>` -> what it takes, and what it returns."""


class Loaded(NamedTuple):
    """The library's path; or None, and the reason why it cannot be used."""

    path: Path | None
    why_not: str = ""


def find() -> Path | None:
    """Return the path of the library, or None if it was not built."""
    here = Path(__file__).parent
    names = [f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((here / name for name in names if (here / name).exists()), None)


@functools.cache
def load() -> Loaded:
    """Load the library and register its custom calls, once per process."""
    path = find()
    if path is None:
        clone = Path(__file__).parents[2]
        if (clone / "setup.py").exists():
            # A Python that is started in a clone finds the package there, whatever is installed.
            found = f"the package was imported from {clone}"
            return Loaded(
                None, f"{found}, where `pip install --editable .` builds them"
            )
        return Loaded(
            None, "they were not built: no C++ compiler at install, or it failed"
        )
    try:
        library = ctypes.CDLL(str(path))
        for target in TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, f"tpu_embed_{target}"))
            jax.ffi.register_ffi_target(f"tpu_embed_{target}", handler, platform="cpu")
        for name in FUNCTIONS:
            getattr(library, f"tpu_embed_{name}")
    # The library may have been built for another jaxlib or another machine.
    except (OSError, AttributeError, RuntimeError) as error:
        return Loaded(None, f"{path.name} does not load: {error}")
    return Loaded(path)


@functools.cache
def function(name: str) -> Any:
    """Return one of `FUNCTIONS`; the GIL is released while it runs."""
    found = getattr(ctypes.CDLL(str(load().path)), f"tpu_embed_{name}")
    found.argtypes, found.restype = FUNCTIONS[name]
    return found


def takes_rows(*arrays: Array) -> bool:
    """Return whether all arrays have elements; the kernels take no empty ones."""
    return all(array.size for array in arrays)


def takes_numbers(*arrays: Array) -> bool:
    """Return whether the kernels can sum these arrays: float32, or bfloat16 stored as uint16."""
    return takes_rows(*arrays) and all(
        a.dtype in (jnp.float32, jnp.uint16) for a in arrays
    )


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return zeros, as `jnp.zeros` does, in memory of large pages.

    Rows are read at random, and with large pages the processor finds their addresses faster.
    """
    return _call("zeros", jax.ShapeDtypeStruct(shape, dtype))()


def gather_rows(table: Array, row_ids: Array) -> Array:
    """Return rows of a table; see `reference.gather_rows`."""
    shape = jax.ShapeDtypeStruct((*row_ids.shape, *table.shape[1:]), table.dtype)
    return _call("gather_rows", shape)(table, row_ids)


def set_rows(table: Array, row_ids: Array, values: Array) -> Array:
    """Return the table with rows set, in its memory; see `reference.set_rows`."""
    shape = jax.ShapeDtypeStruct(table.shape, table.dtype)
    # aliases: the result is in the memory of operand 0. XLA copies the operand if it is used later.
    return _call("set_rows", shape, aliases={0: 0})(table, row_ids, values)


def sort_rows(row_ids: Array) -> tuple[Array, Array]:
    """Return sorted rows and their positions; see `reference.sort_rows`."""
    shapes = (
        jax.ShapeDtypeStruct(row_ids.shape, row_ids.dtype),
        jax.ShapeDtypeStruct(row_ids.shape, jnp.int32),
    )
    ordered, order = _call("sort_rows", shapes)(row_ids)
    return ordered, order


def gather_sum(rows: RowsToSum, layout: SumLayout) -> tuple[Array, ...]:
    """Return weighted sums of rows in float32; see `reference.gather_sum`."""
    # One result per feature, so that no program has to cut one large array into pieces.
    dim = rows.source.shape[1]
    shapes = [jax.ShapeDtypeStruct((n, dim), jnp.float32) for n in layout.bags]
    segments = _or_empty(None if layout.widths else rows.segments, jnp.int32)
    operands = rows.source, rows.index, segments, _or_empty(rows.weights)
    return tuple(_call("gather_sum", shapes)(*operands, **_attributes(layout)))


def update_rows(
    table: Array,
    slots: Sequence[Array],
    given: RowGradients,
    layout: GradientLayout,
    rule: CompiledRule,
    rounding: Rounding | None = None,
) -> tuple[Array, ...]:
    """Sort ids by row unless they are routed, sum the gradients of each row, and apply the rule.

    A row's gradients are summed within each partial sum, or block, first, then over these.

    Args:
      table: `[R, D]` float32, or bfloat16 stored as uint16.
      slots: float32 `[R, D]`, or `[R]` for one number per row, in the order of `rule.slots`.
      given: the gradients of the ids.
      layout: how their bags are numbered.
      rule: the optimizer's rule.
      rounding: how the new rows of a bfloat16 table are rounded at random; None: to nearest.

    Returns:
      the table and the slots, in the memory of the operands.
    """
    held = (table, *slots)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held]
    operands = (
        given.row_ids,
        _or_empty(given.bags, jnp.int32),
        _or_empty(given.weights),
        _or_empty(given.sums, jnp.int32),
        _or_empty(given.merged, jnp.int32),
        _or_empty(given.blocks, jnp.int32),
        *_drawn(rounding),
    )
    # Results 0, 1, … (table and slots) are in the memory of operands 0, 1, ….
    call = _call("update", shapes, aliases={i: i for i in range(len(held))})
    attributes = {
        "rule": np.int64(KINDS.index(rule.kind)),
        "flags": np.int64(rule.flag),
    }
    attributes |= _attributes(layout)
    attributes |= _attributes(
        RowPlaces((), (), 1) if rounding is None else rounding.places
    )
    return tuple(call(*held, *operands, rule.operand(), *given.gradients, **attributes))


def _call(name: str, shapes, aliases: dict[int, int] | None = None):
    """Return a function that makes one custom call, for use inside any `shard_map`.

    Args:
      name: one of `TARGETS`.
      shapes: shapes and dtypes of the results.
      aliases: operand number -> number of the result that is in its memory.
    """
    call = jax.ffi.ffi_call(
        f"tpu_embed_{name}",
        shapes,
        vmap_method="sequential",
        input_output_aliases=aliases,
    )

    def run(*operands, **attributes):
        # JAX does not know that the results of a custom call differ over the mesh axes over which
        # its operands do; inside a `shard_map` with check_vma=True it has to be told.
        axes = frozenset().union(*(varying_axes(operand) for operand in operands))
        results = call(*operands, **attributes)
        return jax.tree.map(functools.partial(as_varying, axes=axes), results)

    return run


def _or_empty(array: Array | None, dtype=jnp.float32) -> Array:
    """Return the array, or an empty one, which means "not given" to the kernels."""
    return jnp.zeros((0,), dtype) if array is None else array


def _drawn(rounding: Rounding | None) -> tuple[Array, Array]:
    """Return `[shard, tables …]` and the numbers of rows, uint32, as a custom call takes them."""
    if rounding is None:
        return _or_empty(None, jnp.uint32), _or_empty(None, jnp.uint32)
    draws = rounding.draws
    tables = jnp.concatenate([draws.shard[None], draws.tables])
    return tables, _or_empty(draws.numbers, jnp.uint32)


def _attributes(layout: NamedTuple) -> dict[str, Any]:
    """Return what is static as a custom call takes it: numbers and lists of 64 bits."""
    named = layout._asdict()
    named.pop("filled", None)  # the kernel writes every sum
    return {name: np.asarray(one, np.int64)[()] for name, one in named.items()}
