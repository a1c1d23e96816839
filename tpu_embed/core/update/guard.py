"""Activation gradients that hold NaN or infinity: found, reported, counted.

Enters: the gradients of one step, a leaf a feature, before anything is summed. Leaves: which
features' are not finite, on any device, the same answer everywhere. Called by the engine; `update`
then leaves the step out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from tpu_embed import _checks
from tpu_embed._types import Array, Tracer
from tpu_embed.core.exchange import collectives
from tpu_embed.core.layout import Layout

OnBadGradient = Literal["allow", "skip", "error"]

COUNTER = "bad_gradients"
"""Its key in `TableState.counters`."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """What an engine does about activation gradients that are not finite.

    Attributes:
      policy: "allow", "skip" or "error".
      layout: the engine's.

    Raises:
      ValueError: another policy.
    """

    policy: OnBadGradient
    layout: Layout

    def __post_init__(self) -> None:
        _checks.check_choice("on_bad_gradient", self.policy, get_args(OnBadGradient))

    def new_counters(self) -> dict[str, Array]:
        """Return the `counters` of a new `TableState`."""
        by_feature = jnp.zeros(len(self.layout.features), jnp.int32)
        own = {} if self.policy == "allow" else {COUNTER: by_feature}
        counters = {"bad_ids": by_feature, "overflows": jnp.int32(0), **own}
        return self.layout.axes.reshard(counters, ())

    def counted(
        self, counters: Mapping[str, Array], bad_ids: Array, overflows: Array, bad: Array | None
    ) -> dict[str, Array]:
        """Return the counters with one step's numbers added; those of another policy as they are.

        Args:
          counters: of the state before.
          bad_ids: int32 `[F]`, met in this step.
          overflows: int32 `[]`, exchanges that took the worst-case branch.
          bad: what `find` returned.
        """
        step = {"bad_ids": bad_ids, "overflows": overflows}
        if bad is not None:
            step[COUNTER] = bad.astype(jnp.int32)
        return {**counters, **{name: counters.get(name, 0) + n for name, n in step.items()}}

    def find(self, gradients: Sequence[Array | None]) -> Array | None:
        """Tell, bool `[F]`, which features' gradients are not finite; None under "allow".

        Args:
          gradients: a leaf a feature; None is zero.
        """
        return None if self.policy == "allow" else not_finite(gradients, self.layout)

    def refuse(self, gradients: Sequence[Array | None]) -> None:
        """Wait for the gradients, outside a jit; under "error" they must be finite.

        Raises:
          ValueError: some are not; it names the features and their tables.
        """
        if self.policy != "error":
            return
        found = _not_finite_program(list(gradients), self.layout)
        if isinstance(found, Tracer) or not np.any(found):
            return
        named = [self._name(f) for f in np.flatnonzero(found).tolist()]
        what = f"activation gradient of {', '.join(named)}"
        remedy = 'nothing was updated; give another, or set on_bad_gradient="skip"'
        got = "NaN or infinity"
        raise ValueError(_checks.message(what, expected="finite numbers", got=got, remedy=remedy))

    def report(self, bad: Array | None) -> None:
        """Report what `find` found where that can be done inside a jit: under `checkify`."""
        if bad is None or self.policy != "error":
            return
        for f in range(len(self.layout.features)):
            what = f"activation gradient of {self._name(f)}: NaN or infinity"
            checkify.debug_check(~bad[f], what.replace("{", "{{").replace("}", "}}"))

    def _name(self, f: int) -> str:
        feature = self.layout.features[f]
        return f"feature {feature.path!r} of table {feature.table.name!r}"


def not_finite(gradients: Sequence[Array | None], layout: Layout) -> Array:
    """Tell, bool `[F]`, which features' gradients hold NaN or infinity, on any device.

    They are judged in the dtype that their table computes in. Those of tables that are not trained
    do not count.

    Args:
      gradients: a leaf a feature, batch dimension sharded; None is zero.
      layout: the engine's.
    """
    axes = layout.axes
    batch = axes.spec(axes.batch_axes)

    def device(gradients: list[Array | None]) -> Array:
        with jax.named_scope("guard"):
            bad = [_is_bad(gradient, layout, f) for f, gradient in enumerate(gradients)]
            return collectives.any_device(jnp.stack(bad), axes.mesh)

    return jax.shard_map(
        device, mesh=axes.mesh, in_specs=(batch,), out_specs=PartitionSpec(), check_vma=False
    )(axes.reshard(list(gradients), axes.batch_axes))


_not_finite_program = partial(jax.jit, static_argnames="layout")(not_finite)


def _is_bad(gradient: Array | None, layout: Layout, f: int) -> Array:
    stack = layout.stacks[layout.features[f].stack]
    if gradient is None or stack.optimizer is None:
        return jnp.asarray(False)
    return ~jnp.all(jnp.isfinite(gradient.astype(stack.compute_dtype)))
