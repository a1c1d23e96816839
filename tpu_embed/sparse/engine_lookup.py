"""An engine's lookup as one equation of a traced program, so that a model's lookups can be found.

A model that is traced may look the same table up several times, also in loops. Each lookup is one
equation, `engine_lookup_p`; the update then takes the gradients of all of them at once. The
equation names its table by the state's step, its first operand: the step is a scalar that every
lookup can carry and that nothing differentiates.

Input: an engine of one feature, its state, and ids.
Output: activations; later the new state, from the gradients of all activations looked up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tpu_embed._checks import message, refuse_derivatives
from tpu_embed._types import Array
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import is_real
from tpu_embed.core.lookup import Jagged
from tpu_embed.core.state import (
    MAP_VERSION,
    TableState,
    check_layout,
    check_tables_not_donated,
)
from tpu_embed.sparse import sequences, several
from tpu_embed.sparse.joined import DenseIds, as_signed, flat, join, padded
from tpu_embed.vocabulary import BatchKeys, check_vocabulary

FEATURE = "ids"
"""The name of the only feature of such an engine: `EmbeddingEngine({FEATURE: …})`."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one lookup.

    Attributes:
      engine: an engine of one feature.
      spec: the spec of a placed batch; None for dense ids, which may be traced.
      bags: whether the last axis of dense ids is the bag.
      weighted: whether weights follow the ids among the operands; or, of a placed batch of keys,
        the states that it may be looked up in (`ValidSteps`).
      brings: of a placed batch that brings rows of a table on the host along, the structure of
        these and of what draws first rows, and `Batch.visit_rows`; otherwise None.
    """

    engine: EmbeddingEngine
    spec: BatchSpec | None
    bags: bool
    weighted: bool
    brings: tuple[Any, int] | None = None

    def run(self, step: Array, ids: Array, *rest: Array) -> Array:
        """Return the activations.

        Args:
          step: int32 `[]`.
          ids: integers `[…]`, with bags `[…, H]`, or `Batch.packed`.
          rest: weights in the shape of the ids, if there are any; then the arrays of the tables. Of
            keys: the batch's steps, int32 `[3]`, then the state's `MAP_VERSION`, then
            the tables, then what it brings along.

        Returns:
          `[…, D]`, `[…, L, D]` for a sequence, or the activations of the placed batch, of which a
          `Jagged` is given by its values.
        """
        # rest is [weights, table 0, …] or [table 0, …]: a slice up to False is empty.
        weights, arrays = rest[: self.weighted], rest[self.weighted :]
        vocabulary = None
        if self.engine.vocabularies is not None:
            version, *arrays = arrays
            vocabulary = {MAP_VERSION: version}
        stacks = _stacks(self.engine)
        arrays, brought = arrays[: len(stacks)], arrays[len(stacks) :]
        tables = dict(zip(stacks, arrays, strict=True))
        visits = None
        if self.brings is not None:
            visits, others = jax.tree.unflatten(self.brings[0], brought)
            vocabulary = {**(vocabulary or {}), **others}
        state = TableState(tables, {}, step, {}, vocabulary)
        if self.spec is not None:
            steps = weights[0] if weights else None
            every = self.engine.lookup(state, self._batch(ids, steps, visits))
            if several.is_several(self.engine):
                return several.pack(every, self.engine)
            found = every[FEATURE]
            return found.values if isinstance(found, Jagged) else found
        # Ids [3, 5, H] on 4 replicas: 15 bags, padded to 16 -> [16, D] -> [15, D] -> [3, 5, D].
        dense = DenseIds(ids, weights[0] if weights else None, self.bags)
        found = self.engine.lookup(state, *_joined(self.engine, [dense]))[FEATURE]
        found = sequences.pad(found, ids.shape[-1], self.engine)
        count = math.prod(dense.lead)
        if count < found.shape[0]:
            # Replicate first: an explicit mesh axis can't split a count that it does not divide.
            found = self.engine.layout.axes.reshard(found, ())[:count]
        return self.engine.layout.axes.reshape(found, (*dense.lead, *found.shape[1:]))

    def _batch(self, packed: Array, steps: Array | None, visits: Any) -> Batch:
        """Return the placed batch that `engine_lookup` has checked."""
        assert self.spec is not None, "of a placed batch"
        if self.brings is None:
            return _batch(self.engine, packed, self.spec, steps)
        rows = self.brings[1]
        batch = Batch.of(packed, self.spec, self.engine.layout.visiting(rows), steps)
        return dataclasses.replace(batch, visits=visits, visit_rows=rows)


class LookedUp(NamedTuple):
    """One lookup, or the lookups of all iterations of a loop.

    Attributes:
      call: the static part of the lookup.
      ids: the ids; the axes of loops come first.
      weights: floats in the shape of the ids, or None; of a placed batch of keys its steps.
    """

    call: Call
    ids: Array
    weights: Array | None


def engine_lookup(
    engine: EmbeddingEngine, state: TableState, ids: Any, *, weights: Array | None = None
) -> Array | Jagged | dict[str, Any]:
    """Return the activations of an engine's only feature, or of inputs by name.

    Args:
      engine: an engine of one feature, or one for inputs by name (`several.py`).
      state: the state of the engine.
      ids: a batch that `engine.place` returned; or integers, `[…, H]` for bags of H ids, `[B]` for
        one id per example. -1 is padding. The number of bags need not divide among the devices,
        but that of jagged sequences must.
      weights: floats or integers in the shape of integer ids; None with a batch.

    Returns:
      `[…, D]`; `[…, L, D]` for a sequence; a `Jagged` if the feature is jagged.

    Raises:
      TypeError: the ids are not integers.
      ValueError: ids without an axis; ids of a jagged feature that are not `[B, H]`, or whose B the
        replicas do not divide; weights of another shape, that are not real numbers, or beside a
        batch; a batch of another engine.
    """
    check_tables_not_donated(state)
    check_layout(state.tables, engine.layout)
    arrays = [state.tables[name] for name in _stacks(engine)]
    if isinstance(ids, Batch):
        _check_no_weights(weights)
        ids.check(engine.layout)
        steps, brought, brings = [], [], None
        if engine.vocabularies is not None:
            steps, vocabulary = [jnp.asarray(ids.valid_steps)], dict(check_vocabulary(state))
            arrays = [vocabulary.pop(MAP_VERSION), *arrays]
            if ids.visit_rows:
                brought, structure = jax.tree.flatten((ids.visits, vocabulary))
                brings = structure, ids.visit_rows
        call = Call(engine, ids.spec, True, bool(steps), brings)
        found = _bind(call, state.step, ids.packed, *steps, *arrays, *brought)
        # What follows needs no steps.
        ids = dataclasses.replace(ids, valid_steps=None, keys=BatchKeys(), visits=None)
        if several.is_several(engine):
            return several.name_activations(found, ids, engine)
    else:
        _check_dense(ids, weights)
        if sequences.is_jagged(engine):
            sequences.check_sequences(engine, FEATURE, ids)
        scales = [] if weights is None else [_as_floats(weights, engine)]
        call, ids = Call(engine, None, ids.ndim > 1, weights is not None), as_signed(ids)
        found = _bind(call, state.step, ids, *scales, *arrays)
    return sequences.as_jagged(found, ids, engine) if sequences.is_jagged(engine) else found


def engine_update(
    engine: EmbeddingEngine,
    state: TableState,
    *,
    lookups: Sequence[LookedUp],
    gradients: Sequence[Array],
) -> TableState:
    """Return the state after one step of the optimizer with the gradients of all lookups.

    The step is not differentiable. The gradients of a row are summed as if all lookups were one
    batch, which holds their examples one lookup after the other.

    Args:
      engine: an engine of one feature.
      state: the state of the engine, with slots.
      lookups: all lookups of the step. A placed batch must be the only one.
      gradients: one gradient per lookup, in the shape of its activations.

    Returns:
      the new state.

    Raises:
      ValueError: a placed batch is not the only lookup, or was looked up in a loop; whatever
        `engine.update` refuses.
    """
    gradients = _not_differentiable(list(gradients))
    specs = [lookup.call.spec for lookup in lookups if lookup.call.spec is not None]
    if specs:
        _check_alone(engine, lookups)
        batch = _batch(engine, lookups[0].ids, specs[0], lookups[0].weights)
        if several.is_several(engine):
            return several.update(engine, state, batch, gradients[0])
        return engine.update(state, batch, {FEATURE: gradients[0]})
    # Gradients [3, 5, D] and [4, D] become [15, D] and [4, D], then [19, D], then [20, D]: the last
    # row of zeros is for the empty bag that `join` appends to the ids.
    dense = [DenseIds(one.ids, one.weights, one.call.bags) for one in lookups]
    features, weights = _joined(engine, dense)
    each = [
        flat(g, len(one.lead), engine.layout.axes) for g, one in zip(gradients, dense, strict=True)
    ]
    jagged, ids = sequences.is_jagged(engine), features[FEATURE]
    if jagged:
        each = sequences.fill_columns(each, ids.shape[1], engine)
    joined = padded(jnp.concatenate(each), ids.shape[0], 0)
    if jagged:
        features, weights, joined = sequences.place_gradient(joined, features, weights, engine)
    return engine.update(state, features, {FEATURE: joined}, weights)


_not_differentiable = refuse_derivatives(
    "update of a layer's table",
    expected="a step that is not differentiated",
    got="a gradient through it",
    remedy="differentiate sparse_value_and_grad, and apply the tables' gradients after it",
)


def _check_no_weights(weights: Any) -> None:
    if weights is not None:
        expected, remedy = "None with a Batch", "give them to place"
        raise ValueError(message("weights", expected=expected, got="a value", remedy=remedy))


def _check_dense(ids: Any, weights: Array | None) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        remedy = "cast them: ids.astype(jnp.int32)"
        expected, got = "ids of an integer dtype", f"{ids.dtype}"
        raise TypeError(message(FEATURE, expected=expected, got=got, remedy=remedy))
    if ids.ndim == 0:
        remedy = "give one id as [1]"
        raise ValueError(message(FEATURE, expected="[B] or […, H]", got="rank 0", remedy=remedy))
    if weights is None:
        return
    if weights.shape != ids.shape or not is_real(weights.dtype):
        got, remedy = f"{weights.dtype} of shape {weights.shape}", "give one weight per id, or None"
        expected = f"real numbers of shape {ids.shape}"
        raise ValueError(message("weights", expected=expected, got=got, remedy=remedy))


def _as_floats(weights: Array, engine: EmbeddingEngine) -> Array:
    """Return weights as floats, since lookups with float and integer weights may be joined."""
    if jnp.issubdtype(weights.dtype, jnp.floating):
        return weights
    return weights.astype(engine.layout.stacks[0].compute_dtype)


def _check_alone(engine: EmbeddingEngine, lookups: Sequence[LookedUp]) -> None:
    # Batch.packed is a matrix; a loop would have put an axis before it.
    alone = len(lookups) == 1
    if not alone or lookups[0].ids.ndim != 2:
        raise ValueError(
            message(
                f"table {next(iter(engine.table_configs))!r}",
                expected="a placed batch as the only lookup of a step",
                got="one in a loop" if alone else f"{len(lookups)} lookups",
                remedy='place them together, layer.place({"history": …, "item": …}), join the ids '
                "in one batch, or look dense ids up",
            )
        )


def _stacks(engine: EmbeddingEngine) -> list[str]:
    return [stack.name for stack in engine.layout.stacks]


def _batch(
    engine: EmbeddingEngine, packed: Array, spec: BatchSpec, valid_steps: Array | None
) -> Batch:
    """Return the batch of packed ids that `engine_lookup` has checked."""
    return Batch.of(packed, spec, engine.layout, valid_steps)


def _joined(engine: EmbeddingEngine, lookups: Sequence[DenseIds]) -> tuple[Any, Any]:
    """Return the ids and weights of several lookups as features and weights of the engine."""
    ids, weights = join(lookups, engine.layout.axes)
    return {FEATURE: ids}, None if weights is None else {FEATURE: weights}


# -- the primitive -----------------------------------------------------------------------------


def _bind(call: Call, *operands: Array) -> Array:
    """Bind the primitive, with the traced lookup as a parameter: jit looks for meshes in it."""
    return engine_lookup_p.bind(*operands, call=call, program=jax.make_jaxpr(call.run)(*operands))


def _run(*operands: Array, call: Call, program: ClosedJaxpr) -> Array:
    return call.run(*operands)


def _lowered(*operands: Array, call: Call, program: ClosedJaxpr) -> Array:
    return jaxpr_as_fun(program)(*operands)[0]


def _abstract(*operands: Any, call: Call, program: ClosedJaxpr) -> Any:
    return program.out_avals[0]


def _batched(operands: tuple, dims: tuple, *, call: Call, program: Any) -> tuple[Array, int]:
    # A lookup takes ids of any leading axes, so vmap adds one axis to ids and weights, the operands
    # 1 and 2 of (step, ids, [weights], tables…). Step and tables can't be batched.
    asked = range(1, 2 + call.weighted)
    if call.spec is not None:
        _refuse_vmap("dense ids", "a placed batch", "place one batch of all, and look it up once")
    if any(d is not None for i, d in enumerate(dims) if i not in asked):
        expected = "one table, looked up in every branch of a cond or in none"
        remedy = "look up before the cond; of an ensemble, in a loop over its members"
        _refuse_vmap(expected, "one table per member", remedy)
    size = next(operands[i].shape[dims[i]] for i in asked if dims[i] is not None)
    given = list(operands)
    for i in asked:
        if dims[i] is None:
            given[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
        else:
            given[i] = jnp.moveaxis(operands[i], dims[i], 0)
    return _bind(call, *given), 0


def _refuse_vmap(expected: str, got: str, remedy: str) -> None:
    raise ValueError(message("vmap of a lookup", expected=expected, got=got, remedy=remedy))


def _tangent(primals: tuple, tangents: tuple, *, call: Call, program: Any) -> tuple[Any, Any]:
    # Integer operands have float0 tangents, which are no derivatives either.
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moving = [i for i in moving if tangents[i].dtype != jax.dtypes.float0]
    if not moving:
        found = engine_lookup_p.bind(*primals, call=call, program=program)
        return found, ad.Zero(jax.typeof(found).to_tangent_aval())

    # Weights (or tables) are differentiated: the lookup is opened, that is, its parts stand in the
    # program and not the one equation that can be found. `opened_p` marks the results.
    def run(*moved: Array) -> Array:
        operands = list(primals)
        for i, x in zip(moving, moved, strict=True):
            operands[i] = x
        return call.run(*operands)

    found, moved = jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])
    return opened_p.bind(primals[0], found), opened_p.bind(primals[0], moved)


engine_lookup_p = Primitive("engine_lookup")
"""Maps `(step, ids, [weights], tables…)` to activations."""

engine_lookup_p.def_impl(_run)
engine_lookup_p.def_abstract_eval(_abstract)
mlir.register_lowering(engine_lookup_p, mlir.lower_fun(_lowered, multiple_results=False))
engine_lookup_p.to_lojax = _lowered  # what later releases of JAX ask before lowering
batching.primitive_batchers[engine_lookup_p] = _batched
ad.primitive_jvps[engine_lookup_p] = _tangent


def _opened(step: Array, value: Array) -> Array:
    return value


def _opened_back(cotangent: Any, step: Array, value: Any) -> tuple[None, Any]:
    if type(cotangent) is ad.Zero:
        return None, cotangent
    return None, opened_p.bind(step, cotangent)


opened_p = Primitive("engine_lookup_opened")
"""Maps `(step, value)` to value. Marks a lookup result, or its derivative by weights, whose table
gradient can no longer be recovered, so that the tracer can report it: the step reaches the mark."""

opened_p.def_impl(_opened)
opened_p.def_abstract_eval(_opened)
mlir.register_lowering(opened_p, mlir.lower_fun(_opened, multiple_results=False))
batching.primitive_batchers[opened_p] = lambda operands, dims: (opened_p.bind(*operands), dims[1])
ad.primitive_jvps[opened_p] = lambda primals, tangents: (opened_p.bind(*primals), tangents[1])
ad.primitive_transposes[opened_p] = _opened_back
