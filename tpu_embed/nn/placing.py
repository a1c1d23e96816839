"""Place a batch for all layers of a model in one call, and admit it, so that keys get their rows.

A layer whose vocabulary lives looks up batches, not keys: the map from keys to rows is on the host.
Placing gives keys their rows there, and may run ahead, as a `Prefetcher` does. Admitting brings the
layers' tables to the step of the batch, just before the jitted step takes it. With several
processes, all make these calls in the same order, each with its part of the batch (`agreement.py`).

Input: a model, and keys or ids by the path of their layer. Output: batches by the same paths.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import jax
from flax import nnx

from tpu_embed._checks import message
from tpu_embed._signals import SignalsDeferred
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.nn.agreement import Alone, ModelAgreement, agreement_of
from tpu_embed.nn.embedding import Embed, EmbeddingBag
from tpu_embed.nn.inputs import inputs_of
from tpu_embed.nn.pinned_steps import PinnedSteps
from tpu_embed.nn.program import path_of
from tpu_embed.nn.shapes import ModelIntake
from tpu_embed.processes import Turns
from tpu_embed.sparse import engine_of_batch, engine_of_inputs
from tpu_embed.vocabulary import Vocabularies, map_version

_turns: weakref.WeakKeyDictionary[EmbeddingEngine, Turns] = weakref.WeakKeyDictionary()
"""The order in which batches of a model are placed, by the engine of its first layer of keys."""


def place(model: nnx.Module, features: Any, weights: Any = None, *, training: bool = True) -> Any:
    """Place one batch for the layers of a model and admit it; the jitted step takes the result.

    Call it outside of a jit. If it raises, no map and no variable of the model has changed.

    Args:
      model: a module with layers; or one layer.
      features: by the path of a layer (its keys joined by slashes, such as `films` or
        `user/tags`), what its `place` takes. For one layer, what its `place` takes.
      weights: one weight per id, by path as well; a path that is absent has none.
      training: False for a batch that is only looked up; living vocabularies learn nothing from it.

    Returns:
      a `Batch` by path; for one layer, its `Batch`.

    Raises:
      ValueError: a path without a layer, a layer under two paths, whatever `EmbeddingEngine.place`
        and `EmbeddingEngine.admit` refuse, in any process; processes that name other layers.
      TypeError: features of a model that are not given by path; ids that are not integers.

    Example:
      >>> import numpy as np, tpu_embed
      >>> rule, keys = tpu_embed.optimizers.SGD(1.0), tpu_embed.DynamicVocabulary()
      >>> films = Embed(100, 2, optimizer=rule, vocabulary=keys, rngs=nnx.Rngs(0))
      >>> model = nnx.Dict(films=films)
      >>> batches = place(model, {"films": np.arange(10**12, 10**12 + 8)})
      >>> model.films(batches["films"]).shape, len(films.rows.engine.vocabularies)
      ((8, 2), 8)
    """
    placer = ModelPlacer(model)
    turn = ModelTurn(placer, training=training)
    with _in_turn(turn), placer.undone_if_refused(training=training):
        return admit(model, placer.place_now(features, weights, training=training))


def admit(model: nnx.Module, batches: Any) -> Any:
    """Bring the layers' tables to the step of placed batches; see `EmbeddingEngine.admit`.

    `place` does it itself. It is for batches that a `Prefetcher` has placed ahead.

    Args:
      model: the module or layer that they were placed for.
      batches: what the `Prefetcher` gave: a `Batch` by path, or the `Batch` of one layer.

    Returns:
      the admitted batches, in the same form.

    Raises:
      ValueError: they are not the next ones, or are only looked up and a row belongs to another key
        by now. The model stays as it is.
      TypeError: batches of a model that are not given by path.
    """
    layers = _layers(model)
    by_path = _by_path(model, batches, "batches")
    bags = {path: _bag(layer) for path, layer in _named(layers, by_path).items()}
    for path, bag in bags.items():  # before the first is admitted
        maps, batch = bag.engine.vocabularies, by_path[path]
        if maps is not None and batch.keys.is_training and batch.keys.steps is not None:
            maps.check_next(map_version(bag.state), batch.keys)
    found = {}
    # A layer's arrays are gone until the new ones are set; and an interrupt between two layers
    # would leave their tables at different steps.
    with SignalsDeferred():
        for path, bag in bags.items():
            state, found[path] = _admit(bag, by_path[path])
            bag.set_state(state)
    return found[""] if isinstance(model, Embed | EmbeddingBag) else found


@final
class ModelPlacer:
    """Places batches for all layers of a model: what a `Prefetcher` takes in place of an engine.

    Models that share a layer are to be placed by one thread at a time.

    With several processes, each makes one of the same model. A batch that is only looked up has the
    rows of the batches that were admitted when the loop asked for it, the same in all processes.

    Args:
      model: a module with layers, or one layer.

    Example:
      >>> import numpy as np, tpu_embed
      >>> rule, keys = tpu_embed.optimizers.SGD(1.0), tpu_embed.DynamicVocabulary()
      >>> films = Embed(100, 2, optimizer=rule, vocabulary=keys, rngs=nnx.Rngs(0))
      >>> source = (np.arange(8) + 10**12 + number for number in range(3))
      >>> with tpu_embed.data.Prefetcher(ModelPlacer(films), source) as placed:
      ...     for batch in placed:
      ...         print(films(admit(films, batch)).shape)
      (8, 2)
      (8, 2)
      (8, 2)
    """

    def __init__(self, model: nnx.Module) -> None:
        self._model, self._layers = model, _layers(model)
        engines = {path: _bag(layer).engine for path, layer in self._layers.items()}
        self.intake = ModelIntake(engines)
        living = [one for one in engines.values() if one.vocabularies is not None]
        self._living = list(dict.fromkeys(living))
        self.agreement: Alone | ModelAgreement
        if jax.process_count() > 1:
            self.agreement = agreement_of(engines)
        else:
            turns = Turns(with_others=False)
            self.agreement = Alone(_turns.setdefault(living[0], turns) if living else turns)

    def place(
        self, features: Any, weights: Any = None, spec: None = None, *, training: bool = True
    ) -> Any:
        """Place one batch for the layers, without admitting it; see `tpu_embed.nn.place`."""
        return self.next_turn(training=training).place(features, weights, spec)

    def next_turn(self, *, training: bool = True) -> ModelTurn:
        """Return the right to place the next batch, which any thread may use."""
        return ModelTurn(self, training=training)

    def pin_steps(self, *, training: bool) -> PinnedSteps:
        """Return the steps of the maps that a batch which is placed later is to have.

        Args:
          training: whether it is a training batch, which has a step of its own.
        """
        # In one process a lookup has the rows of the step at which it is placed.
        pins = not training and not self.agreement.alone
        return PinnedSteps([e.vocabularies for e in self._living if pins and e.vocabularies])

    def place_now(
        self,
        features: Any,
        weights: Any,
        *,
        training: bool,
        steps: Mapping[Vocabularies, int] = MappingProxyType({}),
    ) -> Any:
        """Place one batch for the layers, without waiting for a turn.

        Args:
          features: see `tpu_embed.nn.place`.
          weights: likewise.
          training: likewise.
          steps: of maps, whose rows a batch that is only looked up gets; of others those of the
            step that is admitted now.
        """
        found = {}
        with self.undone_if_refused(training=training):
            with self.agreement.refusals():
                parts = self._parts(features, weights)
            self.agreement.settle([*parts])
            for path, (ids, scale) in parts.items():
                own = _bag(self._layers[path]).engine
                engine, inputs, scales = inputs_of(own, ids, scale)
                as_of = None if engine.vocabularies is None else steps.get(engine.vocabularies)
                turn = engine.next_turn(training=training)
                found[path] = turn.place(inputs, scales, as_of=as_of)
        return found[""] if isinstance(self._model, Embed | EmbeddingBag) else found

    def _parts(self, features: Any, weights: Any) -> dict[str, tuple[Any, Any]]:
        """Return ids and weights by path, in the order of the layers, as `EmbeddingBag` takes them.

        With several processes, what can be refused of one process's part alone is refused here.
        """
        by_path = _by_path(self._model, features, "features")
        scales = {} if weights is None else _by_path(self._model, weights, "weights")
        _named(self._layers, scales)
        named, parts = _named(self._layers, by_path), {}
        for path in (path for path in self._layers if path in named):
            layer, ids, scale = named[path], by_path[path], scales.get(path)
            if isinstance(layer, Embed):
                if scale is not None:
                    expected, remedy = "none for an Embed", "use an EmbeddingBag"
                    what = f"weights of layer {path!r}"
                    raise ValueError(message(what, expected=expected, got="some", remedy=remedy))
                ids = layer.bags_of(ids)
            elif isinstance(ids, Mapping):
                engine_of_inputs(layer.engine, ids)  # refuses inputs without names
            parts[path] = ids, scale
        return parts

    @contextlib.contextmanager
    def undone_if_refused(self, *, training: bool) -> Iterator[None]:
        """Let every map forget what it learns in the block if the block raises.

        Args:
          training: whether the block places a training batch. If not, it has no turn: what the maps
            learn meanwhile is a batch that another thread places.
        """
        maps = [e.vocabularies for e in self._living if training and e.vocabularies is not None]
        before = [(one, one.placed) for one in maps]
        try:
            yield
        except BaseException:
            for one, step in before:
                if one.admitted <= step < one.placed:
                    one.undo(step)
            raise


@final
class ModelTurn:
    """The right to place one batch for a model, after those whose turns were drawn before.

    Args:
      placer: places the batch.
      training: False for a batch that is only looked up, which waits for no other in one process.

    Attributes:
      shapes: as those of a turn of an engine, by layer.
    """

    def __init__(self, placer: ModelPlacer, *, training: bool) -> None:
        self.shapes: Any = None
        self._placer, self.training = placer, training
        self._agreement, self._turns = placer.agreement, placer.agreement.turns
        with SignalsDeferred():
            self._number = self._turns.draw()
            if not self._waits:
                self._turns.release(self._number)
            self._pinned = placer.pin_steps(training=training)
            given_up = functools.partial(_give_up, self._turns, self._number, self._pinned)
            weakref.finalize(self, given_up).atexit = False

    @property
    def _waits(self) -> bool:
        return self.training or not self._agreement.alone

    def place(self, features: Any, weights: Any = None, spec: None = None) -> Any:
        """Place a batch; see `tpu_embed.nn.place`.

        Raises:
          ValueError: there is a spec, which is that of one engine; whatever `place` refuses.
        """
        with _in_turn(self):
            if spec is not None:
                remedy = "leave it out: every layer finds a shape of its own"
                text = message("spec", expected="None for a model", got="one", remedy=remedy)
                raise ValueError(text)
            steps, training = self._pinned.steps, self.training
            found = self._placer.place_now(features, weights, training=training, steps=steps)
            self.shapes = self._placer.intake.shapes()
            return found

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Wait for the turn, and end it with the block."""
        return self._turns.use(self._number) if self._waits else contextlib.nullcontext()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use the turn before the block ends; see `Turns.hold`."""
        return self._turns.hold(self._number)

    def refuse(self, error: BaseException) -> None:
        """Place nothing because of an error; the other processes raise it."""
        with self._left_out():
            self._agreement.refuse(error)

    def end(self) -> None:
        """Place nothing because there are no more batches.

        Raises:
          ValueError: another process has one.
        """
        with self._left_out():
            self._agreement.end()

    @contextlib.contextmanager
    def _left_out(self) -> Iterator[None]:
        """Wait for the turn if other processes are to be told that nothing is placed in it."""
        if self._agreement.alone:
            self.release()
            yield
        else:
            with _in_turn(self):
                yield

    def release(self) -> None:
        """Place nothing, and tell the other processes nothing; they must release the turn too."""
        self._turns.release(self._number)
        self._pinned.free()

    def give_up(self) -> None:
        """End the turn if something has kept it from being used."""
        _give_up(self._turns, self._number, self._pinned)


def _give_up(turns: Turns, number: int, pinned: PinnedSteps) -> None:
    turns.give_up(number)
    pinned.free()


@contextlib.contextmanager
def _in_turn(turn: ModelTurn) -> Iterator[None]:
    try:
        with turn.use():
            yield
    finally:
        turn.give_up()  # an interrupt may have come before it was used


def _admit(bag: EmbeddingBag, batch: Batch) -> tuple[Any, Batch]:
    """Return the state and the batch that the engine of a batch admits; inputs by name have one."""
    return engine_of_batch(bag.engine, batch).admit(bag.state, batch)


def _layers(model: nnx.Module) -> dict[str, Embed | EmbeddingBag]:
    """Return the layers of a model by path; an `Embed` and the layer inside it are two of them."""
    if isinstance(model, Embed | EmbeddingBag):
        return {"": model}
    found = {path_of(keys): node for keys, node in nnx.iter_graph(model)}
    return {path: one for path, one in found.items() if isinstance(one, Embed | EmbeddingBag)}


def _bag(layer: Embed | EmbeddingBag) -> EmbeddingBag:
    return layer.rows if isinstance(layer, Embed) else layer


def _by_path(model: nnx.Module, given: Any, what: str) -> dict[str, Any]:
    """Return what is given by path; for one layer, under the empty path.

    Raises:
      TypeError: it is no mapping.
    """
    if isinstance(model, Embed | EmbeddingBag):
        return {"": given}
    if not isinstance(given, Mapping):
        remedy, got = 'give {"films": keys}', type(given).__name__
        raise TypeError(message(what, expected="a dict by layer", got=got, remedy=remedy))
    return dict(given)


def _named(layers: Mapping[str, Any], by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers that are named, in the order of the names.

    Raises:
      ValueError: a path without a layer, or two paths of one layer.
    """
    found: dict[str, Any] = {}
    for path in by_path:
        again = path in layers and any(_bag(layers[path]) is _bag(one) for one in found.values())
        if path not in layers or again:
            got = f"{path!r}, a layer that has a path before" if again else f"{path!r}"
            expected, remedy = f"paths among {sorted(layers)}", "name each layer once"
            raise ValueError(message("features", expected=expected, got=got, remedy=remedy))
        found[path] = layers[path]
    return found
