"""What layers have in common: an engine, its state in variables, and lookups that a step can find.

The variables of a state have types of their own, so that filters such as `nnx.Param` do not select
them: nnx must not make a dense gradient for a table.

During a training step (`gradients.py`) a layer has two further variables. `seen` collects what it
has looked up, and `tap` has zeros for each of these lookups, which become part of the activations:
the gradient by them is that of the activations. Both are variables, so that they pass through
`nnx.jit` and `nnx.remat` as the rest of the model does.

Input: a placed batch, or ids by feature. Output: activations; after a step, the new state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

# Which trace is current, and of which kind, has no public name.
from jax._src import core
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace

from tpu_embed._checks import check_type, message, refuse, refuse_derivatives, warn_user
from tpu_embed._types import PADDING_ID, Array, PyTree, Tracer
from tpu_embed.config import FeatureConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import narrow_ids, read_ids
from tpu_embed.core.lookup import Jagged, split_activations
from tpu_embed.core.state import TableState, check_state
from tpu_embed.engine_layer import EngineLayer
from tpu_embed.optimizers.base import LearningRateKind, learning_rate_kind
from tpu_embed.sparse import check_weights, known_after, tapped
from tpu_embed.vocabulary import map_version


@final
class Table(nnx.Variable):
    """The rows of the tables of one stack, sharded over the mesh of its layer.

    Its name among the variables of the layer is that of its stack, which says what the rows are.
    The metadata `stack` repeats the name, for states that are merged by position.
    """


@final
class Slot(nnx.Variable):
    """A slot of a table's optimizer."""


@final
class Counter(nnx.Variable):
    """A counter of a layer: updates (`step`), ids outside the table, exchanges over capacity."""


@final
class MapVersion(nnx.Variable):
    """Of a layer of keys: the step of its map that the rows belong to, and the key of new rows."""


@final
class Tap(nnx.Variable):
    """During a training step: zeros that are added to the activations of each of its lookups.

    The gradient by them is that of the activations.
    """


@final
class Seen(nnx.Variable):
    """During a training step: what the layer has looked up in it so far."""


def attributes(state: TableState) -> dict[str, Any]:
    """Return the attributes of a layer that hold its state, in the containers of nnx."""
    tables = {stack: Table(rows, stack=stack) for stack, rows in state.tables.items()}
    slots = {
        stack: nnx.Dict({name: Slot(array) for name, array in by_name.items()})
        for stack, by_name in state.slots.items()
    }
    found: dict[str, Any] = {
        name: Counter(array) for name, array in state.counters.items()
    }
    found |= {
        "tables": nnx.Dict(tables),
        "slots": nnx.Dict(slots),
        "step": Counter(state.step),
    }
    if state.vocabulary is not None:
        every = {name: MapVersion(x) for name, x in state.vocabulary.items()}
        found["vocabulary"] = nnx.Dict(every)
    return found


def state_of(holder: Mapping[str, Any]) -> TableState:
    """Return the state that a layer's attributes hold.

    Args:
      holder: the attributes by name; attributes that are not part of the state are ignored.
    """
    named = _variables(holder["tables"])
    tables = {x.get_metadata().get("stack", name): x[...] for name, x in named.items()}
    by_stack = holder["slots"]  # a stack without slots may have no entry
    slots = {
        stack: {name: slot[...] for name, slot in _variables(by_stack[stack]).items()}
        if stack in by_stack
        else {}
        for stack in tables
    }
    counted = {name: x[...] for name, x in holder.items() if isinstance(x, Counter)}
    step = counted.pop("step")
    vocabulary = None
    if "vocabulary" in holder:
        vocabulary = {
            name: x[...] for name, x in _variables(holder["vocabulary"]).items()
        }
    return TableState(tables, slots, step, counted, vocabulary)


def _variables(holder: Any) -> dict[str, nnx.Variable]:
    """Return the variables of a dictionary by name.

    `nnx.tabulate` replaces the public methods of an `nnx.Dict` while it calls a model, and adds a
    number to it. So the dictionary is only iterated and indexed, and other values are left out.

    Args:
      holder: an `nnx.Dict`, a dict or a state.
    """
    return {
        name: holder[name] for name in holder if isinstance(holder[name], nnx.Variable)
    }


FEATURE = "ids"
"""The name of the only feature of a layer with one."""

STATE = (Table, Slot, Counter, MapVersion)
"""The types of the variables that hold a layer's state."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activations:
    """What was looked up, given to a model in place of ids: its `Embeddings` gives it back.

    `fit` gives it to a loss, so that a model is called in the same way in training and in use.

    Attributes:
      found: the activations, in the structure of the features.
    """

    found: Any


_calls: ContextVar[list[EmbeddingEngine] | None] = ContextVar("calls", default=None)


@contextlib.contextmanager
def count_calls() -> Iterator[list[EmbeddingEngine]]:
    """Collect the engines of all lookups that note themselves in this context, in any copy."""
    found: list[EmbeddingEngine] = []
    token = _calls.set(found)
    try:
        yield found
    finally:
        _calls.reset(token)


class TableLayer(nnx.Module, EngineLayer):
    """A layer with an engine, whose state is in its variables."""

    tables: nnx.Dict
    slots: nnx.Dict
    step: Counter
    bad_ids: Counter
    overflows: Counter
    seen: Any = None
    tap: Any = None
    only: str | None = None
    """The name of its only feature, without which ids and activations are given; None: they have
    the structure of the features."""

    def begin(
        self, features: PyTree, optimizer: Any, rngs: nnx.Rngs, **options: Any
    ) -> None:
        """Make the engine, and the variables of its state.

        Args:
          features: the features of the engine.
          optimizer: of its tables that have none of their own.
          rngs: `params` initializes the rows.
          options: further arguments of `EmbeddingEngine`.

        Raises:
          ValueError: whatever `EmbeddingEngine` refuses; features in a container that is no pytree;
            a learning rate that is a callable without arguments.
        """
        self.engine = EmbeddingEngine(features, optimizer, **options)
        for one in jax.tree.leaves(features):
            check_type(
                "features",
                one,
                FeatureConfig,
                expected="containers that JAX knows as pytrees",
                remedy="jax.tree_util.register_dataclass, or use a dict",
                error=ValueError,
            )
        for stack in self.engine.layout.stacks:
            rule = stack.optimizer
            if rule and learning_rate_kind(rule.learning_rate) is LearningRateKind.HOST:
                refuse(
                    f"table {stack.tables[0].name!r}: learning_rate",
                    expected="a number, or a schedule of the step",
                    got="a callable without arguments",
                    remedy="give a schedule: inside a jit such a callable would be read once",
                )
        _engines[self.engine] = optimizer, {}
        for name, value in attributes(self.engine.init(rngs.params())).items():
            setattr(self, name, value)

    @property
    def state(self) -> TableState:
        """The state of the engine, whose arrays are physical."""
        return state_of(vars(self))

    @property
    def in_jit(self) -> bool:
        """Whether its tables are traced."""
        return any(isinstance(one, Tracer) for one in self.state.tables.values())

    @property
    def state_variables(self) -> list[Any]:
        """The variables that hold the state: `Table`s, `Slot`s, `Counter`s and `MapVersion`s."""
        return [value for _, value in nnx.iter_graph(self) if isinstance(value, STATE)]

    def set_state(self, state: TableState) -> None:
        """Replace the tables, slots, step and counters.

        Args:
          state: a state of this layer's engine.

        Raises:
          ValueError: the state is that of another engine. Nothing is replaced then.
        """
        check_state(state, self.engine.layout)
        nnx.update(self, nnx.state(nnx.Dict(attributes(state))))

    def place(
        self,
        ids: Any,
        weights: PyTree | None = None,
        *,
        spec: BatchSpec | None = None,
        training: bool = True,
    ) -> Batch:
        """Check ids on the host, send them to the devices, and admit the batch.

        Call it outside of a jit. If it raises, no map and no variable has changed.

        Args:
          ids: as for `EmbeddingEngine.place`, in the structure of the features; keys of dynamic
            vocabularies among them. For a layer of one table: integers or keys `[B]` or
            `[B, …, H]`, `SparseIds` or `RaggedIds`; or several of them by name, such as a history
            and its candidates, each with a B of its own: then the layer returns its activations by
            name, from one lookup. The number of devices divides B.
          weights: one weight per id, in the same structure; None: all ones.
          spec: the exact shape of the batch, or None.
          training: False for a batch that is only looked up; vocabularies learn nothing from it.

        Returns:
          a `Batch`, which the jitted step takes.

        Raises:
          ValueError, TypeError: whatever `EmbeddingEngine.place` and `admit` refuse.
        """
        engine = self.engine
        if self._are_named(ids):
            engine = engine_of_inputs(engine, ids)
            weights = (
                None if weights is None else {name: weights.get(name) for name in ids}
            )
        given, maps = (self.nest(ids), self.nest(weights), spec), engine.vocabularies
        if maps is None:
            return engine.place(*given, training=training)
        before = maps.placed
        batch = engine.place(*given, training=training)
        try:
            return self.admit(batch)
        except BaseException:
            if training and maps.admitted <= before < maps.placed:
                maps.undo(before)
            raise

    def admit(self, batch: Batch) -> Batch:
        """Bring the layer to the step of a placed batch; see `EmbeddingEngine.admit`.

        `place` does it itself. It is for batches that a `Prefetcher` has placed ahead.

        Args:
          batch: what a `Prefetcher` of the layer's engine gave.

        Returns:
          the admitted batch, which the jitted step takes.

        Raises:
          ValueError: whatever `EmbeddingEngine.admit` refuses. The layer stays as it is. After
            Ctrl-C in the middle of it, the layer's arrays may be gone: then every call refuses
            them, and a restore brings others.
        """
        maps = self.engine.vocabularies
        if maps is not None and batch.keys.is_training and batch.keys.steps is not None:
            # Of a clone that is left behind.
            maps.check_next(map_version(self.state), batch.keys)
        state, admitted = engine_of_batch(self.engine, batch).admit(self.state, batch)
        self.set_state(state)
        return admitted

    def bare(self, nest: Any) -> Any:
        """Return what is in the structure of the features as the layer's user gives it."""
        alone = isinstance(nest, dict) and [*nest] == [self.only]
        return nest[self.only] if alone else nest

    def nest(self, given: Any) -> Any:
        """Return what `bare` was given; names of inputs are a structure of their own."""
        plain = self.only is None or given is None or isinstance(given, Mapping)
        return given if plain else {self.only: given}

    def _are_named(self, ids: Any) -> bool:
        """Return whether ids are several inputs by name of a layer with one feature."""
        return self.only is not None and isinstance(ids, Mapping)

    def look_up(self, ids: Any, weights: Any) -> PyTree:
        """Return the activations of a batch, or of ids; those of inputs by name have these names.

        Args:
          ids: a placed batch, or ids in the structure of the features. Outside of a jit, other ids
            than arrays of integers are placed.
          weights: one weight per id likewise, or None.

        Raises:
          ValueError: keys, or a batch that is not admitted; weights of another shape, or no real
            numbers; whatever `EmbeddingEngine.lookup` refuses.
          TypeError: whatever `EmbeddingEngine.lookup` refuses.
        """
        engine = self.engine
        if not isinstance(ids, Batch) and engine.vocabularies is None:
            if not self._are_named(ids):
                given, scales = engine.structure.match_weighted(
                    self.nest(ids), self.nest(weights)
                )
                # A list of weights is a column, which is placed.
                if all(map(_is_dense, given)) and not any(
                    isinstance(x, list) for x in scales
                ):
                    for pair in zip(
                        scales, given, strict=True
                    ):  # before examples are added
                        check_weights("weights", *pair)
                    return self._look_up_arrays(ids, weights)
            ids, weights = self.place(ids, weights), None
        if not isinstance(ids, Batch) or not ids.admitted:
            refuse(
                f"table {', '.join(map(repr, engine.table_configs))}",
                expected="a Batch that was placed and admitted",
                got="one that is not admitted" if isinstance(ids, Batch) else "keys",
                remedy="outside the jit: batch = layer.place(keys, weights), or "
                "layer.admit(batch) after a Prefetcher; the jit takes the batch as an argument",
            )
        found = engine_of_batch(engine, ids).lookup(self._state_to_read(), ids, weights)
        return self._noted(ids, None, self.bare(found))

    def _look_up_arrays(self, features: PyTree, weights: PyTree) -> PyTree:
        """Return the activations of arrays of ids.

        The number of examples need not divide among the devices, but that of jagged features must.
        """
        state = self._state_to_read()
        # Outside of a jit ids are placed, also by the update of a training step.
        if self.in_jit and (self.seen is None or self.seen.get_metadata()["in_jit"]):
            features = jax.tree.map(_traced, features)
        structure, reshard = self.engine.structure, self.engine.layout.axes.reshard
        scales = self.padded(weights, 0)
        found = self.engine.lookup(state, self.padded(features, PADDING_ID), scales)
        both = (
            structure.match(x, what="features") for x in (found, self.nest(features))
        )
        # Replicate first: an explicit mesh axis cannot split a count that it does not divide.
        cut = [
            x
            if isinstance(x, Jagged) or len(x) == len(ids)
            else reshard(x, ())[: len(ids)]
            for x, ids in zip(*both, strict=True)
        ]
        return self._noted(features, weights, self.bare(structure.unflatten(cut)))

    def padded(self, given: PyTree, fill: int) -> PyTree:
        """Return arrays of each feature with examples added, until the replicas divide them.

        Those of jagged features stay as they are.

        Args:
          given: arrays `[B, …]`, or None, as `bare` returns them; or None.
          fill: what is in the examples that are added.

        Returns:
          arrays or None in the structure of the features.
        """
        replicas, structure = self.engine.layout.axes.replicas, self.engine.structure

        def pad(feature, x):
            if x is None or feature.jagged or not x.ndim:
                return x
            missing = -len(x) % replicas if len(x) else replicas
            if not missing:
                return x
            # No unsigned number is padding.
            x = as_signed(x) if x.dtype.kind == "u" else x
            xp: Any = np if isinstance(x, np.ndarray) else jnp
            widths = [(0, missing), *[(0, 0)] * (x.ndim - 1)]
            return xp.pad(x, widths, constant_values=fill)

        each = [None] * len(structure.features)
        if given is not None:
            each = structure.match(self.nest(given), what="features")
        return structure.unflatten(list(map(pad, structure.features, each)))

    def _state_to_read(self) -> TableState:
        if any(
            isinstance(x.get_raw_value(), jax.ShapeDtypeStruct)
            for x in _variables(self.tables).values()
        ):
            refuse(
                f"table {next(iter(self.engine.table_configs))!r}",
                expected="rows",
                got="their shape, as in a model that fit or nnx.eval_shape made",
                remedy="fit looks up itself: call the layer with what the loss gets in place "
                "of ids",
            )
        trainable = any(one.trainable for one in self.engine.table_configs.values())
        # `fused_value_and_grad` and `sparse_value_and_grad` differentiate what they have traced, so
        # a layer that they train is never called under differentiation.
        if trainable and _is_differentiated():
            warn_once(
                self.engine,
                "is looked up under differentiation, which does not train it; use "
                "tpu_embed.nn.fused_value_and_grad in place of nnx.value_and_grad",
            )
        if self.seen is None:
            return self.state
        # So that whatever else is computed from a table can be told from its lookups.
        return dataclasses.replace(
            self.state, tables=jax.lax.stop_gradient(self.state.tables)
        )

    def _noted(self, ids: Any, weights: Any, found: PyTree) -> PyTree:
        """Return activations; during a training step the lookup is noted, and they have taps."""
        calls = _calls.get()
        if self.seen is None or calls is None:
            return found
        so_far = self.seen.get_raw_value()
        values, rebuild = split_activations(found)
        if self.tap is None:  # what shape the tap is to have
            note = values
        else:
            note = _after(ids, values), weights
            values = jax.tree.map(tapped, values, self.tap.get_raw_value()[len(so_far)])
        calls.append(self.engine)
        try:
            self.seen.set_value((*so_far, note))
        except TraceContextError as error:
            raise not_found(self.seen.get_metadata()["layer"]) from error
        return rebuild(values)


def path_of(keys: Sequence[Any]) -> str:
    """Return the keys joined by slashes."""
    return "/".join(map(str, keys))


def not_found(path: str) -> ValueError:
    """Return the error of a lookup that a training step cannot find.

    Args:
      path: of the layer in its model.
    """
    return ValueError(
        message(
            f"layer {path!r}",
            expected="lookups in plain code, nnx.jit or nnx.remat",
            got="one whose gradient is not found",
            remedy="look up before jax.jit, jax.checkpoint, scan, vmap, cond, while, shard_map, a "
            "derivative or a custom rule inside the loss, in the model itself and in no copy of "
            "it, and hand the activations on",
        )
    )


def _after(ids: Any, values: PyTree) -> Any:
    """Return ids that depend on their activations, so that an update waits for the lookup."""
    found = jax.tree.leaves(values)
    if isinstance(ids, Batch):
        return map_ids(functools.partial(functools.reduce, known_after, found), ids)
    each = iter(found)
    return map_ids(lambda leaf: known_after(leaf, next(each)), ids)


def map_ids(function: Callable[[Array], Array], ids: Any) -> Any:
    """Return ids with a function applied to the array of each feature, or to that of a batch."""
    if isinstance(ids, Batch):
        return dataclasses.replace(ids, packed=function(ids.packed))
    return jax.tree.map(function, ids)


# -- ids of arrays ---------------------------------------------------------------------------------


def _is_dense(ids: Any) -> bool:
    """Tell whether ids are an array of integers that a program can take as it is."""
    if type(ids) is np.ndarray:
        return ids.dtype.kind in "iu" and ids.dtype.isnative
    return isinstance(ids, jax.Array)


def as_signed(ids: Any) -> Array:
    """Return integers as int32, or as int64 if their dtype needs it and x64 is on.

    A number too large for the result's dtype becomes the largest one, which is no row of any table.

    Args:
      ids: integers of any dtype. NumPy arrays are clipped before JAX could wrap them around.
    """
    # Bits without the sign: int32 has 31 and fits; uint32 has 32 and needs int64, as int64 does.
    wide = ids.dtype.itemsize * 8 - (np.dtype(ids.dtype).kind == "i") > 31
    return narrow_ids(
        ids, jax.dtypes.canonicalize_dtype(np.int64) if wide else np.int32
    )


def _traced(ids: Any) -> Array:
    """Return ids inside a program as a part of it, also if their values are known."""
    return (
        ids if isinstance(ids, Tracer) else jax.lax.optimization_barrier(as_signed(ids))
    )


# -- updates ---------------------------------------------------------------------------------------


def updated(layer: TableLayer, lookups: Sequence[Any]) -> TableState:
    """Return the state of a layer after one step, with the gradients of all its lookups.

    Several lookups of ids are one batch of an engine that has each feature several times; the
    gradients of a row are summed lookup after lookup.

    Args:
      layer: the layer.
      lookups: at least one, each with `ids`, `weights` and `gradient`. A placed batch must be the
        only one.

    Raises:
      ValueError: a placed batch is not the only lookup; whatever `EmbeddingEngine.update` refuses.
    """
    own, (first, *others) = layer.engine, lookups
    if not any(isinstance(one.ids, Batch) for one in lookups):
        each = [
            (
                layer.padded(one.ids, PADDING_ID),
                layer.padded(_not_differentiable(one.gradient), 0),
                layer.padded(one.weights, 0),
            )
            for one in lookups
        ]
        if not others:
            return own.update(layer.state, *each[0])
        engine = _engine_of(own, len(each), [own.structure.nest] * len(each))
        given = map(list, zip(*each, strict=True))
    elif others:
        refuse(
            f"table {next(iter(own.table_configs))!r}",
            expected="a placed batch as the only lookup of a step",
            got=f"{len(others) + 1} lookups",
            remedy='place them together, layer.place({"history": …, "item": …}), join the '
            "ids in one batch, or look dense ids up",
        )
    else:
        engine = engine_of_batch(own, first.ids)
        given = first.ids, layer.nest(_not_differentiable(first.gradient))
        if engine is own:
            return own.update(layer.state, *given)
    # The other features have bad ids of their own: [lookups · F], or of one feature as inputs.
    counters = layer.state.counters
    zeros = jnp.zeros(len(engine.layout.features), jnp.int32)
    state = dataclasses.replace(layer.state, counters={**counters, "bad_ids": zeros})
    new, before = engine.update(state, *given), counters["bad_ids"]
    bad_ids = new.counters["bad_ids"].reshape(-1, before.size).sum(0, dtype=jnp.int32)
    return dataclasses.replace(
        new, counters={**new.counters, "bad_ids": before + bad_ids}
    )


_not_differentiable = refuse_derivatives(
    "update of a layer's table",
    expected="a step that is not differentiated",
    got="a gradient through it",
    remedy="differentiate sparse_value_and_grad, and apply the tables' gradients after it",
)


# -- engines of the same tables with other features ------------------------------------------------

_engines: weakref.WeakKeyDictionary[
    EmbeddingEngine, tuple[Any, dict[Any, EmbeddingEngine]]
]
_engines = weakref.WeakKeyDictionary()
"""By the engine of a layer: its optimizer, and engines with other features, by a key of these."""


def _engine_of(own: EmbeddingEngine, key: Any, features: Any) -> EmbeddingEngine:
    """Return the engine of other features of the same tables; it is made once for each key."""
    optimizer, made = _engines[own]
    if key not in made:
        axes = own.layout.axes
        made[key] = EmbeddingEngine(
            features,
            optimizer,
            mesh=axes.mesh,
            batch_axes=axes.batch_axes,
            sum_blocks=own.layout.sum_blocks,
            vocabularies=own.vocabularies,
        )
    return made[key]


def engine_of_inputs(
    own: EmbeddingEngine, inputs: Mapping[str, Any]
) -> EmbeddingEngine:
    """Return the engine for inputs by name of a layer that has one feature.

    Args:
      own: the engine of the layer.
      inputs: the ids of each input. One id per example, `[B]`, is looked up as it is, whatever the
        layer makes of bags; anything else as the layer's own ids.

    Raises:
      ValueError: there are no inputs, or a name is not a string.
    """
    if not inputs or not all(isinstance(name, str) for name in inputs):
        refuse("ids", expected="ids by name, a string", got=f"{list(inputs)}")
    config = own.layout.features[0].config
    single = dataclasses.replace(
        config, jagged=False, max_sequence_length=0, keep="first"
    )
    given = {name: read_ids(f"ids {name!r}", inputs[name]) for name in sorted(inputs)}
    kinds = tuple(
        (k, isinstance(x, np.ndarray) and x.ndim == 1) for k, x in given.items()
    )
    return _engine_of(
        own, kinds, {name: single if one else config for name, one in kinds}
    )


def engine_of_batch(own: EmbeddingEngine, batch: Batch) -> EmbeddingEngine:
    """Return the engine that placed a batch: a layer's own, or one for inputs by name."""
    for one in (own, *_engines[own][1].values()):
        if batch.placed_for in (
            one.layout.placed_for(updates=u) for u in (False, True)
        ):
            return one
    return own  # which refuses it


# -- warnings about tables that look as if they were trained and are not ---------------------------

_warned: weakref.WeakSet[EmbeddingEngine] = weakref.WeakSet()
"""The engines of layers that have had their warning."""


def warn_once(engine: EmbeddingEngine, what: str) -> None:
    """Warn about the tables of a layer, the first time that something happens to it.

    Args:
      engine: the engine of the layer.
      what: what has happened.
    """
    if engine not in _warned:
        _warned.add(engine)
        sizes = (
            f"{n!r} [{t.vocabulary_size}, {t.dim}]"
            for n, t in engine.table_configs.items()
        )
        warn_user(f"table {', '.join(sizes)} of a layer {what}")


def _is_differentiated() -> bool:
    """Return whether the current trace, or one around it, is that of a derivative."""
    trace = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, (JVPTrace, LinearizeTrace)):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None
