"""The lookup of an engine of one feature as one equation of a program, and the update it asks for.

Enters: an engine, its state, ids. Leaves: activations; later the new state, given the gradients of
all activations that were looked up. Called by `nn/`: the equation is what `taps.py` finds in a
traced function, by the state's step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch import Batch
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.tables import TableState

__all__ = ["FEATURE", "Call", "LookedUp", "engine_lookup", "engine_lookup_p", "engine_update"]

FEATURE = "ids"
"""The one feature of such an engine: `EmbeddingEngine({FEATURE: …})`."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static of one lookup.

    Attributes:
      engine: of one feature.
      spec: of a placed batch; None: dense ids, traced or not.
      bags: the last axis of dense ids is the bag.
      operands: 1: ids (`[…]`, or `Batch.packed`); 2: weights of their shape too.
    """

    engine: EmbeddingEngine
    spec: BatchSpec | None
    bags: bool
    operands: int

    def run(self, step: Array, ids: Array, *rest: Array) -> Array:
        """Return the activations: `[…, D]`, or what the batch has."""
        weights, arrays = rest[: self.operands - 1], rest[self.operands - 1 :]
        tables = dict(zip(_stacks(self.engine), arrays, strict=True))
        state = TableState(tables, {}, step, {})
        if self.spec is not None:
            return self.engine.lookup(state, Batch(ids, self.spec))[FEATURE]
        lead = ids.shape[: ids.ndim - self.bags]
        joined = _joined(self.engine, [LookedUp(self, ids, weights[0] if weights else None)])
        found = self.engine.lookup(state, *joined)[FEATURE]
        return found[: math.prod(lead)].reshape(*lead, *found.shape[1:])


class LookedUp(NamedTuple):
    """One lookup, or those of all iterations of a loop: ids and weights with leading axes."""

    call: Call
    ids: Array
    weights: Array | None


def engine_lookup(
    engine: EmbeddingEngine, state: TableState, ids: Array | Batch, weights: Array | None = None
) -> Array:
    """Return the activations of an engine's one feature.

    Args:
      engine: of one feature.
      state: its tables.
      ids: what `engine.place` returned; or integers `[…, H]`, bags of H, or `[B]`, one id an
        example; -1 is padding. Any number of bags: it need not divide among the devices.
      weights: beside integers `[…, H]`: floats of their shape.

    Returns:
      `[…, D]`; `[…, L, D]` for a sequence.

    Raises:
      TypeError: ids that are no integers.
      ValueError: ids without an axis; weights of another shape or no floats, or beside a batch.
    """
    arrays = [state.tables[name] for name in _stacks(engine)]
    if isinstance(ids, Batch):
        _check_no_weights(weights)
        call = Call(engine, ids.spec, bags=True, operands=1)
        return engine_lookup_p.bind(state.step, ids.packed, *arrays, call=call)
    scales = [] if weights is None else [weights]
    _check_dense(ids, weights)
    call = Call(engine, None, bags=ids.ndim > 1, operands=1 + len(scales))
    return engine_lookup_p.bind(state.step, ids, *scales, *arrays, call=call)


def engine_update(
    engine: EmbeddingEngine,
    state: TableState,
    lookups: Sequence[LookedUp],
    gradients: Sequence[Array],
) -> TableState:
    """Return the state after one step of the optimizer with the gradients of all lookups.

    A row's gradients are summed over the lookups as over the examples of one batch that holds them
    one after the other.

    Args:
      engine: of one feature.
      state: its tables and slots.
      lookups: all of them; a placed batch stands alone.
      gradients: of the activations of each.

    Raises:
      ValueError: a placed batch that does not stand alone, or was looked up in a loop; what
        `engine.update` refuses.
    """
    placed = [lookup for lookup in lookups if lookup.call.spec is not None]
    if placed:
        _check_alone(engine, lookups)
        (lookup,) = lookups
        batch = Batch(lookup.ids, placed[0].call.spec)  # type: ignore[arg-type]
        return engine.update(state, batch, {FEATURE: gradients[0]})
    features, weights = _joined(engine, lookups)
    flat = [_flat(g, x.ids.ndim - x.call.bags) for g, x in zip(gradients, lookups, strict=True)]
    together = _padded(jnp.concatenate(flat), features[FEATURE].shape[0], 0)
    return engine.update(state, features, {FEATURE: together}, weights)


def _check_no_weights(weights: Any) -> None:
    if weights is not None:
        expected, remedy = "None with a Batch", "give them to place"
        raise ValueError(message("weights", expected=expected, got="a value", remedy=remedy))


def _check_dense(ids: Array, weights: Array | None) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(message(FEATURE, expected="ids of an integer dtype", got=f"{ids.dtype}"))
    if ids.ndim == 0:
        remedy = "give one id as [1]"
        raise ValueError(message(FEATURE, expected="[B] or […, H]", got="rank 0", remedy=remedy))
    if weights is None:
        return
    if weights.shape != ids.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        got = f"{weights.dtype} of shape {weights.shape}"
        raise ValueError(message("weights", expected=f"floats of shape {ids.shape}", got=got))


def _check_alone(engine: EmbeddingEngine, lookups: Sequence[LookedUp]) -> None:
    ranks = [lookup.ids.ndim for lookup in lookups]
    if ranks != [2]:
        loop = " in a loop" if len(ranks) == 1 else ""
        raise ValueError(
            message(
                f"table {next(iter(engine.table_configs))!r}",
                expected="a placed batch as the only lookup of a step",
                got=f"{len(ranks)} lookups{loop}",
                remedy="join the ids in one batch, or look dense ids up",
            )
        )


def _stacks(engine: EmbeddingEngine) -> list[str]:
    return [group.name for group in engine.layout.groups]


def _joined(engine: EmbeddingEngine, lookups: Sequence[LookedUp]) -> tuple[Any, Any]:
    """Return features and weights of an engine that hold the dense ids of all lookups.

    One after the other, the narrower bags filled with padding, and empty ones at the end until
    the devices get equally many.
    """
    bags = any(lookup.call.bags for lookup in lookups)
    width = max(lookup.ids.shape[-1] if lookup.call.bags else 1 for lookup in lookups)
    wide = np.result_type(*(lookup.ids.dtype for lookup in lookups))

    def flat(array: Array, own_bags: bool, fill: int) -> Array:
        if not bags:
            return array.reshape(-1)
        columns = _flat(array if own_bags else array[..., None], array.ndim - own_bags)
        missing = width - columns.shape[1]
        return jnp.pad(columns, ((0, 0), (0, missing)), constant_values=fill)

    ids = jnp.concatenate([flat(x.ids.astype(wide), x.call.bags, PADDING_ID) for x in lookups])
    count = -(-max(1, ids.shape[0]) // engine.layout.axes.replicas) * engine.layout.axes.replicas
    features = {FEATURE: _padded(ids, count, PADDING_ID)}
    if all(lookup.weights is None for lookup in lookups):
        return features, None
    scales = [jnp.ones(x.ids.shape) if x.weights is None else x.weights for x in lookups]
    flat_scales = [flat(s, x.call.bags, 0) for s, x in zip(scales, lookups, strict=True)]
    return features, {FEATURE: _padded(jnp.concatenate(flat_scales), count, 0)}


def _flat(array: Array, lead: int) -> Array:
    """Return the array with its first `lead` axes made one."""
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def _padded(array: Array, count: int, fill: int) -> Array:
    missing = ((0, count - array.shape[0]), *((0, 0) for _ in array.shape[1:]))
    return jnp.pad(array, missing, constant_values=fill) if count > array.shape[0] else array


# -- the primitive -----------------------------------------------------------------------------


def _run(*operands: Array, call: Call) -> Array:
    return call.run(*operands)


def _abstract(*operands: Any, call: Call) -> Any:
    return jax.make_jaxpr(call.run)(*operands).out_avals[0]


def _batched(operands: tuple, dims: tuple, *, call: Call) -> tuple[Array, int]:
    asked = range(1, 1 + call.operands)
    if call.spec is not None or any(d is not None for i, d in enumerate(dims) if i not in asked):
        got = "a placed batch" if call.spec is not None else "a table that is mapped too"
        remedy = "give all ids to one call: it takes any number of axes"
        raise ValueError(message("vmap of a lookup", expected="dense ids", got=got, remedy=remedy))
    size = next(operands[i].shape[dims[i]] for i in asked if dims[i] is not None)
    given = list(operands)
    for i in asked:
        if dims[i] is None:
            given[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
        else:
            given[i] = jnp.moveaxis(operands[i], dims[i], 0)
    return engine_lookup_p.bind(*given, call=call), 0


def _tangent(primals: tuple, tangents: tuple, *, call: Call) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moving = [i for i in moving if tangents[i].dtype != jax.dtypes.float0]
    if not moving:
        found = engine_lookup_p.bind(*primals, call=call)
        return found, ad.Zero(jax.typeof(found).to_tangent_aval())

    def run(*given: Array) -> Array:
        operands = list(primals)
        for i, x in zip(moving, given, strict=True):
            operands[i] = x
        return call.run(*operands)

    return jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])


engine_lookup_p = Primitive("engine_lookup")
"""`(step, ids, [weights], tables…)` to activations; the step says whose lookup it is."""

engine_lookup_p.def_impl(_run)
engine_lookup_p.def_abstract_eval(_abstract)
mlir.register_lowering(engine_lookup_p, mlir.lower_fun(_run, multiple_results=False))
batching.primitive_batchers[engine_lookup_p] = _batched
ad.primitive_jvps[engine_lookup_p] = _tangent
