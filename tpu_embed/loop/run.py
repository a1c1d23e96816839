"""What a training run is between two steps, how it is saved, and how it goes on from there.

A run is what was trained together with where the data stood. The two change together: a signal
such as Ctrl-C waits until the step that is under way has stored its results. So a run that is
interrupted anywhere is a whole one, and the checkpoint of it continues with the next batch.

Input: placed batches. Output: a run one step further; checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from tpu_embed._checks import message
from tpu_embed._signals import SignalsDeferred
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, check_own
from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager
from tpu_embed.io.checkpoint import MismatchError
from tpu_embed.loop.network import Network
from tpu_embed.loop.step import take_apart

FORMAT = 1
"""Of the position in a checkpoint: {"fit": FORMAT, "step": …, "data": `Prefetcher.get_state`}."""

_REMEDY = (
    "go on with what was saved, or change it by io.restore, which has arguments for this, and give "
    "its state= to a run in another directory"
)
"""Of a checkpoint that does not fit: `fit` itself has no such arguments."""


@dataclasses.dataclass
class Run:
    """A training run between two steps.

    Attributes:
      engine: of the tables.
      step: how many batches it was trained on.
      carry: `(state, network, opt_state)`, as a step takes them.
      position: of the data after the last of these batches; None before the first.
      is_whole: False if a batch was admitted to the tables, but not trained on.
    """

    engine: EmbeddingEngine
    step: int
    carry: tuple[Any, Network, PyTree]
    position: Any = None
    is_whole: bool = True

    @property
    def state(self) -> TableState:
        """Tables and slots."""
        return self.carry[0]

    @property
    def network(self) -> Network:
        """The arrays of the model."""
        return self.carry[1]

    def begin(self, state: TableState | None, seed: int) -> None:
        """Take a first state; None: that of the seed.

        Raises:
          TypeError: it is no state.
          ValueError: it is none of this engine, or one that was donated.
        """
        if state is None:
            state = self.engine.init(jax.random.key(seed))
        else:  # a step that takes donated arrays may end the whole process
            check_own(state, self.engine.layout)
        self.carry = state, *self.carry[1:]
        self.forget_placed()

    def train(
        self, train_step: Callable[..., Any], item: Any, position: Callable[[], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Train on an item of the source; return its loss and metrics, as device arrays.

        Args:
          train_step: what `make_train_step` returned.
          item: a placed batch, or a tuple that begins with one.
          position: returns the position of the data after the item.

        Raises:
          Exception: what `admit`, the loss or the update raises. Then this item was not trained on.
        """
        batch, rest = take_apart(self.engine, item)
        rates = self.engine.learning_rates()
        with SignalsDeferred():
            state, batch = self.engine.admit(self.state, batch)
            self.is_whole = state is self.state
            self.carry = state, *self.carry[1:]
            self.carry, found = train_step(self.carry, batch, rest, rates)
            self.step, self.position, self.is_whole = self.step + 1, position(), True
        return found

    def check_begun(self) -> None:
        """Check that the run has been trained on something, now or before it was restored.

        Raises:
          ValueError: the source had no batch.
        """
        if not self.step:
            remedy = "an iterator that was read has no more: give a new one"
            text = message("fit: source", expected="at least one batch", got="none", remedy=remedy)
            raise ValueError(text)

    def forget_placed(self) -> None:
        """Take living vocabularies back to the state: batches placed beyond it will not come."""
        if self.engine.vocabularies is not None:
            self.engine.vocabularies.rewind(self.state)

    def can_be_saved(self) -> bool:
        """Tell whether the run stands between two steps, and its arrays are there.

        A program that failed on the devices has taken the arrays that it was given.
        """
        gone = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.carry))
        return self.is_whole and not gone and self.step > 0


def new_run(
    engine: EmbeddingEngine, network: Network, optimizer: optax.GradientTransformation
) -> Run:
    """Return a run that has no tables yet: `begin` makes them, or `Keeper.resume` reads them.

    The arrays of the network are copied, because steps take the memory of what they are given.
    Those that are on all devices of the engine already keep their shardings; the others go to
    every device.
    """
    everywhere = engine.layout.axes.sharding(())

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, everywhere, may_alias=False)
        spread = leaf.sharding.device_set == everywhere.device_set
        # `may_alias=False` shares the memory of an array that is on one of the devices already.
        return jax.device_put(leaf.copy(), leaf.sharding if spread else everywhere)

    network = jax.tree.map(placed, network)
    opt_state = jax.tree.map(placed, optimizer.init(network.trained))
    return Run(engine, 0, (None, network, opt_state))


def make_keeper(
    directory: str | Path | None, engine: EmbeddingEngine, *, every: int, keep: int | None
) -> contextlib.AbstractContextManager[Keeper | None]:
    """Return the keeper of a run's checkpoints; without a directory, a context without one."""
    if directory is None:
        return contextlib.nullcontext()
    return Keeper(directory, engine, every=every, keep=keep)


class Keeper:
    """The checkpoints of a run.

    Args:
      directory: of the checkpoints.
      engine: of the tables.
      every: save at multiples of this step.
      keep: how many of the latest checkpoints to keep; None keeps all.
    """

    def __init__(
        self, directory: str | Path, engine: EmbeddingEngine, *, every: int, keep: int | None
    ) -> None:
        self._directory = directory
        self._manager = CheckpointManager(directory, engine, every=every, keep=keep)

    def resume(self, run: Run, placed: Prefetcher, steps: int | None) -> bool:
        """Give a new run, and its source, what the latest checkpoint holds; False: there is none.

        Args:
          run: new.
          placed: the source.
          steps: of the whole run, or None.

        Raises:
          ValueError: the checkpoint has more steps than the run is to have, or is not one of `fit`;
            or whatever `restore` refuses.
        """
        latest = self._manager.latest_step()
        if latest is None:
            return False
        if steps is not None and steps < latest:
            expected = f"at least {latest}, as the latest checkpoint in {self._directory} has"
            remedy = "give more steps, or another directory for another run"
            text = message("fit: steps", expected=expected, got=f"{steps}", remedy=remedy)
            raise ValueError(text)
        model = _saved_model(run)
        saved = Path(self._directory) / f"{latest}" / "model"
        if model is None and saved.is_dir():  # it would be left out of the next checkpoint
            remedy = "give the model and its optimizer as before, or another directory"
            expected = f"one, as it is in {saved}"
            raise ValueError(message("fit: model", expected=expected, got="None", remedy=remedy))
        try:
            found = self._manager.restore(model=model)
        except (ValueError, FileNotFoundError) as error:
            if isinstance(error, MismatchError):
                error.advise(_REMEDY)
            error.add_note("fit: to begin a new run instead, name another directory.")
            raise
        position = found.position
        if not isinstance(position, dict) or position.get("fit") != FORMAT:
            expected, got = "checkpoints that fit has written", f"one with position {position!r}"
            what, remedy = f"fit: directory {self._directory}", "give another directory"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        model = found.model or {"network": tuple(run.network), "optimizer": run.carry[2]}
        run.step, run.position = position["step"], position["data"]
        run.carry = found.state, Network(*model["network"]), model["optimizer"]
        if steps != latest:  # else nothing is left to read
            placed.set_state(run.position)
        return True

    def save(self, run: Run, *, force: bool = False) -> None:
        """Save a run if it is due and has begun.

        Args:
          run: to be saved; it may be trained on at once.
          force: whether to save it whatever its step is.

        Raises:
          Exception: whatever the manager raises.
        """
        if not run.step:
            return
        position = {"fit": FORMAT, "step": run.step, "data": run.position}
        model = _saved_model(run)
        self._manager.save(run.step, run.state, model=model, position=position, force=force)

    def rescue(self, run: Run, error: BaseException) -> None:
        """Save a run that an error has ended; notes on the error say what became of it.

        Several processes save together, so one that fails alone cannot: their last regular
        checkpoint stays the latest.
        """
        try:
            self._manager.wait()
            if run.can_be_saved() and jax.process_count() == 1:
                self.save(run, force=True)
                self._manager.wait()
        except Exception as second:
            error.add_note(f"fit: step {run.step} could not be saved: {second}")
        last = self._manager.latest_step()
        if last is None:
            error.add_note(f"fit: there is no checkpoint in {self._directory}.")
        else:
            error.add_note(
                f"fit: {self._directory} has step {last}; the same call goes on from it."
            )

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the save that is under way."""
        self._manager.close()


def _saved_model(run: Run) -> PyTree:
    """Return what is saved beside the tables; None if there is nothing."""
    model = {"network": tuple(run.network), "optimizer": run.carry[2]}
    return model if jax.tree.leaves(model) else None
