"""Whatever ends a run of `fit`, the next call goes on to the bits of an undisturbed run."""

import contextlib
import functools
import itertools
import shutil

import numpy as np
import pytest
from fit_cases import STEPS, assert_undisturbed, full_engine, run, steps_in
from flax import nnx
from interrupt_cases import Interrupt, from_a_signal
from loop_cases import DENSE, Network, Stateful, batches, loss_of_network

from tpu_embed.io.checkpoint import tables
from tpu_embed.loop.reports import Losses
from tpu_embed.loop.run import Run, new_run
from tpu_embed.loop.step import Parts, make_train_step, split_model

EVALUATION = list(batches(2))


def of_the_loop(code):
    parts = ("tpu_embed/loop/", "tpu_embed/data/prefetcher", "tpu_embed/io/checkpoint/manager")
    return any(part in code.co_filename for part in parts)


class Failing(Stateful):
    """The batches, of which one raises an error, or is no batch."""

    def __init__(self, at, bad):
        super().__init__(STEPS)
        self.bad, self.items[at] = bad, bad

    def __next__(self):
        if self.at < len(self.items) and self.items[self.at] is self.bad is ZeroDivisionError:
            raise ZeroDivisionError
        return super().__next__()


BAD_IDS = {name: np.full((8, 2), 10**6) for name in ("item", "query", "far")}
BAD = BAD_IDS, np.zeros(8, np.float32)


def by_a_signal(rng):
    at = int(rng.integers(1, 1_400))  # a whole run has 1,240 such places
    return {}, Interrupt(of_the_loop, at, from_a_signal, only_signals=True)


def by_the_source(rng, bad=ZeroDivisionError):
    source = Failing(rng.integers(STEPS), bad)
    return {"source": source}, contextlib.suppress(ZeroDivisionError, ValueError)


def by_the_callback(rng):
    at = int(rng.integers(1, STEPS))

    def callback(report):
        if report.step >= at:
            raise ZeroDivisionError

    return {"callback": callback, "report_every": 1}, contextlib.suppress(ZeroDivisionError)


def by_its_steps(rng):
    return {"steps": int(rng.integers(1, STEPS))}, contextlib.nullcontext()


by_a_bad_batch = functools.partial(by_the_source, bad=BAD)
ENDS = [by_a_signal, by_a_signal, by_the_source, by_a_bad_batch, by_the_callback, by_its_steps]


def disturb(rng, directory, count):
    """End so many calls at random; return the report of the one that comes to its end."""
    # Of what is iterated anew, the position is a number of batches.
    read, reached, last = iter if rng.random() < 0.5 else itertools.chain, [0], 0
    for _ in range(count):
        how = ENDS[rng.integers(len(ENDS))]
        options, context = how(rng)
        source = options.pop("source", None) or Stateful(STEPS)
        if options.get("steps", STEPS) < last:
            context = pytest.raises(ValueError, match=f"expected at least {last}, as the latest")
        with context:
            run(directory, read(source), **options)
        last = max(steps_in(directory), default=0) if directory.exists() else 0
        reached.append(last)
    assert reached == sorted(reached)
    return run(directory, read(Stateful(STEPS)), evaluation=EVALUATION)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.quick(1)
def test_random_ends_leave_the_bits_of_an_undisturbed_run(seed, tmp_path):
    assert_undisturbed(disturb(np.random.default_rng(seed), tmp_path / "run", 4))


def test_killed_while_it_saves_a_run_goes_on_from_the_checkpoint_before(tmp_path, monkeypatch):
    """What a kill leaves is a copy of the directory from the middle of a save."""
    copies, write = [], tables.write

    def write_and_copy(path, prepared):
        write(path, prepared)  # the tables are there; the rest of the checkpoint is not
        copies.append(tmp_path / f"copy {len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])

    with monkeypatch.context() as patched:
        patched.setattr(tables, "write", write_and_copy)
        run(tmp_path / "run")
    assert steps_in(tmp_path / "run") == [12, STEPS]
    left = copies[1]
    assert steps_in(left) == [4]
    assert list(left.glob("*orbax-checkpoint-tmp*"))
    assert_undisturbed(run(left))
    assert steps_in(left) == [12, STEPS]


def test_a_batch_that_was_admitted_but_not_trained_on_is_not_saved(tmp_path):
    """Keys of the batch have rows then; a run that went on from there would count it twice."""
    ids, _ = next(batches(1))
    source = [*batches(6), (ids, np.zeros(5, np.float32))]
    with pytest.raises((TypeError, ValueError)) as error:
        run(tmp_path / "run", source)
    assert steps_in(tmp_path / "run") == [4]
    assert "run has step 4; the same call goes on" in error.value.__notes__[-1]
    assert_undisturbed(run(tmp_path / "run", batches(STEPS)))


def test_what_fails_at_the_very_end_says_that_the_run_is_saved(tmp_path):
    def callback(report):
        if report.step == STEPS:
            raise ZeroDivisionError

    for options in ({"callback": callback}, {"evaluation": [BAD]}):
        with pytest.raises((ZeroDivisionError, ValueError)) as error:
            run(tmp_path / "run", **options)
        assert f"run has step {STEPS}; the same call goes on" in error.value.__notes__[-1]
    assert_undisturbed(run(tmp_path / "run"))


def test_a_save_that_fails_is_a_note_on_the_error_that_ended_the_run(tmp_path, monkeypatch):
    def fail(path, prepared):
        raise OSError("no space left on device")

    def callback(report):
        monkeypatch.setattr(tables, "write", fail)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        run(tmp_path / "run", callback=callback, report_every=6)
    *_, failed, there = error.value.__notes__
    assert "step 6 could not be saved" in failed
    assert "no space left" in failed
    assert "has step 4" in there
    assert steps_in(tmp_path / "run") == [4]


def test_what_cuts_a_step_at_any_bytecode_leaves_nothing_to_be_saved_or_a_run_between_two_steps():
    made, source, lost = full_engine(), Stateful(200), 0
    objective, network = split_model(loss_of_network, Network(nnx.Rngs(0)))
    step = make_train_step(objective, DENSE, Parts(made, 1, ()), 0)

    def train(run):
        ids, wanted = next(source)
        run.train(step, (made.place(ids), wanted), source.get_state)

    run = None
    for at in itertools.count(1):
        if run is None or not run.can_be_saved():
            run = new_run(made, network, DENSE, None, Losses(2, "stop"))
            run.begin(None, 0)
            source.set_state({"at": 0})
            train(run)  # a run without a step cannot be saved
        with Interrupt(lambda code: code is Run.train.__code__, at, from_a_signal) as interrupt:
            train(run)
        if run.can_be_saved():
            assert run.step == int(run.state.step) == made.vocabularies.admitted
            assert run.position == {"at": run.step}
            run.forget_placed()
            source.set_state(run.position)
        lost += not run.can_be_saved()
        if interrupt.seen < at:
            break
    assert 20 < lost < at
