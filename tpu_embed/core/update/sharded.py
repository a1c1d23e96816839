"""Update the tables on all devices: send gradients to the rows' owners, sum them, apply the rule.

The whole update is one `shard_map`. On each device, stack after stack, the activations' gradients
become partial sums per row, the partial sums travel to the shards that own the rows, and there they
are added up, passed through the optimizer's rule, and the new rows are written.

Input: the arrays of a state, the ids of all stacks, and one gradient per feature. Output: new
arrays, in the memory of the old ones if those are donated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import (
    Batch,
    LocalIds,
    StackView,
    TracedIds,
    view_stacks,
)
from tpu_embed.core.exchange import RowSums, collectives, route
from tpu_embed.core.layout import Layout
from tpu_embed.core.state import StackShard, rule_slots, state_specs
from tpu_embed.core.update import occurrences
from tpu_embed.core.update.apply import (
    apply_rule,
    compiled_rule,
    every_row,
    merge_and_apply,
    rounding_of,
    sum_and_apply,
)
from tpu_embed.core.update.gradients import stack_gradients
from tpu_embed.core.update.sums import (
    Splits,
    bags_to_merge,
    exchange_sums,
    gather_all,
    gradients_to_sort,
    partials_for_kernel,
    psum_sums,
    sort_own_ids,
    sum_own_rows,
)
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.operands import GradientLayout, RowGradients
from tpu_embed.kernels.waits import zero_after


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
        return self.step if self.skip is None else self.step - self.skip.astype(jnp.int32)


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
    trained = [v for v in view_stacks(source.spec, layout) if v.stack.optimizer is not None]

    def device(
        tables: dict[str, Array],
        slots: dict[str, dict[str, Array]],
        source: Batch | TracedIds,
        operands: Operands,
    ) -> tuple[dict[str, Array], dict[str, dict[str, Array]], Array]:
        (located, bad_ids), splits = source.locate(layout), source.row_splits(layout)
        new_tables, new_slots = {}, {}
        for view in trained:
            name = view.stack.name
            with jax.named_scope(f"update/{view.stack.label}"):
                held = StackShard(tables[name], slots[name])
                new_tables[name], new_slots[name] = _apply(
                    held, located[view.number], view, splits, operands
                )
        return new_tables, new_slots, collectives.psum(bad_ids, axes.batch_axes)

    table_specs, slot_specs = state_specs(tuple(view.stack for view in trained), axes)
    whole, batch = PartitionSpec(), axes.spec(axes.batch_axes)
    gradients, reads = axes.reshard((operands.gradients, operands.reads), axes.batch_axes)
    new_tables, new_slots, bad_ids = jax.shard_map(
        device,
        mesh=axes.mesh,
        in_specs=(
            table_specs,
            slot_specs,
            axes.spec(source.axes(layout)),
            Operands(batch, whole, whole, batch, whole),  # type: ignore
        ),
        out_specs=(table_specs, slot_specs, whole),
        check_vma=False,
    )(
        {name: tables[name] for name in table_specs},
        {name: slots[name] for name in table_specs},
        axes.reshard(source, source.axes(layout)),
        operands._replace(gradients=gradients, reads=reads),
    )
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
    rate = optimizer.resolve_learning_rate(step, operands.learning_rates.get(view.number))
    rule = compiled_rule(stack, step, rate)
    gradients = stack_gradients(operands.gradients, splits, view)
    # An update must wait for what was looked up (`lookup/reads.py`), for which the first number of
    # each activation does. Whatever needs the ids waits for these numbers here. Otherwise a TPU's
    # compiler reads them when it writes the rows, and keeps whole activations until then. An empty
    # activation has no number, and nothing was read for it.
    firsts = [read.reshape(-1)[:1] for read in operands.reads[stack.name] if read.size]
    ids, firsts = jax.lax.optimization_barrier((ids, firsts))

    def to_apply(row_ids: Array) -> Array:
        """Return row ids that depend on all lookups; all padding if the step is skipped."""
        # Adds a zero that is computed from the activations.
        if firsts:
            row_ids += zero_after(firsts).astype(row_ids.dtype)
        # Nothing is written to padding. A branch around the update would make XLA copy tables and
        # slots.
        if operands.skip is not None:
            row_ids = jnp.where(operands.skip, jnp.asarray(PADDING_ID, row_ids.dtype), row_ids)
        return row_ids

    def to_sums(held: StackShard, sums: RowSums) -> StackShard:
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

    def to_partials(held: StackShard, given: RowSums) -> StackShard:
        """Sum the partial sums of each row and apply the rule: in XLA's operations, one by one.

        SparseCores that know the rule do all in one kernel.
        """

        def in_steps(held: StackShard, given: RowSums) -> StackShard:
            with jax.named_scope("merge"):
                sums = route.merge(given)
            return to_sums(held, sums)

        def at_once(held: StackShard, given: RowSums) -> StackShard:
            assert rule is not None
            with jax.named_scope("rule"):
                given = given._replace(row_ids=to_apply(given.row_ids))
                return merge_and_apply(held, given, stack, rule, step)

        sparse = at_once if rule and stack.packing != "none" else None
        return dispatch.choose(held, given, otherwise=in_steps, sparse=sparse)

    def in_kernel(held: StackShard, given: RowGradients, layout: GradientLayout) -> StackShard:
        """Sum gradients and apply the rule in one compiled kernel."""
        assert rule is not None
        given = given._replace(row_ids=to_apply(given.row_ids))
        rounding = rounding_of(held, stack, step)
        return sum_and_apply(held, given, layout, rule, rounding)

    native = rule is not None and stack.packing == "none"
    if view.by_psum:
        return to_sums(held, psum_sums(ids, gradients, view, splits))
    if view.routes_update:
        # Here partial sums are exchanged on every platform, and the kernel adds up what arrived.
        def adds_up(held: StackShard, given: RowSums) -> StackShard:
            return in_kernel(held, *partials_for_kernel(given))

        received = exchange_sums(ids, gradients, view)
        native = adds_up if native else None
        return dispatch.choose(held, received, otherwise=to_partials, native=native)
    every = gather_all(ids, gradients, view, splits)
    # Without accumulation, occurrences must not be summed at all.
    if not view.accumulates:
        ids, each = sort_own_ids(every[0], view), jnp.concatenate(every[1])
        with jax.named_scope("rule"):
            ids = ids._replace(index=to_apply(ids.index))
            return occurrences.apply_each(held, ids, each, stack, step, rate)

    def sorts(held: StackShard) -> StackShard:
        return in_kernel(held, *gradients_to_sort(*every, view, splits))

    def in_steps(held: StackShard) -> StackShard:
        return to_partials(held, sum_own_rows(*every, view))

    def by_bag(held: StackShard) -> StackShard:
        return to_partials(held, bags_to_merge(*every, view))

    # The CPU's kernel takes the gradients as they are, and sorts the ids, too. That of the
    # SparseCores adds up gradients of bags as well as partial sums, which then nobody stores.
    # With gains, or sums that are rounded, they are not the same.
    exact = every[0].gains is None and stack.exchange_dtype is None
    native, sparse = sorts if native else None, by_bag if exact else None
    return dispatch.choose(held, otherwise=in_steps, native=native, sparse=sparse)
