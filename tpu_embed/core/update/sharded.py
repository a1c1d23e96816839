"""Update the tables on all devices: send gradients to the rows' owners, sum them, apply the rule.

The whole update is one `shard_map`. On each device, stack after stack, the activations' gradients
become partial sums per row, the partial sums travel to the shards that own the rows, and there they
are added up, passed through the optimizer's rule, and the new rows are written.

Floating-point sums depend on their order, and the result must not depend on the number of devices.
So the global batch is split into G contiguous blocks. A row's gradients are summed feature after
feature within each block; these partial sums are added in the order of the blocks.

Where the host has routed a batch, the device that has a block's examples makes the partial sums and
sends each to its row's owner. Of ids that it has not routed, every owner gets all ids and all
gradients of bags, and makes the sums of its own rows: that moves a gradient per bag, not per id.

Only rows that the batch touches and their slots are read, passed through the rule, and written: the
work does not grow with the vocabulary. There are two ways. Kernels for CPUs and SparseCores know
some optimizers by name; they sum gradients, apply the rule and write in one pass. Everywhere else
XLA reads, applies and writes; the rule is then compiled by itself, on a number of rows padded to a
multiple of `ROW_MULTIPLE`, so that its bits are the same in every program. Tables that stand as
plain arrays in a user's parameter tree have no stack; `update_parameter_rows` of
`training/update.py` updates those.

Without gradient accumulation, a row is updated once for every occurrence of its id (`apply_each`).
If an id occurs three times in a batch, the rule runs three times on its row, in order of sums. To
do many rows at a time, occurrences are taken in rounds: round k has the k-th occurrence of every
row that has one, so the rows of a round are all different. A round is applied in chunks of fixed
size. The work is proportional to the number of occurrences, plus one chunk per round.

Input: the arrays of a state, the ids of all stacks, and one gradient per feature. Output: new
arrays, in the memory of the old ones if those are donated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array, ArrayLike
from tpu_embed.core.batch import (
    Batch,
    LocalIds,
    StackView,
    TracedIds,
    gather,
    gather_ids,
    view_stacks,
)
from tpu_embed.core.exchange import RowSums, collectives, number_runs, route
from tpu_embed.core.layout import (
    NUMBERS_SLOT,
    ROW_MULTIPLE,
    SEED_SLOT,
    Layout,
    Stack,
    rounding_slots,
    row_places,
    table_crcs,
)
from tpu_embed.core.lookup import sum_gradients
from tpu_embed.core.state import (
    StackShard,
    rule_slots,
    slot_format,
    split_shards,
    stack_specs,
)
from tpu_embed.core.update.gradients import stack_gradients
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
from tpu_embed.kernels.tracing import zero_after


def compiled_rule(
    stack: Stack, step: Array, learning_rate: ArrayLike
) -> CompiledRule | None:
    """Return the stack's rule as the kernels take it that its rows are packed for, or None.

    Rows that are not packed are for the CPU's kernels, which read one after the other; rows that
    are packed as words are for SparseCores.
    """
    optimizer, row_format = stack.optimizer, stack.row_format
    if (
        optimizer is None
        or stack.compute_dtype != jnp.float32
        or optimizer.updates_every_row
    ):
        return None
    on_cpu = stack.packing == "none"
    if not on_cpu and not (row_format.moved_by_sparse_cores and row_format.packed):
        return None
    rule = optimizer.compiled_rule(
        step, jnp.asarray(learning_rate, stack.compute_dtype)
    )
    if rule is None or on_cpu:
        return rule
    sums_format = stack.sent_sums_format
    # A word has two numbers of bfloat16.
    width = max(
        one.words * 4 // one.dtype.itemsize for one in (row_format, sums_format)
    )
    return (
        rule
        if sparsecore_rules.takes(rule, width, sums_format.dtype.itemsize < 4)
        else None
    )


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
    tables = stochastic.table_draws(
        held.slots[SEED_SLOT], table_crcs(stack.tables), step
    )
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
    new_rows, new_slots = _alone(
        stack.optimizer.update_rows, rows, slots, sums.sums, step, rate
    )
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
        dispatch.write_ascending_rows(
            held.table, sums.row_ids, stored, stack.row_format
        ),
        {**held.slots, **written},
    )


def _row_keys(
    row_ids: Array, held: StackShard, stack: Stack, step: Array
) -> Array | None:
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
        return jax.lax.cond(
            operands[3] > 0, rule, lambda *unchanged: unchanged[:2], *operands
        )

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

    return jax.lax.while_loop(
        lambda carry: carry[0] < count, one_chunk, (jnp.int32(0), held)
    )[1]


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


# -- sums of gradients, and their way to the rows --------------------------------------------------

Gradients = Sequence[Array]
"""The gradients of a stack's bags on one device, `[bags, D]` per feature."""

Splits = Mapping[int, Array]
"""The row splits `[1, B/S + 1]` of every jagged feature."""


def gather_all(
    ids: LocalIds, gradients: Gradients, view: StackView, splits: Splits
) -> tuple[LocalIds, Gradients]:
    """Return the ids and gradients of all devices, of ids that the host has not routed.

    The ids are local rows of this device's shard, and their blocks are known; the gradients are one
    array. On one device they are its own, but for the blocks.
    """
    ids = ids._replace(blocks=_blocks(ids, view, splits))
    # One device has all ids and all rows: nothing is sent, and gradients stay by feature.
    if view.is_local:
        return ids, gradients
    names = view.layout.axes.batch_axes
    with jax.named_scope("route"):
        every = gather(jnp.concatenate(gradients), names)
        return gather_ids(ids, view, names), (every,)


def sort_own_ids(ids: LocalIds, view: StackView) -> LocalIds:
    """Return gathered ids sorted by row and block; R stands for the rows of others."""
    assert ids.blocks is not None, "gathered ids have them"
    with jax.named_scope("dedup"):
        blocks = ids.blocks, view.layout.blocks
        given = ids.rows, view.stack.num_rows, *blocks, ids.bags, ids.gains
        return LocalIds(*route.sort_ids(*given))


def sum_own_rows(ids: LocalIds, gradients: Gradients, view: StackView) -> RowSums:
    """Return the partial sums of gathered ids."""
    stack, num_rows, ids = view.stack, view.stack.num_rows, sort_own_ids(ids, view)
    with jax.named_scope("dedup"):
        run, rows = number_runs(ids.index, num_rows, ids.blocks)
        # A sum is of one row and one block, and of an id at least. Rows 3 7 7 9 in the blocks 0 0 1
        # 0 have the sums 0 1 2 3, and these the rows 3 7 7 9.
        most = min(ids.index.size, num_rows * view.layout.blocks)
        segments = jnp.where(ids.index < num_rows, run, most)
        given = RowsToSum(jnp.concatenate(gradients), ids.bags, segments, ids.gains)
        sums = sum_gradients(given, most, stack, filled=False)
    with jax.named_scope("merge"):
        return _unpacked(route.merge_sorted(sums, rows[:most], None, num_rows), stack)


def exchange_sums(ids: LocalIds, gradients: Gradients, view: StackView) -> RowSums:
    """Make the partial sums of a batch that the host has routed, and send them to the owners."""
    stack, axes = view.stack, view.layout.axes
    with jax.named_scope("dedup"):
        size = stack.num_shards * view.parcel_size
        sums = sum_gradients(_routed(ids, gradients), size, stack, filled=False)
    if view.is_local:  # nothing is sent, but sums are rounded as if it were
        assert ids.merged is not None, "one device knows the whole batch"
        return _unpacked(
            RowSums(ids.merged, sums, ids.merge_segments, ids.merge_index), stack
        )
    with jax.named_scope("route"):
        sums, packed = route.send_sums(sums, stack, axes)
        if ids.merged is not None:
            return RowSums(
                ids.merged, sums, ids.merge_segments, ids.merge_index, packed
            )
        assert ids.sent is not None, "the host tells the rows that it sends"
        rows = route.send_rows(route.only_mine(ids.sent, stack, axes), stack, axes)
    with jax.named_scope("merge"):
        return route.route_merge(sums, packed, rows, stack, axes)


def _routed(ids: LocalIds, gradients: Gradients) -> RowsToSum:
    """Return the gradients of bags, and their sums, of a batch that the host has routed."""
    assert ids.sum_index is not None, "the batch was placed for an update"
    assert ids.sum_segments is not None, "the host tells both"
    return RowsToSum(
        jnp.concatenate(gradients), ids.sum_index, ids.sum_segments, ids.sum_gains
    )


def _unpacked(given: RowSums, stack: Stack) -> RowSums:
    """Return partial sums that stay where they were made, perhaps rounded."""
    if stack.exchange_dtype is None:
        return given
    packed = given.sums if stack.packing == "words" else None
    return given._replace(sums=stack.sent_sums_format.unpack(given.sums), packed=packed)


def psum_sums(
    ids: LocalIds, gradients: Gradients, view: StackView, splits: Splits
) -> RowSums:
    """Return all R rows of a small replicated stack with their whole gradients.

    Every device makes sums for all blocks, `[G, R, D]`, and a psum adds them over the devices. That
    is exact, because only the device that has a block's examples contributes numbers other than
    zero. Then the blocks are added in order. Rows without ids are `PADDING_ID`.
    """
    # A cell for every block and row, b * R + r for row r in block b: no batch needs more. If the
    # devices do not divide G, a block may end on the next device, and a cell is the sum of two:
    # still the same in any order.
    stack, blocks, axes = view.stack, view.layout.blocks, view.layout.axes.batch_axes
    rows = stack.num_rows
    with jax.named_scope("psum"):
        if ids.sum_segments is None:
            cells = _blocks(ids, view, splits) * rows + ids.rows.astype(jnp.int32)
            cells = jnp.where(ids.rows < 0, blocks * rows, cells)
            cells, _, (bags, gains) = dispatch.sort_with(cells, (ids.bags, ids.gains))
            ids = ids._replace(sum_index=bags, sum_segments=cells, sum_gains=gains)
        given = _routed(ids, gradients)
        touched = ids.merged
        if touched is None:
            # A row without ids must stay absent: with a zero gradient it would still decay or move.
            cells = given.segments
            own = dispatch.occurs(
                jnp.where(cells < blocks * rows, cells % rows, PADDING_ID), rows
            )
            counts = collectives.psum(own.astype(jnp.int32), axes)
            numbers = jnp.arange(rows, dtype=stack.index_dtype)
            touched = jnp.where(counts > 0, numbers, PADDING_ID)
            missing = (0, view.num_merged - rows)
            touched = jnp.pad(touched, missing, constant_values=PADDING_ID)
        sums = sum_gradients(given, blocks * rows, stack)
        sums = collectives.psum(sums, axes).reshape(blocks, rows, stack.dim)
        zero = jnp.zeros_like(sums[0])
        total = jax.lax.fori_loop(0, blocks, lambda b, total: total + sums[b], zero)
        return RowSums(touched, jnp.pad(total, ((0, touched.shape[0] - rows), (0, 0))))


def bags_to_merge(ids: LocalIds, gradients: Gradients, view: StackView) -> RowSums:
    """Return the gradients of the bags of gathered ids, as if each were a partial sum.

    A row's gradients are then added one by one, so they must have no gains.
    """
    ids = sort_own_ids(ids, view)
    # Rows 3 7 7 of the bags 2 0 5: the gradients 2, 0 and 5 are added to the sums 0, 1 and 1.
    bags = jnp.concatenate(gradients)
    return route.merge_sorted(bags, ids.index, ids.bags, view.stack.num_rows)


def gradients_to_sort(
    ids: LocalIds, gradients: Gradients, view: StackView, splits: Splits
) -> tuple[RowGradients, GradientLayout]:
    """Return the gradients of gathered ids, for a kernel that sorts and sums them itself.

    It sums feature after feature, so the ids and gradients of several devices are put in order.
    """
    row_ids, bags, gains = ids.rows, ids.bags, ids.gains
    if not view.is_local:
        n, own = view.layout.axes.replicas, view
        view = dataclasses.replace(own, spec=dataclasses.replace(own.spec, replicas=1))
        gradients = _by_feature(gradients[0], own.counts, n)
        # Of bags a0 a1 | b0 and a2 a3 | b1 on two devices: a0 a1 a2 a3 | b0 b1, and their ids
        # alike.
        if own.widths:
            sizes, bags = (
                np.multiply(own.widths, own.counts).tolist(),
                view.dense_bags(),
            )
            row_ids, gains = jax.tree.map(
                lambda x: jnp.concatenate(_by_feature(x, sizes, n)), (row_ids, gains)
            )
    given = RowGradients(row_ids, bags, gains, tuple(gradients))
    if view.layout.blocks > 1:
        starts = [
            view.block_starts(number, splits) for number in range(len(view.features))
        ]
        static = all(isinstance(one, np.ndarray) for one in starts)
        joined = (
            jnp.asarray(np.concatenate(starts)) if static else jnp.concatenate(starts)
        )
        given = given._replace(blocks=joined)
    return given, GradientLayout(view.counts, view.stack.exchange_dtype is not None)


def _by_feature(values: Array, sizes: Sequence[int], n: int) -> tuple[Array, ...]:
    """Return what n devices have, one after the other, feature after feature.

    Args:
      values: `[n N, …]`.
      sizes: how many of the N are of each feature.
      n: the number of devices.
    """
    each = values.reshape(n, -1, *values.shape[1:])
    parts = jnp.split(each, np.cumsum(sizes)[:-1], axis=1)
    return tuple(part.reshape(-1, *values.shape[1:]) for part in parts)


def _blocks(ids: LocalIds, view: StackView, splits: Splits) -> Array:
    """Return the block of the global batch that each id's example is in, int32 `[N]`."""
    axes, num_blocks = view.layout.axes, view.layout.blocks
    if ids.blocks is not None:
        return ids.blocks
    replica, numbers = collectives.axis_index(axes.batch_axes), np.arange(axes.replicas)
    first = numbers * num_blocks // axes.replicas  # of each replica's blocks
    if view.blocks_per_device == 1:
        return jnp.full_like(ids.bags, jnp.asarray(first, jnp.int32)[replica])
    if not view.widths or any(shape.has_places for shape in view.shapes):
        # One device: the host numbers the blocks of such ids of others. The blocks of each feature
        # begin at G bags, ascending; if j of all features' are not after a bag, it is in block
        # (j - 1) % G.
        firsts = [
            jnp.append(jnp.int32(start), view.block_starts(number, splits))
            for number, start in enumerate(view.starts[:-1])
        ]
        at = jnp.searchsorted(jnp.concatenate(firsts), ids.bags, side="right")
        return ((at - 1) % num_blocks).astype(jnp.int32)
    later, parts = np.arange(1, view.blocks_per_device), []
    # Features of one size are alike: [features, ids].
    each = zip(view.sizes, view.shapes, strict=True)
    for (size, count, width), some in itertools.groupby(
        each, key=lambda pair: (pair[0], pair[1].bags, pair[1].width)
    ):
        # Where the later blocks of each replica begin among its examples, [replicas, K - 1]: with
        # 10 examples in 4 blocks on one device 3 5 8.
        starts = -(-(first[:, None] + later) * size * axes.replicas // num_blocks)
        mine = jnp.asarray(starts - numbers[:, None] * size, jnp.int32)[replica]
        ids_each = count * (width or 0)
        example = jnp.arange(size * ids_each, dtype=jnp.int32) // max(1, ids_each)
        block = jnp.sum(example[:, None] >= mine[None], axis=1, dtype=jnp.int32)
        parts.append(jnp.tile(block, len(list(some))))
    return jnp.asarray(first, jnp.int32)[replica] + jnp.concatenate(parts)


class Operands(NamedTuple):
    """What an update needs besides tables and ids.

    Attributes:
      gradients: the activations' gradients, one leaf per feature; None is zero.
      step: int32 `[]`, the number t of this update, 1 for the first.
      learning_rates: scalars `[]` by stack number, for stacks whose rate is read on the host.
      reads: by stack name, the activations that were looked up in its table before, or a number of
        each; the update must wait for them.
      skip: bool `[]`, whether to skip the step, so that no row or slot changes; None: never.
    """

    gradients: list[Array | None]
    step: Array
    learning_rates: dict[int, Array]
    reads: dict[str, list[Array]]
    skip: Array | None = None

    @property
    def steps_done(self) -> Array:
        """Updates applied so far, including this one unless it is skipped, int32 `[]`."""
        return (
            self.step if self.skip is None else self.step - self.skip.astype(jnp.int32)
        )


def update(
    tables: Mapping[str, Array],
    slots: Mapping[str, dict[str, Array]],
    source: Batch | TracedIds,
    operands: Operands,
    layout: Layout,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]], Array]:
    """Return tables and slots after one update, and the bad ids of this step, int32 `[F]`.

    Args:
      tables: `TableState.tables`.
      slots: `TableState.slots`.
      source: the ids.
      operands: gradients, step, learning rates.
      layout: the engine's layout.
    """
    axes = layout.axes
    # Tables without an optimizer do not enter the `shard_map`; they are returned as they came.
    trained = [
        v for v in view_stacks(source.spec, layout) if v.stack.optimizer is not None
    ]

    def device(held, source, operands):
        (located, bad_ids), splits, new = (
            source.locate(layout),
            source.row_splits(layout),
            {},
        )
        for view in trained:
            name = view.stack.name
            with jax.named_scope(f"update/{view.stack.label}"):
                new[name] = _apply(
                    held[name], located[view.number], view, splits, operands
                )
        return new, collectives.psum(bad_ids, axes.batch_axes)

    specs = {view.stack.name: stack_specs(view.stack, axes) for view in trained}
    whole, batch, names = (
        PartitionSpec(),
        axes.spec(axes.batch_axes),
        source.axes(layout),
    )
    gradients, reads = axes.reshard(
        (operands.gradients, operands.reads), axes.batch_axes
    )
    of_operands = Operands(batch, whole, whole, batch, whole)  # type: ignore
    given = specs, axes.spec(names), of_operands
    held = {name: StackShard(tables[name], slots[name]) for name in specs}
    operands = operands._replace(gradients=gradients, reads=reads)
    run = collectives.per_device(device, axes, given, (specs, whole))
    new, bad_ids = run(held, axes.reshard(source, names), operands)
    new_tables, new_slots = split_shards(new)
    return {**tables, **new_tables}, {**slots, **new_slots}, bad_ids


def _apply(
    held: StackShard,
    ids: LocalIds,
    view: StackView,
    splits: Splits,
    operands: Operands,
) -> StackShard:
    """Apply the stack's optimizer to the rows of this device's shard that the batch touches.

    XLA sums gradients within blocks, exchanges them, sums over blocks, and then applies the rule. A
    compiled CPU kernel sums and applies in one pass, so it gets the gradients as early as possible.
    Which kernel runs is chosen when the program is lowered for a platform.
    """
    stack, step, optimizer = view.stack, operands.step, view.stack.optimizer
    assert optimizer is not None, "only stacks with an optimizer are updated"
    rate = optimizer.resolve_learning_rate(
        step, operands.learning_rates.get(view.number)
    )
    rule = compiled_rule(stack, step, rate)
    gradients = stack_gradients(operands.gradients, splits, view)
    # An update must wait for what was looked up (`lookup/sharded.py`), for which the first number
    # of each activation does. Whatever needs the ids waits for these numbers here. Otherwise a
    # TPU's compiler reads them when it writes the rows, and keeps whole activations until then. An
    # empty activation has no number, and nothing was read for it.
    firsts = [read.reshape(-1)[:1] for read in operands.reads[stack.name] if read.size]
    ids, firsts = jax.lax.optimization_barrier((ids, firsts))

    def to_apply(row_ids):
        """Return row ids that depend on all lookups; all padding if the step is skipped."""
        # Adds a zero that is computed from the activations.
        if firsts:
            row_ids += zero_after(firsts).astype(row_ids.dtype)
        # Nothing is written to padding. A branch around the update would make XLA copy tables and
        # slots.
        if operands.skip is not None:
            row_ids = jnp.where(
                operands.skip, jnp.asarray(PADDING_ID, row_ids.dtype), row_ids
            )
        return row_ids

    def to_sums(held, sums):
        """Apply the rule to distinct rows with their whole gradients, in XLA's operations."""
        with jax.named_scope("rule"):
            if optimizer.updates_every_row:
                sums = every_row(sums, stack)
            sums = sums._replace(row_ids=to_apply(sums.row_ids))
            new = apply_rule(held, sums, stack, step, rate)
        if operands.skip is None:
            return new
        # Slots with rows are unchanged already, because the rule got no rows.
        kept = {
            name: jnp.where(operands.skip, held.slots[name], new.slots[name])
            for name, shape in rule_slots(stack).items()
            if not shape.per_row
        }
        return new._replace(slots={**new.slots, **kept})

    def to_partials(held, given):
        """Sum the partial sums of each row and apply the rule: in XLA's operations, one by one.

        SparseCores that know the rule do all in one kernel.
        """

        def in_steps(held, given):
            with jax.named_scope("merge"):
                sums = route.merge(given)
            return to_sums(held, sums)

        def at_once(held, given):
            assert rule is not None
            with jax.named_scope("rule"):
                given = given._replace(row_ids=to_apply(given.row_ids))
                return merge_and_apply(held, given, stack, rule, step)

        sparse = at_once if rule and stack.packing != "none" else None
        return dispatch.choose(held, given, otherwise=in_steps, sparse=sparse)

    def in_kernel(held, given, layout):
        """Sum gradients and apply the rule in one compiled kernel."""
        assert rule is not None
        given = given._replace(row_ids=to_apply(given.row_ids))
        return sum_and_apply(held, given, layout, rule, rounding_of(held, stack, step))

    native = rule is not None and stack.packing == "none"
    if view.by_psum:
        return to_sums(held, psum_sums(ids, gradients, view, splits))
    if view.routes_update:
        # Here partial sums are exchanged on every platform, and the kernel adds up what arrived.
        def adds_up(held, given):
            sums = storage.widened(given.sums)  # M sums are M bags of one id each
            by_row = RowGradients(
                given.row_ids, given.index, None, (sums,), given.segments
            )
            return in_kernel(held, by_row, GradientLayout(sums.shape[:1]))

        received = exchange_sums(ids, gradients, view)
        native = adds_up if native else None
        return dispatch.choose(held, received, otherwise=to_partials, native=native)
    every = gather_all(ids, gradients, view, splits)
    # Without accumulation, occurrences must not be summed at all.
    if not view.accumulates:
        ids, each = sort_own_ids(every[0], view), jnp.concatenate(every[1])
        with jax.named_scope("rule"):
            ids = ids._replace(index=to_apply(ids.index))
            return apply_each(held, ids, each, stack, step, rate)

    def sorts(held):
        return in_kernel(held, *gradients_to_sort(*every, view, splits))

    def in_steps(held):
        return to_partials(held, sum_own_rows(*every, view))

    def by_bag(held):
        return to_partials(held, bags_to_merge(*every, view))

    # The CPU's kernel takes the gradients as they are, and sorts the ids, too. That of the
    # SparseCores adds up gradients of bags as well as partial sums, which then nobody stores.
    # With gains, or sums that are rounded, they are not the same.
    exact = every[0].gains is None and stack.exchange_dtype is None
    native, sparse = sorts if native else None, by_bag if exact else None
    return dispatch.choose(held, otherwise=in_steps, native=native, sparse=sparse)
