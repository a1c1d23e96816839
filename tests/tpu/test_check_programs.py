"""The programs of `python -m tpu_embed check` compile for a TPU; nothing runs."""

import pytest

from tpu_embed import planning
from tpu_embed.check import kernels
from tpu_embed.check.findings import Findings
from tpu_embed.planning.compiled import describe_topology

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_kernels_of_the_check_compile(topology, monkeypatch):
    compiled = []

    def compile_only(mesh, where, trial, findings):
        program = kernels.program(mesh, trial.kernel).lower(*trial.operands).compile()
        compiled.append((where, "sparsecore" in program.as_text()))

    monkeypatch.setattr(kernels, "_compare", compile_only)
    findings = Findings()
    kernels.check_kernels(describe_topology(planning.Topology(topology)), findings)
    assert not findings.faults, findings.faults[0].trace
    on_sparse_cores = {where for where, found in compiled if found}
    moving = {"gather_rows", "set_rows", "gather_sum", "rounded gather_rows", "rounded gather_sum"}
    names = {f"kernel {name}" for name in (*moving, "merge_update")}
    assert on_sparse_cores == (names if topology.startswith("v5p") else set())
    assert len(compiled) == len(names) + topology.startswith("v5p")
