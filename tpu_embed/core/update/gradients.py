"""Check activation gradients against the activations, and collect them by stack.

A user gives one gradient per feature, in the shape of its activations. An update works stack by
stack, on one gradient vector per bag.

One NaN that reaches a table spoils its rows for good. So the gradients can be checked before
anything is summed (`Guard`): a step with a bad gradient is then skipped and counted, or is an
error.

Input: one gradient per feature. Output: checked arrays; which features have a gradient that is not
finite on any device, the same answer on every device; then, for one stack on one device, one
`[bags, D]` array per feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embed._checks import (
    check_choice,
    check_in_program,
    check_live,
    refuse,
    warn_user,
)
from tpu_embed._types import Array, Tracer, as_array
from tpu_embed.core.batch import Batch, BatchSpec, StackView, TracedIds
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import Layout
from tpu_embed.core.lookup import Jagged, row_splits, segments


def check_trainable(what: str, layout: Layout) -> None:
    """Check that every trainable table has an optimizer; see `EmbeddingEngine.check_trainable`."""
    # Only tables that a feature uses can receive gradients; dict.fromkeys drops repeated names.
    bare = dict.fromkeys(
        user.table.name
        for user in layout.features
        if user.config.table.trainable and layout.stacks[user.stack].optimizer is None
    )
    if bare:
        refuse(
            what,
            expected="an optimizer for every trainable table",
            got=f"none for {list(bare)}",
            remedy="give the engine or the tables an optimizer, or set trainable=False",
        )


def checked_gradients(
    gradients: Sequence[Any], spec: BatchSpec, layout: Layout
) -> list[Array | None]:
    """Return the gradients as arrays.

    Args:
      gradients: one leaf per feature; None stands for a zero gradient and causes a warning that
        names the feature.
      spec: the batch's static shape.
      layout: the engine's layout.

    Raises:
      ValueError: a leaf is not an array of floats, or has another shape than the activation; the
        batch was placed for a lookup only.
    """
    if spec.routed == "lookup":
        refuse(
            "batch",
            expected="a batch placed for an update",
            got="a lookup's",
            remedy="leave training=False out of place",
        )
    checked: list[Array | None] = []
    for feature, shape, gradient in zip(
        layout.features, spec.feature_shapes, gradients, strict=True
    ):
        what = f"activation gradient of feature {feature.path!r}"
        dim = layout.stacks[feature.stack].dim
        expected, remedy = (shape.batch, *shape.inner, dim), ""
        if shape.capacity is not None:
            expected = (spec.replicas, shape.capacity, dim)
            remedy = (
                "give the gradient of the values that the lookup of this batch returned"
            )
            gradient = gradient.values if isinstance(gradient, Jagged) else gradient
        if gradient is None:
            text = f"{what}: None is taken as zeros of shape {expected}; its rows may still change"
            # Rows move with a zero gradient if the rule has momentum or weight decay.
            warn_user(text)
            checked.append(None)
            continue
        got = getattr(gradient, "shape", f"no array: {type(gradient).__name__}")
        if got != expected or not hasattr(gradient, "dtype"):
            refuse(what, expected=f"shape {expected}", got=f"{got}", remedy=remedy)
        if not jnp.issubdtype(gradient.dtype, jnp.floating):
            refuse(what, expected="floats", got=f"dtype {gradient.dtype}")
        check_live(what, [gradient])
        checked.append(as_array(gradient))
    return checked


def stack_gradients(
    gradients: Sequence[Array | None], row_splits: Mapping[int, Array], view: StackView
) -> tuple[Array, ...]:
    """Return one device's gradients of one stack, `[bags, D]` per feature.

    Args:
      gradients: one leaf per feature, of this device's examples; None is zero.
      row_splits: `[1, B/S + 1]` of every jagged feature.
      view: the stack.
    """
    stack, arrays = view.stack, []
    # [examples, …, D] -> [examples * bags, D]: a sequence of 5 positions has 5 bags per example.
    for f, size, own in zip(view.features, view.sizes, view.shapes, strict=True):
        shape, given = (own.bags_of(size), stack.dim), gradients[f]
        if given is None:
            arrays.append(jnp.zeros(shape, stack.compute_dtype))
            continue
        given = given.astype(stack.compute_dtype)
        if own.capacity is not None and not own.has_places:
            given, _ = segments.pad(row_splits[f][0], given[0], own.bags)
        arrays.append(given.reshape(shape))
    return tuple(arrays)


OnBadGradient = Literal["allow", "skip", "error"]

REFUSED = "refused_batches"
"""The key in `TableState.counters` of the number of steps that were skipped, because the state was
not one in which their batch may be looked up (`ValidSteps`)."""

COUNTER = "bad_gradients"
"""The key in `TableState.counters` of the number of bad gradients."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """What an engine does about activation gradients that are not finite.

    Attributes:
      policy: "allow", "skip" or "error".
      layout: the engine's layout.

    Raises:
      ValueError: an unknown policy.
    """

    policy: OnBadGradient
    layout: Layout

    def __post_init__(self) -> None:
        check_choice("on_bad_gradient", self.policy, get_args(OnBadGradient))

    def new_counters(self) -> dict[str, Array]:
        """Return the `counters` of a new `TableState`, all zero."""
        by_feature = jnp.zeros(len(self.layout.features), jnp.int32)
        own = {} if self.policy == "allow" else {COUNTER: by_feature}
        if self.layout.living:
            own[REFUSED] = jnp.int32(0)
        counters = {"bad_ids": by_feature, "overflows": jnp.int32(0), **own}
        return self.layout.axes.reshard(counters, ())

    def counted(
        self,
        counters: Mapping[str, Array],
        bad_ids: Array,
        bad: Array | None,
        refused: Array | None,
    ) -> dict[str, Array]:
        """Return the counters with one step's numbers added.

        Args:
          counters: the counters of the state before the step.
          bad_ids: int32 `[F]`, the bad ids of this step.
          bad: what `find` returned.
          refused: bool `[]`, whether the batch was not in order; None: it was.
        """
        step = {"bad_ids": bad_ids, COUNTER: bad, REFUSED: refused}
        numbers = {
            name: n.astype(jnp.int32) for name, n in step.items() if n is not None
        }
        # A restored state may come from an engine with another policy: a counter that it lacks
        # starts at 0, and one that this policy does not use is kept.
        return {
            **counters,
            **{name: counters.get(name, 0) + n for name, n in numbers.items()},
        }

    def find(
        self, gradients: Sequence[Array | None], source: Batch | TracedIds
    ) -> Array | None:
        """Return which features' gradients are not finite, bool `[F]`; None under "allow".

        Args:
          gradients: one leaf per feature; None is zero.
          source: the ids that they are for.
        """
        if self.policy == "allow":
            return None
        return not_finite(gradients, _splits(source, self.layout), self.layout)

    def refuse(
        self, gradients: Sequence[Array | None], source: Batch | TracedIds
    ) -> None:
        """Under "error" and outside a jit, wait for the gradients and refuse bad ones.

        Args:
          gradients: one leaf per feature; None is zero.
          source: the ids that they are for.

        Raises:
          ValueError: some are not finite; the message names the features and their tables.
        """
        if self.policy != "error":
            return
        found = _not_finite_program(
            gradients, _splits(source, self.layout), self.layout
        )
        # A tracer is not known yet: then the step is skipped, and `report` tells checkify.
        if isinstance(found, Tracer) or not np.any(found):
            return
        named = [self._name(f) for f in np.flatnonzero(found).tolist()]
        refuse(
            f"activation gradient of {', '.join(named)}",
            expected="finite numbers",
            got="NaN or infinity",
            remedy='nothing was updated; give another, or set on_bad_gradient="skip"',
        )

    def report(self, bad: Array | None) -> None:
        """Under "error" and inside a jit, report bad gradients to `checkify`, if the user uses it.

        Args:
          bad: what `find` returned.
        """
        if bad is None or self.policy != "error":
            return
        for f in range(len(self.layout.features)):
            # checkify formats the text with str.format, so braces in a feature's path are doubled.
            what = f"activation gradient of {self._name(f)}: NaN or infinity"
            check_in_program(~bad[f], what.replace("{", "{{").replace("}", "}}"))

    def _name(self, f: int) -> str:
        feature = self.layout.features[f]
        return f"feature {feature.path!r} of table {feature.table.name!r}"


def _splits(source: Batch | TracedIds, layout: Layout) -> dict[int, Array]:
    """Return the row splits of jagged features, which say where their gradients end."""
    jagged = any(shape.capacity is not None for shape in source.spec.feature_shapes)
    return row_splits(source, layout) if jagged else {}


def not_finite(
    gradients: Sequence[Array | None], splits: Mapping[int, Array], layout: Layout
) -> Array:
    """Return which features' gradients contain NaN or infinity on any device, bool `[F]`.

    Gradients of tables without an optimizer do not count, because they are not applied; nor does
    what stands beyond the last row of a jagged feature.

    Args:
      gradients: one leaf per feature, with the batch dimension sharded; None is zero.
      splits: the row splits `[S, B / S + 1]` of every jagged feature.
      layout: the engine's layout.
    """
    axes = layout.axes
    batch = axes.spec(axes.batch_axes)

    def is_bad(f, gradient, splits):
        stack = layout.stacks[layout.features[f].stack]
        if gradient is None or stack.optimizer is None:
            return jnp.asarray(False)
        # Cast first: a finite float64 gradient may be infinite in the float32 that the table uses.
        finite = jnp.isfinite(gradient.astype(stack.compute_dtype))
        if f in splits:
            finite |= ~Jagged(gradient, splits[f]).valid[..., None]
        return ~jnp.all(finite)

    def device(gradients, splits):
        with jax.named_scope("guard"):
            bad = [is_bad(f, gradient, splits) for f, gradient in enumerate(gradients)]
            # There is no collective "or": the maximum of 0 and 1 does the same.
            return jax.lax.pmax(jnp.stack(bad).astype(jnp.int32), axes.names) > 0

    given = axes.reshard((list(gradients), splits), axes.batch_axes)
    return collectives.per_device(device, axes, batch, PartitionSpec())(*given)


_not_finite_program = partial(jax.jit, static_argnames="layout")(not_finite)
