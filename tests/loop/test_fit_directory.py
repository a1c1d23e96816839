"""The directory of a run of `fit`: a callback that ended it, and two runs at once."""

import errno
import fcntl
import os
import warnings

import numpy as np
import pytest
from fit_cases import table, trained


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
