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

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, fit
from tpu_embed import optimizers as o


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
    with tpu_embed.io.CheckpointManager(tmp_path / "run", engine()) as manager:
        manager.save(3, engine().init(jax.random.key(0)), position={"batches": 3})
    with pytest.raises(ValueError, match="checkpoints that fit has written, got one with position"):
        trained(directory=tmp_path / "run")


def test_a_run_of_another_model_is_refused_with_a_remedy(tmp_path):
    trained(directory=tmp_path / "run", steps=1)
    with pytest.raises(FileNotFoundError, match="none of model") as refused:
        trained(directory=tmp_path / "run", **with_network())
    assert "to begin a new run instead, name another directory" in "".join(refused.value.__notes__)


def test_a_network_of_another_dtype_is_refused_with_what_fit_has(tmp_path):
    def loss(model, activations, wanted):
        return loss_of_tables(activations, wanted) + model["w"].astype("float32").sum()

    def run(dtype):
        model = {"w": jax.numpy.ones(2, dtype)}
        options = {"model": model, "optimizer": optax.sgd(0.5), "steps": 2}
        return trained(loss=loss, directory=tmp_path, **options)

    run("float32")
    with pytest.raises(ValueError, match=r"expected dtype bfloat16, got .*32; go on with") as error:
        run("bfloat16")
    assert "convert=" not in str(error.value)


def with_rule(rule):
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    return tpu_embed.EmbeddingEngine({"item": item}, rule, mesh=mesh(2))


@pytest.mark.parametrize("rules", [(o.Adam(0.5), o.SGD(0.5)), (o.SGD(0.5), o.Adagrad(0.5))])
def test_another_rule_is_refused_with_what_fit_has(rules, tmp_path):
    first, second = map(with_rule, rules)
    run = functools.partial(fit, loss=loss_of_tables, directory=tmp_path / "run", progress=False)
    run(first, source=of_items(4), steps=2, keep=1)
    with pytest.raises(ValueError, match=r"expected slots of .*, got those .*; go on with") as one:
        run(second, source=of_items(4), steps=4, keep=1)
    said = "".join([str(one.value), *one.value.__notes__])
    assert "state=" in said
    assert not any(argument in said for argument in ("key=", "convert=", "leave_out="))
    assert run(first, source=of_items(4), steps=4).step == 4
    # What the message says: another engine restores, and a run begins with its state.
    state = tpu_embed.io.restore(tmp_path / "run" / "4", second, key=jax.random.key(0)).state
    more = {"directory": tmp_path / "other", "state": state, "steps": 1}
    assert run(second, source=of_items(4), **more).step == 1


def test_a_run_does_not_go_on_without_its_network(tmp_path):
    trained(directory=tmp_path / "run", steps=2, keep=1, **with_network())
    with pytest.raises(ValueError, match=r"fit: model: expected one, as it is in .*, got None; "):
        trained(directory=tmp_path / "run", steps=4, keep=1)
    assert trained(directory=tmp_path / "run", steps=4, **with_network()).step == 4
