"""The programs of `python -m tpu_embed check` compile for a TPU; nothing runs."""

import jax
import numpy as np
import pytest

from tpu_embed import planning
from tpu_embed.check import PartReport, parts
from tpu_embed.planning.compiled import describe_topology

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_kernels_of_the_check_compile(topology, monkeypatch):
    compiled, on_each = [], parts.on_each

    def compile_only(devices, kernel):
        program = on_each(devices, kernel)

        def zeros(*operands):
            compiled.append("sparsecore" in program.lower(*operands).compile().as_text())
            shapes = jax.eval_shape(program, *operands)
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

        return zeros

    monkeypatch.setattr(parts, "on_each", compile_only)
    report = PartReport("kernels")
    parts.check_kernels(describe_topology(planning.Topology(topology)), report)
    assert not [fault.trace for fault in report.faults if fault.trace]
    # Those of `TRIALS`, and the sort.
    moving = [topology.startswith("v5p")] * len(parts.TRIALS)
    assert compiled == [*moving, False]
