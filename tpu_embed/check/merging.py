"""The trial of `merge_update`, the kernel with which SparseCores update rows.

Every rule that the kernel knows updates a table of one width from partial sums in float32, and one
of another width from sums in bfloat16: every case is a kernel to compile. Some merged sums have no
row, and some rows no sum.

Input: a random generator. Output: a `Trial`, for TPUs with SparseCores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.check import rules
from tpu_embed.check.findings import FLOAT32
from tpu_embed.check.trials import Trial
from tpu_embed.kernels import sparsecore_update
from tpu_embed.kernels.formats import RowFormat

RULES = ("SGD", "SGD_with_options", "Momentum", "Adagrad", "RowWiseAdagrad", "Adam")
DIMS = (7, 16, 130)
_ROWS, _PARTIALS, _MERGED, _STEP = 300, 500, 220, 3


class _Case(NamedTuple):
    """A table, and the partial sums of its rows' gradients.

    Attributes:
      name: that of the optimizer, of `rules.pairs`.
      table: float32 `[R, D]`.
      slots: float32 `[R, D]` or `[R]`, by name.
      sums: `[P, D]`, float32 or bfloat16.
    """

    name: str
    table: np.ndarray
    slots: dict[str, np.ndarray]
    sums: np.ndarray

    @property
    def what(self) -> str:
        """What it is, for findings."""
        return f"{self.name}, D = {self.table.shape[1]}, {self.sums.dtype}"


class _Route(NamedTuple):
    """How partial sums are merged, int32 each; see `sparsecore_update.merge_update`."""

    index: Any
    segments: Any
    row_ids: Any


def trial(rng: np.random.Generator) -> Trial:
    """Return the trial."""
    pairs, route = rules.pairs(), _draw_route(rng)
    cases = [
        _draw_case(rng, name, DIMS[(number + shift) % len(DIMS)], dtype)
        for number, name in enumerate(RULES)
        for shift, dtype in enumerate((np.float32, ml_dtypes.bfloat16))
    ]

    def kernel(route: _Route, operands: list[tuple[Any, Any, Any]]) -> list[Any]:
        found = []
        for case, given in zip(cases, operands, strict=True):
            found += _updated(pairs[case.name].optimizer, case, route, given)
        return found

    operands = [_packed(case) for case in cases]
    right = [one for case in cases for one in _right(case, pairs[case.name].rule, route)]
    return Trial(kernel, (route, operands), right, FLOAT32)


def _draw_route(rng: np.random.Generator) -> _Route:
    """Return a route of partial sums in any order, of which the last are left out."""
    # 220 merged sums of one to five partial sums each, as far as the partial sums suffice.
    segments = np.repeat(np.arange(_MERGED), rng.integers(1, 6, _MERGED))[: _PARTIALS - 20]
    segments = np.append(segments, np.full(_PARTIALS - segments.size, _MERGED))
    row_ids = np.sort(rng.choice(_ROWS, _MERGED, replace=False))
    row_ids[::17] = PADDING_ID
    row_ids[segments[-21] + 1 :] = PADDING_ID
    route = rng.permutation(_PARTIALS), segments, row_ids
    return _Route(*(x.astype(np.int32) for x in route))


def _draw_case(rng: np.random.Generator, name: str, dim: int, dtype: Any) -> _Case:
    optimizer = rules.pairs()[name].optimizer
    slots = {
        slot: rng.uniform(0.1, 2, (_ROWS, *shape.shape)).astype(np.float32)
        for slot, shape in optimizer.slot_shapes(dim, np.float32).items()
    }
    table, sums = (rng.normal(size=(n, dim)).astype(np.float32) for n in (_ROWS, _PARTIALS))
    return _Case(name, table, slots, sums.astype(dtype))


def _packed(case: _Case) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return table, slots and partial sums as SparseCores have them."""

    def pack(rows: np.ndarray) -> np.ndarray:
        form = RowFormat(rows.shape[1:], np.dtype(rows.dtype), "words")
        stored = rows.view(np.uint16) if rows.itemsize == 2 else rows
        return np.asarray(form.pack(jnp.asarray(stored)))

    return pack(case.table), [pack(slot) for slot in case.slots.values()], pack(case.sums)


def _updated(optimizer: Any, case: _Case, route: _Route, given: tuple[Any, Any, Any]) -> list[Any]:
    """Return the table and its slots after the kernel has run, `[R, D]` or `[R]`."""
    (table, slots, sums), dim = given, case.table.shape[1]
    rule = optimizer.compiled_rule(jnp.int32(_STEP), jnp.float32(rules.RATE))
    by_name = dict(zip(case.slots, slots, strict=True))
    ordered = [by_name[name] for name in rule.slots]
    index, segments, row_ids = route
    table, new = sparsecore_update.merge_update(
        sums, index, segments, row_ids, table, ordered, rule, dim
    )
    after = dict(zip(rule.slots, new, strict=True))
    return [x[:, :dim] if x.ndim == 2 else x for x in (table, *(after[n] for n in case.slots))]


def _right(case: _Case, rule: Any, route: _Route) -> list[tuple[str, np.ndarray]]:
    """Return the same from loops in float64."""
    sums = np.zeros((_MERGED, case.table.shape[1]))
    for i, segment in zip(route.index, route.segments, strict=True):
        if segment < _MERGED:
            sums[segment] += case.sums[i].astype(np.float64)
    table = case.table.astype(np.float64)
    slots = {name: x.astype(np.float64) for name, x in case.slots.items()}
    for row, gradient in zip(route.row_ids, sums, strict=True):
        if row == PADDING_ID:
            continue
        before = {name: x[row] for name, x in slots.items()}
        table[row], after = rule(table[row], before, gradient, _STEP)
        for name, value in after.items():
            slots[name][row] = value
    named = {"table": table, **{f"slot {name!r}": x for name, x in slots.items()}}
    return [(f"{case.what}, {name}", x) for name, x in named.items()]
