"""Apply the optimizer's rule to the rows that a batch touches, and write them back.

Only those rows and their slots are read, passed through the rule, and written: the work does not
grow with the vocabulary. There are two ways. Kernels for CPUs and SparseCores know some optimizers
by name; they sum gradients, apply the rule and write in one pass. Everywhere else XLA reads,
applies and writes; the rule is then compiled by itself, on a number of rows padded to a multiple of
`ROW_MULTIPLE`, so that its bits are the same in every program. Tables that stand as plain arrays in
a user's parameter tree have no stack; `update_parameter_rows` of `training/update.py` updates
those.

Without gradient accumulation, a row is updated once for every occurrence of its id (`apply_each`).
If an id occurs three times in a batch, the rule runs three times on its row, in order of sums. To
do many rows at a time, occurrences are taken in rounds: round k has the k-th occurrence of every
row that has one, so the rows of a round are all different. A round is applied in chunks of fixed
size. The work is proportional to the number of occurrences, plus one chunk per round.

Input: this device's shard of a stack, and distinct local rows with summed gradients (for the
compiled kernel: rows with gradients that are not summed yet). Output: the shard with those rows and
their slots replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.batch import LocalIds
from tpu_embed.core.exchange import RowSums, collectives, route
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROW_MULTIPLE,
    SEED_SLOT,
    Stack,
    rounding_slots,
    row_places,
    table_crcs,
)
from tpu_embed.core.state import StackShard, rule_slots, slot_format
from tpu_embed.kernels import cpu, dispatch, sparsecore_rules, stochastic, storage
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import (
    CompiledRule,
    GradientLayout,
    RowGradients,
    RowsToSum,
    SumLayout,
)
from tpu_embed.kernels.stochastic import Rounding


def compiled_rule(stack: Stack, step: Array, learning_rate: ArrayLike) -> CompiledRule | None:
    """Return the stack's rule as the kernels take it that its rows are packed for, or None.

    Rows that are not packed are for the CPU's kernels, which read one after the other; rows that
    are packed as words are for SparseCores.
    """
    optimizer, row_format = stack.optimizer, stack.row_format
    if optimizer is None or stack.compute_dtype != jnp.float32 or optimizer.updates_every_row:
        return None
    on_cpu = stack.packing == "none"
    if not on_cpu and not (row_format.moved_by_sparse_cores and row_format.packed):
        return None
    rule = optimizer.compiled_rule(step, jnp.asarray(learning_rate, stack.compute_dtype))
    if rule is None or on_cpu:
        return rule
    sums_format = stack.sent_sums_format
    # A word has two numbers of bfloat16.
    width = max(one.words * 4 // one.dtype.itemsize for one in (row_format, sums_format))
    return rule if sparsecore_rules.takes(rule, width, sums_format.dtype.itemsize < 4) else None


def merge_and_apply(
    held: StackShard, given: RowSums, stack: Stack, rule: CompiledRule, step: Array
) -> StackShard:
    """Merge partial sums and update their rows, in one SparseCore kernel, in place.

    Args:
      held: the shard.
      given: partial sums, and how they are merged.
      stack: the stack.
      rule: what `compiled_rule` returned.
      step: int32 `[]`, t.
    """
    from tpu_embed.kernels import sparsecore_update  # Pallas takes long to import

    shapes, row_format = rule_slots(stack), stack.row_format
    formats = {name: slot_format(stack, shapes[name]) for name in rule.slots}
    segments, index, sums = given.segments, given.index, given.packed
    assert segments is not None, "only partial sums are merged"
    if index is None:
        index = jax.lax.iota(jnp.int32, segments.shape[0])
    if sums is None:
        sums = stack.sent_sums_format.pack(given.sums)
    table, new = sparsecore_update.merge_update(
        sums,
        index,
        segments,
        given.row_ids.astype(jnp.int32),
        row_format.by_row(held.table),
        [formats[name].by_row(held.slots[name]) for name in rule.slots],
        rule,
        stack.dim,
        _row_keys(given.row_ids, held, stack, step),
    )
    named = zip(rule.slots, new, strict=True)
    slots = {name: x.reshape(held.slots[name].shape) for name, x in named}
    return StackShard(table.reshape(held.table.shape), {**held.slots, **slots})


def sum_and_apply(
    held: StackShard,
    given: RowGradients,
    layout: GradientLayout,
    rule: CompiledRule,
    rounding: Rounding | None,
) -> StackShard:
    """Sum the gradients of each row and update the row, in one compiled kernel, in place.

    Args:
      held: the shard.
      given: one entry per occurrence of a row, in the order of sums; or, with sums, sorted by row.
      layout: how the bags of the gradients are numbered.
      rule: the rule.
      rounding: how new rows are rounded at random; None: to nearest.
    """
    # The kernel takes and returns slots by position; `rule.slots` names them in its order.
    slots = [held.slots[name] for name in rule.slots]
    table, *new = cpu.update_rows(held.table, slots, given, layout, rule, rounding)
    return StackShard(table, {**held.slots, **dict(zip(rule.slots, new, strict=True))})


def rounding_of(held: StackShard, stack: Stack, step: Array) -> Rounding | None:
    """Return how the stack's new rows are rounded at random in a step; None: to nearest.

    Args:
      held: this device's shard.
      stack: the stack.
      step: int32 `[]`, t.
    """
    if not stack.rounds_at_random:
        return None
    tables = stochastic.table_draws(held.slots[SEED_SLOT], table_crcs(stack.tables), step)
    shard = collectives.axis_index(stack.shard_axes).astype(jnp.uint32)
    draws = stochastic.Draws(tables, shard, held.slots.get(NUMBERS_SLOT))
    return stochastic.Rounding(draws, row_places(stack))


def apply_rule(
    held: StackShard, sums: RowSums, stack: Stack, step: Array, learning_rate: ArrayLike
) -> StackShard:
    """Return the shard with distinct rows, and their slots, updated by the stack's optimizer.

    Args:
      held: the shard.
      sums: local rows `[U]` and their summed gradients `[U, D]`, U a multiple of `ROW_MULTIPLE`.
        Present rows are all different and ascending; if two of them are k positions apart, their
        numbers differ by at least k (`dispatch.write_ascending_rows` needs this).
      stack: the stack; it has an optimizer.
      step: int32 `[]`, t.
      learning_rate: scalar.
    """
    assert stack.optimizer is not None, "only stacks with an optimizer are updated"
    shapes = rule_slots(stack)
    rate = jnp.asarray(learning_rate, stack.compute_dtype)
    # Read: [U, D] of the table, and [U, …] of each slot; a shared slot is passed on whole.
    table = _read(held.table, sums.row_ids, stack.row_format)
    rows = storage.decode(table, stack.dtype).astype(stack.compute_dtype)
    slots = {
        name: storage.decode(
            _read(held.slots[name], sums.row_ids, slot_format(stack, slot)), slot.dtype
        )
        if slot.per_row
        else held.slots[name]
        for name, slot in shapes.items()
    }
    new_rows, new_slots = _alone(stack.optimizer.update_rows, rows, slots, sums.sums, step, rate)
    # Write: rows are replaced, not added to, because p + (n - p) need not equal n.
    written = {
        name: dispatch.write_ascending_rows(
            held.slots[name],
            sums.row_ids,
            storage.encode(new_slots[name], slot.dtype),
            slot_format(stack, slot),
        )
        if slot.per_row
        else new_slots[name]
        for name, slot in shapes.items()
    }
    keys = _row_keys(sums.row_ids, held, stack, step)
    stored = (
        storage.encode(new_rows, stack.dtype)
        if keys is None
        else stochastic.round_rows(new_rows, keys)
    )
    return StackShard(
        dispatch.write_ascending_rows(held.table, sums.row_ids, stored, stack.row_format),
        {**held.slots, **written},
    )


def _row_keys(row_ids: Array, held: StackShard, stack: Stack, step: Array) -> Array | None:
    """Return what the random bits of rows depend on, uint32 `[U]`; None: to nearest."""
    rounding = rounding_of(held, stack, step)
    if rounding is None:
        return None
    numbers = rounding.draws.numbers
    if numbers is not None:
        row_format = slot_format(stack, rounding_slots(stack)[NUMBERS_SLOT])
        numbers = _read(numbers, row_ids, row_format)
    return stochastic.row_draws(rounding, row_ids, numbers)


def _read(array: Array, row_ids: Array, row_format: RowFormat) -> Array:
    """Return stored rows `[U, …]`; zeros where a row is absent."""
    return row_format.unpack(dispatch.read_rows(array, row_ids, row_format))


def _alone(rule: Callable[..., tuple], *operands: Any) -> tuple:
    """Return `rule(rows, slots, gradients, step, rate)`, compiled apart from the code around it.

    Fusion decides which products and sums become one multiply-add, and so decides the last bits.
    Optimization barriers keep the rule out of other fusions. XLA's CPU backend drops barriers
    before it fuses, so there the rule is a branch of a `cond`, which is compiled by itself.
    """

    def branch(*operands):
        # operands[3] is the step. It is always positive, which XLA cannot know, so the branch that
        # changes nothing is never taken but keeps the `cond` from being removed.
        return jax.lax.cond(operands[3] > 0, rule, lambda *unchanged: unchanged[:2], *operands)

    operands = jax.lax.optimization_barrier(operands)
    done = jax.lax.platform_dependent(*operands, cpu=branch, default=rule)
    return jax.lax.optimization_barrier(done)


def every_row(sums: RowSums, stack: Stack) -> RowSums:
    """Return all R rows with their gradients, zero where a row was not touched.

    This is for a rule that changes every row, such as Adam with `lazy_adam=False`. The rows are
    padded with absent ones to a multiple of `ROW_MULTIPLE`.
    """
    # Rows (1, 4, none) with gradients (a, b, 0) become the rows 0 … R - 1 with (0, a, 0, 0, b, …).
    dense = dispatch.set_rows(
        jnp.zeros((stack.num_rows, stack.dim), sums.sums.dtype), sums.row_ids, sums.sums
    )
    rows = jnp.arange(stack.num_rows, dtype=sums.row_ids.dtype)
    missing = -stack.num_rows % ROW_MULTIPLE
    return RowSums(
        jnp.pad(rows, (0, missing), constant_values=PADDING_ID),
        jnp.pad(dense, ((0, missing), (0, 0))),
    )


CHUNK = 4 * ROW_MULTIPLE
"""Rows that are updated at a time."""


def apply_each(
    held: StackShard,
    ids: LocalIds,
    gradients: Array,
    stack: Stack,
    step: Array,
    learning_rate: ArrayLike,
) -> StackShard:
    """Return the shard after one update per occurrence.

    Args:
      held: this device's shard.
      ids: sorted by row, in the order of sums; their rows are local ones.
      gradients: of the bags, `[bags, D]`.
      stack: the stack.
      step: int32 `[]`, t, the same for all occurrences.
      learning_rate: scalar.
    """
    ordered = _by_round(ids, stack)
    count = jnp.sum(ordered[1].index < stack.num_rows, dtype=jnp.int32)
    # Padded by one chunk, so that a slice that starts at the last occurrence stays inside.
    # What is beyond it belongs to no round, whatever its numbers.
    ordered = jax.tree.map(lambda x: jnp.pad(x, (0, CHUNK)), ordered)
    one_each = jax.lax.iota(jnp.int32, CHUNK)

    def one_chunk(carry):
        start, held = carry
        number, here = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, CHUNK), ordered
        )
        # Apply the entries of the first one's round, and start the next chunk after them: rounds
        # (0, 0, 0, 1, 1) in chunks of 4 are applied as (0, 0, 0), then (1, 1).
        now = (number == number[0]) & (start + one_each < count)
        rows = RowsToSum(gradients, here.bags, one_each, here.gains)
        (values,) = dispatch.gather_sum(rows, SumLayout((CHUNK,)))
        chosen = RowSums(jnp.where(now, here.index, PADDING_ID), values)
        updated = apply_rule(held, chosen, stack, step, learning_rate)
        return start + jnp.sum(now, dtype=jnp.int32), updated

    return jax.lax.while_loop(lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held))[1]


def _by_round(ids: LocalIds, stack: Stack) -> tuple[Array, LocalIds]:
    """Return occurrences in the order in which they are applied: by round, then by row.

    Returns:
      int32 `[M]`, the round of each; the occurrences, with R for absent rows, which come last.
    """
    # Rows (3, 7, 7, 7): their runs start at 0 and 1, so the rounds are position - start = (0, 0, 1,
    # 2): each row's occurrences, counted.
    rows = jnp.where(ids.index < 0, stack.num_rows, ids.index)
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    starts = jax.lax.cummax(jnp.where(route.changes(rows), positions, 0))
    rounds = jnp.where(rows < stack.num_rows, positions - starts, rows.size)
    leaves, structure = jax.tree.flatten((rounds, LocalIds(rows, ids.bags, ids.gains)))
    return structure.unflatten(jax.lax.sort(leaves, num_keys=2, is_stable=True))
