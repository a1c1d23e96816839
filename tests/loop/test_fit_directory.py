"""The directory of a run of `fit`: of one that has ended, of another run, and of two at once."""

import errno
import fcntl
import functools
import os
import warnings

import jax
import numpy as np
import optax
import pytest
from fit_cases import engine, table, trained, with_network
from loop_cases import loss_of_tables, mesh, of_items

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, fit, io, optimizers


def ends_at(step):
    return {"callback": lambda report: report.step == step, "report_every": 1}


@pytest.mark.parametrize("steps", [None, 6])
def test_a_run_that_a_callback_ended_has_ended(steps, tmp_path, capsys):
    first = trained(directory=tmp_path, steps=steps, **ends_at(4))
    reports = []
    options = {"directory": tmp_path, "callback": reports.append, "progress": True}
    again = trained([], steps=steps, **options)  # its source is not asked
    begun, done = capsys.readouterr().err.splitlines()
    assert begun == f"{tmp_path}: the run was ended at step 4"
    assert "nothing left to train on" in done
    assert [report.step for report in reports] == [4]
    np.testing.assert_array_equal(table(again), table(first))


@pytest.mark.parametrize(("steps", "more"), [(None, 6), (6, None), (5, 6)])
def test_with_other_steps_a_run_that_a_callback_ended_goes_on(steps, more, tmp_path):
    trained(directory=tmp_path, steps=steps, **ends_at(4))
    longer = trained(directory=tmp_path, steps=more)
    assert longer.step == 6
    np.testing.assert_array_equal(table(longer), table(trained()))
    assert trained([], directory=tmp_path, steps=6).step == 6


def test_one_run_at_a_time_writes_to_a_directory(tmp_path):
    refused = []

    def callback(report):
        try:
            trained(directory=tmp_path)
        except RuntimeError as error:
            refused.append(str(error))

    first = trained(directory=tmp_path, callback=callback, report_every=3, save_every=1)
    assert len(refused) == 2
    expected = "expected no other run that writes there, got one that has not ended; wait for"
    assert f"fit: directory {tmp_path}: {expected}" in refused[0]
    np.testing.assert_array_equal(table(first), table(trained()))
    assert trained([], directory=tmp_path, steps=6).step == 6


def test_a_fork_that_outlives_a_run_does_not_keep_its_directory(tmp_path):
    """As workers that read data do where the process that forked them was killed."""
    reads, writes = os.pipe()

    def callback(report):
        with warnings.catch_warnings(action="ignore"):  # it must not use JAX, and does not
            child = os.fork()
        if not child:
            os.close(writes)
            os.read(reads, 1)  # until the other end is closed
            os._exit(0)

    trained(directory=tmp_path, callback=callback, steps=3, report_every=9)
    assert trained(directory=tmp_path, steps=6).step == 6
    os.close(writes)
    os.wait()
    os.close(reads)


def test_where_directories_have_no_locks_a_run_has_none(tmp_path, monkeypatch):
    """As on file systems of a network."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert trained(directory=tmp_path).step == 6


def test_checkpoints_of_others_are_refused(tmp_path):
    with io.CheckpointManager(tmp_path / "run", engine()) as manager:
        manager.save(3, engine().init(jax.random.key(0)), position={"batches": 3})
    with pytest.raises(ValueError, match="checkpoints that fit has written, got one with position"):
        trained(directory=tmp_path / "run")


def test_another_rule_is_refused_with_what_fit_has(tmp_path):
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    rules = optimizers.Adam(0.5), optimizers.SGD(0.5)
    first, second = (EmbeddingEngine({"item": item}, rule, mesh=mesh(2)) for rule in rules)
    run = functools.partial(fit, loss=loss_of_tables, directory=tmp_path / "run", progress=False)
    run(first, source=of_items(4), steps=2, keep=1)
    with pytest.raises(ValueError, match=r"expected slots of .*, got those .*; go on with") as one:
        run(second, source=of_items(4), steps=4, keep=1)
    said = "".join([str(one.value), *one.value.__notes__])
    assert "state=" in said
    assert not any(argument in said for argument in ("key=", "convert=", "leave_out="))
    assert run(first, source=of_items(4), steps=4).step == 4
    # What the message says: another engine restores, and a run begins with its state.
    state = io.restore(tmp_path / "run" / "4", second, key=jax.random.key(0)).state
    more = {"directory": tmp_path / "other", "state": state, "steps": 1}
    assert run(second, source=of_items(4), **more).step == 1


def test_a_run_does_not_go_on_without_its_network_or_with_one_that_it_never_had(tmp_path):
    network = with_network()
    trained(directory=tmp_path / "none", steps=1)
    with pytest.raises(FileNotFoundError, match="none of model") as refused:
        trained(directory=tmp_path / "none", **network)
    assert "to begin a new run instead, name another directory" in "".join(refused.value.__notes__)
    trained(directory=tmp_path / "run", steps=2, keep=1, **network)
    with pytest.raises(ValueError, match=r"fit: model: expected one, as it is in .*, got None; "):
        trained(directory=tmp_path / "run", steps=4, keep=1)
    assert trained(directory=tmp_path / "run", steps=4, **network).step == 4


def test_a_network_of_another_dtype_is_refused_with_what_fit_has(tmp_path):
    def loss(model, activations, wanted):
        return loss_of_tables(activations, wanted) + model["w"].astype("float32").sum()

    options = {"loss": loss, "optimizer": optax.sgd(0.5), "steps": 2, "directory": tmp_path}
    trained(model={"w": np.ones(2, "float32")}, **options)
    with pytest.raises(ValueError, match=r"expected dtype bfloat16, got .*32; go on with") as error:
        trained(model={"w": jax.numpy.ones(2, "bfloat16")}, **options)
    assert "convert=" not in str(error.value)
