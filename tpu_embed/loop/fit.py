"""The loop: take a placed batch, train on it, and every so many steps report, evaluate and save.

A `Reporter` knows when reports are due, what is in them, and who gets them: a callback, and the
progress line. A run is evaluated on a second source, which is read from its beginning each time, or
as users do.

Input: an engine, a loss, a source of batches. Output: what was trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optax

from tpu_embed._checks import check_int, check_type, refuse
from tpu_embed._stop import Stop
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine, check_engine
from tpu_embed.core.state import TableState
from tpu_embed.data import Prefetcher
from tpu_embed.loop.reports import (
    Best,
    Losses,
    ProgressLine,
    Report,
    Window,
    check_best,
)
from tpu_embed.loop.run import Keeper, Run, new_run
from tpu_embed.loop.step import (
    Objective,
    Parts,
    check_optimizer,
    make_evaluation_step,
    make_train_step,
    split_model,
    take_apart,
)
from tpu_embed.nn import Embeddings
from tpu_embed.processes import gather_from_all
from tpu_embed.touched import TouchedRows, check_record


@dataclasses.dataclass
class Reporter:
    """Makes the reports of a run.

    Args:
      objective: makes the model of a report.
      evaluate: evaluates a run, which it is given with its report; or None.
      best: compares evaluations, or None.
      callback: gets every report, or None.
      steps: of the whole run, or None.
      report_every: how many steps lie between two reports.
      evaluate_every: how many steps lie between two evaluations, or None.
      line: shows the reports.

    Raises:
      TypeError: the callback is no function.
      ValueError: evaluations are due, and there is nothing to evaluate.
    """

    objective: Objective
    evaluate: Callable[[Run, Report], dict[str, float]] | None
    best: Best | None
    callback: Callable[[Report], Any] | None
    steps: int | None
    report_every: int
    evaluate_every: int | None
    line: ProgressLine

    def __post_init__(self) -> None:
        if self.callback is not None:
            check_type(
                "fit: callback",
                self.callback,
                Callable,
                expected="a function",
                remedy="it is called with each Report",
            )
        if self.evaluate_every is not None and self.evaluate is None:
            refuse(
                "fit: evaluate_every",
                expected="an evaluation beside it",
                got=f"{self.evaluate_every} alone",
                remedy="give evaluation=, a second source, or measure=, a function",
            )
        self._window = Window()
        self._last: Report | None = None

    def wants_end(self, run: Run, loss: Any, metrics: dict[str, Any]) -> bool:
        """Take in a step, and report if that is due; return whether the run ends with it.

        A callback ends it, or the patience for evaluations that are no better.
        """
        self._window.add(loss, metrics)
        every = self.evaluate_every
        evaluates = every is not None and run.step % every == 0
        if evaluates or run.step % self.report_every == 0:
            return self._report(run, evaluates=evaluates)[1]
        return False

    def finish(self, run: Run) -> Report:
        """Return the report of the last step; make it unless it was made."""
        last, evaluates = self._last, self.evaluate is not None
        if (
            last is None
            or last.step != run.step
            or (evaluates and last.evaluation is None)
        ):
            last, _ = self._report(run, evaluates=evaluates)
        return last

    def take_best(self, run: Run, keeper: Keeper, last: Report) -> Report:
        """Return the report of the best evaluation, with its state and model, or the last one."""
        if self.best is None or run.best_step in (None, run.step):
            return last
        keeper.take_best(run)
        again = {
            "state": run.state,
            "model": self.objective.model_of(run.network, run.state),
        }
        report = dataclasses.replace(
            last, steps_per_second=0, **run.best["report"], **again
        )
        self.line.show(f"the best: {report.line()}")
        return report

    def _report(self, run: Run, *, evaluates: bool) -> tuple[Report, bool]:
        """Report; return the report, and whether the run ends."""
        run.losses.check()
        (means, speed), last = self._window.close(), self._last
        idle = not means and last is None  # the run went on from its end
        if not means and last is not None:  # a second report of one step
            means = {"loss": last.loss, **last.metrics}
        report = Report(
            step=run.step,
            steps=self.steps,
            loss=means.pop("loss", float("nan")),
            metrics=means,
            evaluation=None,
            steps_per_second=speed,
            state=run.state,
            model=self.objective.model_of(run.network, run.state),
        )
        over = False
        if evaluates and self.evaluate is not None:
            report = dataclasses.replace(report, evaluation=self.evaluate(run, report))
            if self.best is not None:
                run.best = self.best.compare(run.best, report)
                over = self.best.is_over(run.best)
        self._last, self._window = report, Window()  # whose time begins now
        self.line.show(report.line(idle=idle))
        answer = None if self.callback is None else self.callback(report)
        return report, over or answer is True or (
            isinstance(answer, np.bool_) and bool(answer)
        )


WHAT = "fit: evaluation"


def make_evaluate(
    engine: EmbeddingEngine,
    objective: Objective,
    source: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    measure: Callable[[Report], Any] | None,
    *,
    weighted: bool,
    depth: int,
) -> Callable[[Run, Report], dict[str, float]] | None:
    """Return a function that evaluates a run, which it is given with its report.

    It raises what the batches, the loss or `measure` raise, and `ValueError` if the source has no
    batch. None without a source and without `measure`.

    Raises:
      TypeError: the source is neither an iterable nor a function, or `measure` is no function.
      ValueError: the source can be read only once.
    """
    if measure is not None:
        check_type(
            "fit: measure",
            measure,
            Callable,
            expected="a function",
            remedy="it is called with a Report",
        )
    if source is None:
        return None if measure is None else lambda _, report: _measured(measure, report)
    wanted = "an iterable, or a function that returns one"
    check_type(WHAT, source, (Callable, Iterable), expected=wanted)
    if isinstance(source, Prefetcher) or (
        not callable(source) and iter(source) is source
    ):
        refuse(
            WHAT,
            expected="what can be read several times",
            got=f"{type(source).__name__}, which can be read once",
            remedy="give the function that makes it, such as functools.partial(batches, path)",
        )
    step = make_evaluation_step(engine, objective)

    def evaluate(run, report):
        found, begun = Window(), source() if callable(source) else source
        number = np.int32(run.step) if objective.keywords else None
        with Prefetcher(
            engine, begun, depth, weighted=weighted, training=False
        ) as batches:
            for item in batches:
                batch, rest = take_apart(engine, item)
                found.add(*step(run.state, run.network, batch, rest, number))
                found.wait(depth)
        if not found.count:
            refuse(
                WHAT,
                expected="at least one batch",
                got="none",
                remedy="a function that returns an iterator must make a new one in each call",
            )
        means = found.means()
        if measure is None:
            return means
        return means | _measured(measure, dataclasses.replace(report, evaluation=means))

    return evaluate


def _measured(measure: Callable[[Report], Any], report: Report) -> dict[str, float]:
    """Return the numbers that a user's function returns; in all processes those of the first.

    Raises:
      TypeError: it did not return named numbers.
      ValueError: one has the name of a number that the report has.
    """
    found, known, what = (
        measure(report),
        report.evaluation or {},
        "fit: what measure returned",
    )
    try:
        numbers = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        refuse(
            what,
            expected="a dictionary of named numbers",
            got=repr(found),
            error=TypeError,
            cause=error,
        )
    if numbers.keys() & known.keys():
        refuse(
            what,
            expected=f"names that evaluation= does not have, {sorted(known)}",
            got=f"{sorted(numbers)}",
        )
    return gather_from_all("fit: measure", numbers)[0]


def fit(
    engine: EmbeddingEngine | Embeddings,
    loss: Callable[..., Any],
    source: Iterable[Any],
    *,
    model: PyTree = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int | None = None,
    seed: int = 0,
    state: TableState | None = None,
    directory: str | Path | None = None,
    save_every: int = 1000,
    keep: int | None = 3,
    touched: TouchedRows | None = None,
    evaluation: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    evaluate_every: int | None = None,
    measure: Callable[[Report], Any] | None = None,
    best: Best | None = None,
    report_every: int = 100,
    callback: Callable[[Report], Any] | None = None,
    progress: bool = True,
    weighted: bool = False,
    depth: int = 2,
    on_nonfinite: Literal["stop", "continue"] = "stop",
    micro_batches: int = 1,
    whole_features: Sequence[str] = (),
) -> Report:
    """Train the tables of an engine, and a model beside them, on the batches of a source.

    A thread reads and places the next batches meanwhile. With a directory, the run is saved every
    `save_every` steps and at its end; and when something ends it early, such as Ctrl-C, SIGTERM or
    bad data, after the last step that is whole. The same call then goes on from there, and ends
    with the bits of a run that was never interrupted. A second Ctrl-C waits for nothing.

    With several processes, all call this with equal arguments, each with its own part of the
    source. A process that fails ends the others; they go on from their last regular checkpoint.
    SIGTERM to one of them ends all after the same step, which they save together.

    Args:
      engine: of the tables; it has their optimizers. Or the `nn.Embeddings` of the `model`, whose
        tables and optimizers' slots are taken, and stand in the model of the report in the end; the
        loss then calls the model with what it gets in place of ids.
      loss: `loss(activations, *rest)`, or `loss(model, activations, *rest)` if there is a model.
        It returns a number, usually the mean over the batch, or this and a dictionary of named
        numbers, the metrics. It is traced. If it has keyword-only parameters `step` and `rng`, it
        gets the number of the step, int32 from 0, and a key of jax.random for it, which is
        `fold_in(key(seed), step)`; in evaluations None.
      source: yields features, or plain tuples `(features, *rest)`, where the rest are numbers,
        arrays, `data.EventValues`, or dictionaries of them; as for a `Prefetcher`, or one that has
        not been read. It may fill the same arrays with each batch. It is read once; epochs are its
        own. To go on from a checkpoint, either its iterator has `get_state` and `set_state`, or it
        begins anew with the same batches, which are left out.
      model: a flax nnx module, or any pytree of floating-point arrays, such as the parameters of
        a linen module; None: the tables are all there is.
      optimizer: of optax, for the model.
      steps: the number of batches of the whole run, those before an interrupt included; None: all.
        Up to `depth` batches more are read. A run that has as many stays as it is.
      seed: the tables begin as `engine.init(jax.random.key(seed))`; those of a layer as they are.
      state: tables to begin with, instead of `seed`. They are donated: later uses of this state
        are errors, so begin with a copy, `jax.tree.map(jnp.copy, state)`, if it is to stay. A
        checkpoint in the directory goes before.
      directory: of the checkpoints, whose latest one is gone on from; None: none are written.
      save_every: how many steps lie between two checkpoints.
      keep: how many of the latest checkpoints stay; None: all.
      touched: the record of this engine, in which each step is recorded, and which is saved with
        the tables; so a callback can publish them (`io.publish`). A checkpoint without a record, of
        a run that had none, begins it anew.
      evaluation: a second source, which is read from its beginning each time; or a function that
        returns one, such as a generator function. A number is the mean over its batches.
      evaluate_every: how many steps lie between two evaluations; None: one, at the end. It needs
        an `evaluation`, or `measure`.
      measure: called with the `Report` of each evaluation; it returns named numbers, which stand in
        `evaluation` beside the means. With several processes, those of the first one count.
      best: has the checkpoint of the best evaluation kept, beside those of `keep`; the report of
        that step is returned. It needs `evaluate_every` and a `directory`.
      report_every: how many steps lie between two reports.
      callback: called with a `Report` every `report_every` steps, after each evaluation, and at the
        end. If it returns True, the run ends there: the same call gives it back as it is, and one
        with other `steps` goes on. With several processes, all return the same.
      progress: whether reports are shown, on `sys.stderr`.
      weighted: whether sources yield `(features, weights, *rest)`.
      depth: how many batches are placed ahead, and how many steps may be under way.
      on_nonfinite: "stop" ends the run when a loss is NaN or infinite, at most `depth` steps later;
        "continue" does not.
      micro_batches: k, the equal parts in which a batch passes the network, whose memory is that of
        one part. The loss is to be a mean over the examples. Each replica's examples are a multiple
        of k.
      whole_features: paths of features that belong to no example, which each part gets whole.

    Returns:
      The last report, or that of the best evaluation: `state` and `model` are what was trained.

    Raises:
      ValueError: a number below 1; a model without an optimizer, or the other way round; `weighted`
        beside a `Prefetcher`; a source without a batch; an evaluation that can be read only once,
        or has no batch; `evaluate_every` without one; `best` without what it needs, or of a number
        that is not evaluated; features that differ in size, or do not divide into `micro_batches`;
        `steps` below those of the latest checkpoint; a directory with checkpoints of another
        program; a state that is not the engine's, or was donated; the record of another engine;
        whatever `place` and `restore` refuse. Batches before a bad one have been trained on.
      TypeError: an argument of another kind; a model with embedding layers, but for the one that is
        given; what the loss returned is no number, or what `measure` returned no dictionary of
        them.
      FloatingPointError: a loss is not finite. No checkpoint holds what its step has left.
      RuntimeError: another run on this machine writes to the directory.
      KeyboardInterrupt: Ctrl-C, between two steps.
      SystemExit: SIGTERM, between two steps; its code is 143.
      Exception: what the source, the loss, `measure` or the callback raises. If there is a
        directory, a note on it says which step was saved.

    Example:
      >>> import numpy as np, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=100, dim=2, name="item")
      >>> features = {"x": tpu_embed.FeatureConfig(table)}
      >>> engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.SGD(1.0))
      >>> batches = [({"x": np.arange(8)}, np.ones(8, np.float32))] * 20
      >>> def loss(activations, wanted):
      ...     return ((activations["x"].sum(-1) - wanted) ** 2).mean()
      >>> trained = fit(engine, loss, batches, progress=False)
      >>> trained.step, trained.loss < 1
      (20, True)
    """
    rows = None
    if isinstance(engine, Embeddings):
        rows, engine = engine, engine.engine
        state = rows.state if state is None else state
    placed = _placed(engine, source, weighted=weighted, depth=depth)
    objective, network = split_model(loss, model, rows)
    optimizer = check_optimizer(optimizer, model)
    if touched is not None:
        check_record(engine, touched)
    run = new_run(
        engine, network, optimizer, steps, Losses(depth, on_nonfinite), touched
    )
    parts = Parts(engine, micro_batches, whole_features)
    train_step = make_train_step(objective, optimizer, parts, seed)
    evaluate = make_evaluate(
        engine, objective, evaluation, measure, weighted=weighted, depth=depth
    )
    check_best(best, evaluate_every, directory)
    numbers = {
        "steps": steps,
        "report_every": report_every,
        "evaluate_every": evaluate_every,
    }
    numbers["save_every"] = save_every
    for name, number in numbers.items():
        if number is not None:
            check_int(f"fit: {name}", number, minimum=1)
    line = ProgressLine(shows=progress)
    reporter = Reporter(
        objective,
        evaluate,
        best,
        callback,
        steps=steps,
        report_every=report_every,
        evaluate_every=evaluate_every,
        line=line,
    )
    no_keeper = contextlib.nullcontext()
    with (
        Stop() as stop,
        contextlib.closing(line),
        Keeper(directory, engine, stop, every=save_every, keep=keep)
        if directory is not None
        else no_keeper as keeper,
    ):
        if keeper is None or not keeper.resume(run, placed):
            run.begin(state, seed)
        else:
            does = "the run was ended at" if run.ended else "going on from"
            line.begin(f"{directory}: {does} step {run.step:,}")
        return _train(run, train_step, placed, reporter, keeper, stop)


def _train(
    run: Run,
    train_step: Callable[..., Any],
    placed: Prefetcher,
    reporter: Reporter,
    keeper: Keeper | None,
    stop: Stop,
) -> Report:
    """Train until the source or the steps that are left end; keep what was trained in any case."""
    try:
        with placed:
            for item in itertools.islice(placed, run.left):
                loss, metrics = run.train(train_step, item, placed.get_state)
                run.ended = reporter.wants_end(run, loss, metrics)
                if run.ended or stop.at(run.step):
                    break
                if keeper is not None:
                    keeper.save(run)
        run.check_begun()
        run.forget_placed()
        if keeper is not None:
            keeper.save(run, force=True)
        stop.check()
        report = reporter.finish(run)
        return report if keeper is None else reporter.take_best(run, keeper, report)
    except BaseException as error:
        if keeper is not None and not stop.at_once:
            keeper.rescue(run, error)
        raise


def _placed(
    engine: EmbeddingEngine, source: Any, *, weighted: bool, depth: int
) -> Prefetcher:
    """Return a prefetcher around the source, or the source if it is one.

    Raises:
      TypeError: `engine` is not an `EmbeddingEngine`.
      ValueError: the source is a prefetcher, and `weighted` is given besides.
    """
    check_engine("fit: engine", engine)
    if not isinstance(source, Prefetcher):
        return Prefetcher(engine, source, depth, weighted=weighted)
    if weighted:
        refuse(
            "fit: weighted",
            expected="False with a Prefetcher",
            got="True",
            remedy="give weighted=True to the Prefetcher",
        )
    return source
