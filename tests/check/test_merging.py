"""The trial of the kernel that updates rows on SparseCores, interpreted on a CPU."""

import jax
import numpy as np
import pytest
from sparsecore_interpreter import compiled

from tpu_embed.check import kernels, merging
from tpu_embed.check.findings import Findings

RULES = [
    pytest.param(name, marks=[] if name == "Adagrad" else pytest.mark.whole)
    for name in merging.RULES
]


@pytest.mark.whole
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_passes_its_trial_and_a_row_that_was_forgotten_does_not(name, monkeypatch):
    monkeypatch.setattr(merging, "RULES", (name,))
    monkeypatch.setattr(merging, "DIMS", (7,))
    trial = merging.trial(np.random.default_rng(0))
    run = compiled(trial.kernel, *trial.operands, late=False)
    found = jax.device_get(run(*trial.operands))
    assert not faults(trial, found)
    # A row that was not updated.
    table = np.array(found[0])
    row = trial.operands[0].row_ids.max()
    table[row] = trial.operands[1][0][0][row, :7]
    (fault,) = faults(trial, [table, *found[1:]])
    assert f"{name}, D = 7, float32, table" in fault.where


def faults(trial, found):
    """Return what a comparison with the right values finds."""
    findings = Findings()
    for (what, right), got in zip(trial.right, found, strict=True):
        findings.compare(what, right, got, tolerance=trial.tolerance)
    return findings.faults


def test_only_sparse_cores_have_the_trial(monkeypatch):
    names = []
    monkeypatch.setattr(kernels, "_compare", lambda mesh, where, *rest: names.append(where))
    for known in (False, True):
        monkeypatch.setattr(
            kernels.sparsecore, "has_sparse_cores", lambda device, known=known: known
        )
        what = kernels.check_kernels(jax.devices()[:1], Findings())
        assert ("kernel merge_update" in names) == known
        assert ("merge_update" in what) == known
