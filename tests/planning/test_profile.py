"""What libtpu writes of a compiled program is read to the last operation."""

import sys

import pytest

from tpu_embed.planning.profile import Operation, profile_step

SORT = """hlo_op_estimate {
  hlo_op_name: "sort.47"
  estimated_cycles: 26025
  num_equivalent_hlos: 1
  scalar_inputs: 0
}
"""
TWO = """hlo_op_estimate {
  hlo_op_name: "gather_fusion.2"
  estimated_cycles: 20000
  num_equivalent_hlos: 2
}
hlo_op_estimate {
  hlo_op_name: "add.3"
  estimated_cycles: 7
}
"""
CALL = """
  %call.1 = f32[8] call-start(%a), async_execution_thread="sparsecore", to_apply=%on_sparse_core,
 metadata={op_name="jit(step)/lookup/t/route/gather_rows/mpmd_map"}
""".replace(",\n", ",")
TEXT = """ENTRY %main {
  %sort.47 = (s32[8]{0}) sort(%a), metadata={op_name="jit(step)/update/t/dedup/sort"}
  ROOT %gather_fusion.2 = f32[8]{0} fusion(%b), metadata={op_name="jit(step)/lookup/t/route"}
}
"""


LIBTPU = """
import os, pathlib, sys
before, flag = os.environ["LIBTPU_INIT_ARGS"].split()
assert before == "--before=1" and os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
name, _, folder = flag.partition("=")
assert name == "--xla_jf_dump_static_llo_profile_to"
for i, text in enumerate(sys.argv[1:]):
    pathlib.Path(folder, f"{i}_static_llo_profile.textproto").write_text(text)
print("Check failed: of libtpu", file=sys.stderr)
sys.exit(3)
"""


def test_what_was_written_before_libtpu_aborted_counts(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--before=1")
    command = [sys.executable, "-c", LIBTPU]
    elsewhere = "%on_sparse_core {\n  %other = f32[8] sort(%b)\n}\n"
    found = profile_step([*command, SORT], TEXT + CALL + elsewhere)
    assert (found.cycles, found.missing) == (26025, 1)  # the fusion; the SparseCore's sort is none
    equal = "  %gather_fusion.3 = f32[8] fusion(%b)\n"  # libtpu counts it, and does not name it
    two = profile_step([*command, SORT, TWO], TEXT + equal)
    assert (two.cycles, two.missing) == (66032, 0)
    assert two.operations == [
        Operation("gather_fusion.2", 20000, 2, "jit(step)/lookup/t/route"),
        Operation("sort.47", 26025, 1, "jit(step)/update/t/dedup/sort"),
        Operation("add.3", 7, 1, ""),
    ]
    with pytest.raises(RuntimeError, match="estimates by libtpu, got none: Check failed: of libt"):
        profile_step(command, TEXT)
