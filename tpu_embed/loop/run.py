"""What a training run is between two steps, how it is saved, and how it goes on from there.

A run is what was trained together with where the data stood. The two change together, in one call
that nothing can cut. So the checkpoint of a run that ended between two steps continues with the
next batch. In the middle of a step, where the arrays were given away, a run cannot be saved.

Input: placed batches. Output: a run one step further; checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from tpu_embed._checks import message, refuse
from tpu_embed._stop import Stop
from tpu_embed._types import PyTree, snapshot
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, check_own
from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager
from tpu_embed.io.checkpoint import MODEL, TOUCHED, MismatchError
from tpu_embed.loop.reports import Losses, Record
from tpu_embed.loop.step import Network, take_apart
from tpu_embed.processes import raise_on_all
from tpu_embed.touched import TouchedRows

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FORMAT = 1
"""Of the position in a checkpoint: {"fit": FORMAT, "step": …, "data": `Prefetcher.get_state`}.

If the run was ended, it has "ended": [the `steps` of the call], too; and "best": the `Record` of
its evaluations, if they are compared.
"""

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
      steps: how many batches the whole run has, or None.
      position: of the data after the last of these batches; None before the first.
      losses: of the last steps.
      is_whole: False if a batch was admitted to the tables, but not trained on.
      ended: whether a callback has ended the run, or the patience for evaluations.
      best: the record of its evaluations; {} if they are not compared.
      touched: the record of touched rows, or None.
      first: `state.step` before the first of these batches.
    """

    engine: EmbeddingEngine
    step: int
    carry: tuple[Any, Network, PyTree]
    steps: int | None
    losses: Losses
    position: Any = None
    is_whole: bool = True
    ended: bool = False
    best: Record = dataclasses.field(default_factory=dict)
    touched: TouchedRows | None = None
    first: int = 0

    @property
    def state(self) -> TableState:
        """Tables and slots."""
        return self.carry[0]

    @property
    def network(self) -> Network:
        """The arrays of the model."""
        return self.carry[1]

    @property
    def left(self) -> int | None:
        """How many steps are left; None if the source decides."""
        return (
            0 if self.ended else None if self.steps is None else self.steps - self.step
        )

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None before there is one."""
        return self.best.get("report", {}).get("step")

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
        self.note_first()

    def note_first(self) -> None:
        """Note which of the state's updates are this run's."""
        self.first = int(self.state.step) - self.step

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
          FloatingPointError: the loss of an earlier step is not finite.
        """
        batch, rest = take_apart(self.engine, item)
        step, rates = train_step(batch, rest, self.step), self.engine.learning_rates()
        state, batch = self.engine.admit(self.state, batch)
        # `update` is one call of C, which no exception of a signal handler cuts in two.
        vars(self).update(carry=(state, *self.carry[1:]), is_whole=state is self.state)
        if self.touched is not None:
            self.touched.record(batch, self.first + self.step + 1)
        carry, found = step(self.carry, batch, rates=rates)
        vars(self).update(
            carry=carry, step=self.step + 1, position=position(), is_whole=True
        )
        self.losses.add(self.step, found[0])
        return found

    def check_begun(self) -> None:
        """Check that the run has been trained on something, now or before it was restored.

        Raises:
          ValueError: the source had no batch.
        """
        if not self.step:
            refuse(
                "fit: source",
                expected="at least one batch",
                got="none",
                remedy="an iterator that was read has no more: give a new one",
            )

    def forget_placed(self) -> None:
        """Take dynamic vocabularies back to the state: batches placed beyond it will not come."""
        if self.engine.vocabularies is not None:
            self.engine.vocabularies.rewind(self.state)

    def can_be_saved(self) -> bool:
        """Tell whether the run stands between two steps, and its arrays are there.

        A program that failed on the devices has taken the arrays that it was given.
        """
        gone = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.carry))
        return self.is_whole and not gone and self.step > 0


def new_run(
    engine: EmbeddingEngine,
    network: Network,
    optimizer: optax.GradientTransformation,
    steps: int | None,
    losses: Losses,
    touched: TouchedRows | None = None,
) -> Run:
    """Return a run that has no tables yet: `begin` makes them, or `Keeper.resume` reads them.

    The arrays of the network are copied, because steps take the memory of what they are given.
    Those that are on all devices of the engine already keep their shardings; the others go to
    every device.
    """
    everywhere = engine.layout.axes.sharding(())

    def placed(leaf):
        if not isinstance(leaf, jax.Array):
            return jax.device_put(snapshot(leaf), everywhere, may_alias=False)
        spread = leaf.sharding.device_set == everywhere.device_set
        # `may_alias=False` shares the memory of an array that is on one of the devices already.
        return jax.device_put(leaf.copy(), leaf.sharding if spread else everywhere)

    network = jax.tree.map(placed, network)
    opt_state = jax.tree.map(placed, optimizer.init(network.trained))
    return Run(engine, 0, (None, network, opt_state), steps, losses, touched=touched)


class Keeper:
    """The checkpoints of a run, in a directory to which no other run writes meanwhile.

    Args:
      directory: of the checkpoints.
      engine: of the tables.
      stop: tells whether the run has to end at once.
      every: save at multiples of this step.
      keep: how many of the latest checkpoints to keep; None keeps all.

    Attributes:
      directory: see above.

    Raises:
      RuntimeError: another run on this machine writes to the directory.
      ValueError: whatever the manager refuses.
    """

    def __init__(
        self,
        directory: str | Path,
        engine: EmbeddingEngine,
        stop: Stop,
        *,
        every: int,
        keep: int | None,
    ) -> None:
        self.directory, self._stop, self._every = directory, stop, every
        self._manager = CheckpointManager(directory, engine, keep=keep)
        try:
            self._lock = raise_on_all(
                "fit", directory, functools.partial(_lock, directory)
            )
        except BaseException:
            self._manager.close()
            raise

    def resume(self, run: Run, placed: Prefetcher) -> bool:
        """Give a new run, and its source, what the latest checkpoint holds; False: there is none.

        Args:
          run: new.
          placed: the source.

        Raises:
          ValueError: the checkpoint has more steps than the run is to have, or is not one of `fit`;
            or whatever `restore` refuses.
        """
        latest = raise_on_all("fit", self.directory, self._manager.latest_step)
        if latest is None:
            return False
        if run.steps is not None and run.steps < latest:
            refuse(
                "fit: steps",
                expected=f"at least {latest}, as the latest checkpoint in {self.directory} has",
                got=f"{run.steps}",
                remedy="give more steps, or another directory for another run",
            )
        model = _saved_model(run)
        saved = f"{self.directory}/{latest}"
        if model is None and self._manager.has(
            latest, MODEL
        ):  # the next one would not have it
            refuse(
                "fit: model",
                expected=f"one, as it is in {saved}",
                got="None",
                remedy="give the model and its optimizer as before, or another directory",
            )
        try:
            position, carry = self._restored(run, latest)
        except (ValueError, FileNotFoundError) as error:
            if isinstance(error, MismatchError):
                error.advise(_REMEDY)
            error.add_note("fit: to begin a new run instead, name another directory.")
            raise
        if not isinstance(position, dict) or position.get("fit") != FORMAT:
            refuse(
                f"fit: directory {self.directory}",
                expected="checkpoints that fit has written",
                got=f"one with position {position!r}",
                remedy="give another directory",
            )
        run.carry, run.step, run.position = carry, position["step"], position["data"]
        run.note_first()
        run.best = position.get("best", {})
        steps = raise_on_all("fit", self.directory, self._manager.all_steps)
        if run.best_step not in (None, *steps):
            run.best = {}  # somebody has removed that checkpoint
        run.ended = position.get("ended") == [run.steps]
        if run.left != 0:  # else nothing is left to read
            placed.set_state(run.position)
        return True

    def take_best(self, run: Run) -> None:
        """Give a run what the checkpoint of its best evaluation holds, in the memory of its own.

        Raises:
          Exception: whatever the manager raises.
        """
        run.is_whole = False
        for leaf in jax.tree.leaves(run.state):
            leaf.delete()
        assert run.best_step is not None
        run.carry = self._restored(run, run.best_step)[1]

    def _restored(self, run: Run, step: int) -> tuple[Any, tuple[Any, Network, PyTree]]:
        """Return the position and the carry in a checkpoint; take its record of touched rows."""
        has_record = run.touched is not None and self._manager.has(step, TOUCHED)
        touched = run.touched if has_record else None
        found = self._manager.restore(step, model=_saved_model(run), touched=touched)
        if run.touched is not None and not has_record:
            run.touched.begin(found.state)
        model = found.model or {
            "network": tuple(run.network),
            "optimizer": run.carry[2],
        }
        return found.position, (
            found.state,
            Network(*model["network"]),
            model["optimizer"],
        )

    def save(self, run: Run, *, force: bool = False) -> None:
        """Save a run if it is due and has begun, also where its evaluation is the best one.

        Args:
          run: to be saved; it may be trained on at once.
          force: whether to save it whatever its step is.

        Raises:
          FloatingPointError: a loss is not finite.
          Exception: whatever the manager raises.
        """
        due = force or run.step % self._every == 0 or run.step == run.best_step
        if not run.step or not due:
            return
        run.losses.check()
        position = {"fit": FORMAT, "step": run.step, "data": run.position}
        if run.ended:
            position["ended"] = [run.steps]
        if run.best:
            position["best"] = run.best
        self._manager.pin(run.best_step)
        model = _saved_model(run)
        options = {"model": model, "position": position, "touched": run.touched}
        self._manager.save(run.step, run.state, **options, force=True)

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
            if second is not error:  # a loss that is not finite
                error.add_note(f"fit: step {run.step} could not be saved: {second}")
        try:
            last = self._manager.latest_step()
        except (OSError, ValueError) as second:
            error.add_note(
                f"fit: {self.directory} does not tell its checkpoints: {second}"
            )
            return
        if last is None:
            error.add_note(f"fit: there is no checkpoint in {self.directory}.")
        else:
            error.add_note(
                f"fit: {self.directory} has step {last}; the same call goes on from it."
            )

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the save that is under way; in haste, a thread waits for it."""
        if self._stop.at_once:
            threading.Thread(target=self._close, name="tpu_embed save").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self._manager.close()
        finally:
            _unlock(self._lock)


_locks: set[int] = set()
"""Descriptors of the directories that runs of this process write to."""


def _lock(directory: str | Path) -> int | None:
    """Keep other runs on this machine from writing to a directory, until `_unlock` or our end.

    The system's lock of the directory itself leaves nothing behind when a process is killed. File
    systems without such locks have none: None is returned then, as in all processes but the first.

    Raises:
      RuntimeError: another run has it.
    """
    in_bucket = "://" in os.fspath(directory)  # where a commit tells one of two writers
    if in_bucket or fcntl is None or jax.process_index():
        return None
    _leave_locks_to_parents()
    opened = os.open(directory, os.O_RDONLY)
    _locks.add(opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _unlock(opened)
        if not isinstance(error, BlockingIOError):
            return None
        expected, got = "no other run that writes there", "one that has not ended"
        what, remedy = (
            f"fit: directory {directory}",
            "wait for its end, or give another directory",
        )
        raise RuntimeError(
            message(what, expected=expected, got=got, remedy=remedy)
        ) from None
    return opened


def _unlock(opened: int | None) -> None:
    if opened in _locks:
        _locks.remove(opened)
        os.close(opened)


@functools.cache
def _leave_locks_to_parents() -> None:
    """Have forks, such as workers that read data, close the locks, which would outlive this run."""
    os.register_at_fork(after_in_child=lambda: [*map(_unlock, tuple(_locks))])


def _saved_model(run: Run) -> PyTree:
    """Return what is saved beside the tables; None if there is nothing."""
    model = {"network": tuple(run.network), "optimizer": run.carry[2]}
    return model if jax.tree.leaves(model) else None
