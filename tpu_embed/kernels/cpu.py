"""The compiled CPU kernels: a shared library of XLA custom calls, built when the package was.

Enters: arrays. Leaves: arrays, with the bits of `reference`. Called by `dispatch`, which asks
`load` first and `takes_rows` and `takes_numbers` for what the kernels can do; `update_rows` by
`core/apply.py`, in the branch that `dispatch.choose` takes on a CPU.
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
from tpu_embed.kernels.rules import KINDS, CompiledRule
from tpu_embed.kernels.varying import as_varying, varying_axes

TARGETS = ("zeros", "gather_rows", "set_rows", "sort_rows", "gather_sum", "update")
"""The custom calls, registered as `tpu_embed_<name>`."""


class Loaded(NamedTuple):
    """The library: where it is, or why it cannot be used (then `path` is None)."""

    path: Path | None
    why_not: str = ""


def find() -> Path | None:
    """Return where the library is, or None: it was not built."""
    here = Path(__file__).parent
    names = [f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((here / name for name in names if (here / name).exists()), None)


@functools.cache
def load() -> Loaded:
    """Load the library and register its custom calls, once a process."""
    path = find()
    if path is None:
        return Loaded(None, "they were not built: no C++ compiler at install, or it failed")
    try:
        library = ctypes.CDLL(str(path))
        for target in TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, f"tpu_embed_{target}"))
            jax.ffi.register_ffi_target(f"tpu_embed_{target}", handler, platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:  # another jaxlib, another machine
        return Loaded(None, f"{path.name} does not load: {error}")
    return Loaded(path)


def takes_rows(*arrays: Array) -> bool:
    """Tell whether all arrays have elements, as the kernels want them."""
    return all(array.size for array in arrays)


def takes_numbers(*arrays: Array) -> bool:
    """Tell whether the kernels add up such numbers: float32, or bfloat16 stored as uint16."""
    return takes_rows(*arrays) and all(a.dtype in (jnp.float32, jnp.uint16) for a in arrays)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """As `jnp.zeros`, in large pages of memory."""
    return _call("zeros", jax.ShapeDtypeStruct(shape, dtype))()


def gather_rows(table: Array, rows: Array) -> Array:
    """As `reference.gather_rows`."""
    shape = jax.ShapeDtypeStruct((*rows.shape, *table.shape[1:]), table.dtype)
    return _call("gather_rows", shape)(table, rows)


def set_rows(table: Array, rows: Array, values: Array) -> Array:
    """As `reference.set_rows`; in place."""
    shape = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return _call("set_rows", shape, aliases={0: 0})(table, rows, values)


def sort_rows(rows: Array) -> tuple[Array, Array]:
    """As `reference.sort_rows`."""
    shapes = (
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct(rows.shape, jnp.int32),
    )
    ordered, order = _call("sort_rows", shapes)(rows)
    return ordered, order


def gather_sum(
    source: Array,
    index: Array,
    segments: Array,
    weights: Array | None,
    factors: Array | None,
    *,
    bags: tuple[int, ...],
    examples: int,
) -> tuple[Array, ...]:
    """As `reference.gather_sum`, float32."""
    shapes = [jax.ShapeDtypeStruct((examples * n, source.shape[1]), jnp.float32) for n in bags]
    operands = (source, index, segments, _or_empty(weights), _or_empty(factors))
    call = _call("gather_sum", shapes)
    return tuple(call(*operands, bags=_int64(bags), examples=np.int64(examples)))


def update_rows(
    table: Array,
    slots: Sequence[Array],
    rows: Array,
    bags: Array | None,
    weights: Array | None,
    factors: Array | None,
    gradients: Sequence[Array],
    *,
    rule: CompiledRule,
    columns: tuple[int, ...],
    examples: int,
    blocks: int,
) -> tuple[Array, ...]:
    """Sort ids, sum the gradients of each row, apply the rule; table and slots in place.

    Args:
      table: `[R, D]` float32, or bfloat16 stored as uint16.
      slots: float32 `[R, D]`, or `[R]` for one number a row, in the order of `rule.slots`.
      rows: int32 or int64 `[N]`; those outside the table are left out.
      bags: int32 `[N]`, or None: position i has bag i.
      weights: float32 `[N]`, or None.
      factors: float32 `[bags]`: a gradient is multiplied with its bag's; None: all ones.
      gradients: of bags numbered by example, then column; a feature `[examples * columns[f], D]`.
      rule: the rule.
      columns: bags an example has of each feature.
      examples: of the gradients.
      blocks: G; the sums of block e · G // examples of examples e are added last; 0: no blocks.

    Returns:
      table and slots.
    """
    held = (table, *slots)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held]
    operands = (
        *held,
        rows,
        _or_empty(bags, jnp.int32),
        _or_empty(weights),
        _or_empty(factors),
        rule.operand(),
        *gradients,
    )
    call = _call("update", shapes, aliases={i: i for i in range(len(held))})
    updated = call(
        *operands,
        columns=_int64(columns),
        examples=np.int64(examples),
        blocks=np.int64(blocks),
        rule=np.int64(KINDS.index(rule.kind)),
        flags=np.int64(rule.flag),
    )
    return tuple(updated)


def _call(name: str, shapes, aliases: dict[int, int] | None = None):
    call = jax.ffi.ffi_call(
        f"tpu_embed_{name}", shapes, vmap_method="sequential", input_output_aliases=aliases
    )

    def run(*operands: Array, **attributes: Any) -> Any:
        axes = frozenset().union(*(varying_axes(operand) for operand in operands))
        results = call(*operands, **attributes)
        return jax.tree.map(functools.partial(as_varying, axes=axes), results)

    return run


def _or_empty(array: Array | None, dtype=jnp.float32) -> Array:
    return jnp.zeros((0,), dtype) if array is None else array


def _int64(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(numbers, np.int64)
