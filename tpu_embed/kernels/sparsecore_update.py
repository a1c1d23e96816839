"""Merge partial sums of gradients and update their rows with a TPU's SparseCores: one kernel.

An owner of rows has partial sums of their gradients, sorted by row. Without this kernel it merges
them, reads rows and slots, applies the rule on the TensorCore, and writes both: six passes over the
rows. Here a vector subcore (a worker) sums a row's partial sums in order, changes the row and its
slots in its own memory, and writes them where they were, so that every number moves once.

Pallas cannot interpret the indirect DMA on a CPU, so this kernel has been compiled for every chip
in `sparsecore.KINDS` and interpreted with plain copies, but has not run on a TPU.

Input: partial sums, their order, and an owner's table and slots of 32-bit words. Output: table and
slots, in their own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import sparsecore_owner, sparsecore_rules, sparsecore_sums
from tpu_embed.kernels.operands import CompiledRule
from tpu_embed.kernels.sparsecore_memory import AHEAD, RuleForm, Work

_MOST_ENTRIES, _LEAST_ENTRIES = 128, 16
"""The most and the fewest entries of a chunk; the fewest are one vector of the widest subcore."""
_MOST_WORDS = 48 * 1024
"""The most words of a subcore's memory for rows, 192 KiB of 256 KiB or more."""


def takes(rule: CompiledRule, width: int, packed: bool = False) -> bool:
    """Return whether the kernel knows a rule, and has room for its rows.

    Args:
      rule: the rule.
      width: the numbers of a row as it is packed, or of its sum if these are more.
      packed: whether partial sums are bfloat16, two to a word.
    """
    return rule.kind in sparsecore_rules.KINDS and _entries(rule, width, packed) >= _LEAST_ENTRIES


def merge_update(
    sums: Array,
    index: Array,
    segments: Array,
    row_ids: Array,
    table: Array,
    slots: Sequence[Array],
    rule: CompiledRule,
    dim: int,
    keys: Array | None = None,
) -> tuple[Array, list[Array]]:
    """Add up the partial sums of each row, and apply the rule to row and slots, in place.

    Args:
      sums: float32 `[P, W]`, W a multiple of `sparsecore.WORDS`; or uint32, packed bfloat16.
      index: int32 `[N]`, the partial sums in the order in which they are added.
      segments: int32 `[N]`, the merged sum of each, from 0 on without gaps; U or more: left out.
      row_ids: int32 `[U]`, the row of each merged sum, all different; `PADDING_ID` for none.
      table: float32 `[R, W]`; or uint32, packed bfloat16.
      slots: float32, `[R, W]` or `[R]` each, in the order of the rule.
      rule: one that the kernel `takes`.
      dim: D, how many numbers of a row count.
      keys: uint32 `[U]`, `stochastic.row_draws` of the rows, to round packed rows at random; None:
        they are rounded to nearest.

    Returns:
      the table and the slots, with these rows changed.
    """
    from jax.experimental import pallas as pl

    if not (index.shape[0] and row_ids.shape[0] and sums.shape[0] and table.shape[0]):
        return table, list(slots)
    packed, workers = sums.dtype == jnp.uint32, sparsecore_sums._workers_here()
    columns = [x.shape[1] * (2 if x.dtype == jnp.uint32 else 1) for x in (sums, table)]
    chunk = _entries(rule, max(columns), packed)
    bounds = sparsecore_sums.worker_bounds(segments, workers, row_ids.shape[0])
    # No constant, which in the body of a loop over steps aborts libtpu 0.0.42.
    bounds, numbers = jax.lax.optimization_barrier((bounds, rule.operand()))
    operands = [bounds, sums, *_padded(index, segments, row_ids, numbers, chunk)]
    if keys is not None:
        bits = jax.lax.bitcast_convert_type(keys, jnp.int32)
        operands.append(jnp.pad(bits, (0, chunk + AHEAD + 8)))
    form, count = _form(rule, dim), len(slots)

    def kernel(*refs: Any) -> None:
        bounds, sums, index, segments, row_ids, numbers, *keys, table = refs[: len(refs) - count]
        given = bounds, sums, index, segments, row_ids, numbers
        held = table, refs[len(refs) - count :]
        sparsecore_owner.run(Work(*given, *held, form, chunk, *keys))

    # Partial sums are read; rows and slots are read and written.
    words = sum(x.size // x.shape[0] for x in (table, *slots))
    moved = 2 * words * min(index.shape[0], row_ids.shape[0])
    size = 4 * (sum(x.size for x in operands) + moved)
    update = sparsecore_sums.on_subcores(kernel, "merge_update", size, ())
    table, *slots = pl.run_state(lambda held: update(*operands, *held))((table, *slots))
    return table, slots


def _padded(
    index: Array, segments: Array, row_ids: Array, numbers: Array, chunk: int
) -> tuple[Array, ...]:
    """Return the numbers of the entries, padded to what copies of whole chunks read."""
    # No worker's bounds include the padding of the entries; `row_ids` may be read behind its end.
    missing = -index.shape[0] % chunk
    return (
        jnp.pad(index, (0, missing)),
        jnp.pad(segments, (0, missing + _LEAST_ENTRIES), constant_values=row_ids.shape[0]),
        jnp.pad(row_ids, (0, chunk + AHEAD + 8), constant_values=PADDING_ID),
        jnp.pad(numbers, (0, AHEAD - numbers.shape[0])),
    )


def _form(rule: CompiledRule, dim: int) -> RuleForm:
    """Return what is static of a rule."""
    flag = rule.flag
    if rule.kind in ("adagrad", "rowwise_adagrad"):
        flag = isinstance(rule.numbers[1], (int, float)) and rule.numbers[1] == 0
    return RuleForm(
        kind=rule.kind,
        flag=flag,
        decays=not isinstance(rule.keep, float) or rule.keep != 1,
        clips_gradient=rule.gradient_bounds != (None, None),
        clips_row=rule.weight_bounds != (None, None),
        dim=dim,
    )


def _entries(rule: CompiledRule, width: int, packed: bool) -> int:
    """Return the entries of a chunk, a power of two, or less than the fewest: no room."""
    # Two chunks, each of partial sums (packed ones and their sums take more), rows and slots.
    wide = 2 + len(rule.slots) * (rule.kind != "rowwise_adagrad") + packed / 2
    chunk = _MOST_ENTRIES
    while chunk >= _LEAST_ENTRIES and 2 * chunk * width * wide > _MOST_WORDS:
        chunk //= 2
    return chunk
