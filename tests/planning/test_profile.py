"""What libtpu writes of a compiled program is read to the last operation."""

import sys

import pytest

from tpu_embed.planning import profile

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
BUNDLES = """scs
__scs_entry_jumppad:
0x0: {  	(pc) =	sbr.rel $0x88  }
tec
execute0_lowered:
0x0: {  	s1 =	srdreg.scid;
	s0 =	stileid.u32  }
.Ltmp0:
0x1: {  	(pc) =	sbr.rel @p0 .LBB2_9-.Ltmp0  }
.LBB2_1:
0x2: {  	_ =	snop  }
.LBB2_2:
0x3: {  	v1 =	vld [tilespmem:s22+$0x0]  }
.Ltmp1:
0x4: {  	s23 =	sand.u32 $0x1, s16;
	(pc) =	sbr.rel @p2 .LBB2_2-.Ltmp1  }
0x5: {  	_ =	snop  }
0x6: {  	_ =	snop  }
.Ltmp2:
0x7: {  	(pc) =	sbr.rel @p2 .LBB2_1-.Ltmp2  }
0x8: {  	_ =	snop  }
0x9: {  	_ =	snop  }
.LBB2_9:
0xa: {  	_ =	shalt  }
"""
"""A program of 11 bundles: a loop of 4 in a loop of 8, which a forward branch leaves out."""

CALL = """
  %call.1 = f32[8] call-start(%a), async_execution_thread="sparsecore", to_apply=%on_sparse_core,
 metadata={op_name="jit(step)/lookup/t/route/gather_rows/mpmd_map"}
""".replace(",\n", ",")
TEXT = """ENTRY %main {
  %sort.47 = (s32[8]{0}) sort(%a), metadata={op_name="jit(step)/update/t/dedup/sort"}
  ROOT %gather_fusion.2 = f32[8]{0} fusion(%b), metadata={op_name="jit(step)/lookup/t/route"}
}
"""


def test_operations_are_read_with_their_scopes(tmp_path):
    (tmp_path / "sort.47_static_llo_profile.textproto").write_text(SORT)
    (tmp_path / "gather_fusion.2_static_llo_profile.textproto").write_text(TWO)
    found = profile.read_profile(tmp_path, TEXT)
    assert [(one.name, one.total, one.count) for one in found] == [
        ("gather_fusion.2", 40000, 2),
        ("sort.47", 26025, 1),
        ("add.3", 7, 1),
    ]
    scopes = ["jit(step)/lookup/t/route", "jit(step)/update/t/dedup/sort", ""]
    assert [one.scope for one in found] == scopes


def test_a_directory_without_profiles_says_how_to_get_some(tmp_path):
    with pytest.raises(
        ValueError, match="expected profiles that libtpu wrote, got none; set LIBTPU"
    ):
        profile.read_profile(tmp_path)


def test_programs_of_sparse_cores_are_read_with_their_innermost_loops(tmp_path):
    (tmp_path / "call.1_1795400008462017_bundles.txt").write_text(BUNDLES)
    (tmp_path / "sc-start.0_17954000084620_bundles.txt").write_text(BUNDLES.split("tec")[0])
    found = profile.read_kernels(tmp_path, CALL)
    assert found == [("jit(step)/lookup/t/route/gather_rows/mpmd_map", 11, (4,))]


LIBTPU = """
import os, pathlib, sys
flags = dict(one.split("=") for one in os.environ["LIBTPU_INIT_ARGS"].split())
assert flags["--before"] == "1" and os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
estimates, kernels = (pathlib.Path(flags[name]) for name in sys.argv[1:3])
if len(sys.argv) > 3:
    (estimates / "sort.47_static_llo_profile.textproto").write_text(sys.argv[3])
    (kernels / "call.1_17_bundles.txt").write_text(sys.argv[4])
print("Check failed: of libtpu", file=sys.stderr)
sys.exit(3)
"""
FLAGS = (profile.FLAG, "--xla_sc_dump_bundles_to")


def test_what_was_written_before_libtpu_aborted_counts(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--before=1")
    command = [sys.executable, "-c", LIBTPU, *FLAGS]
    elsewhere = "%on_sparse_core {\n  %other = f32[8] sort(%b)\n}\n"
    found = profile.profile_step([*command, SORT, BUNDLES], TEXT + CALL + elsewhere)
    assert (found.cycles, found.missing) == (26025, 1)  # the fusion; the SparseCore's sort is none
    assert [one.bundles for one in found.kernels] == [11]
    equal = "  %gather_fusion.3 = f32[8] fusion(%b)\n"  # libtpu counts it, and does not name it
    two = profile.profile_step([*command, SORT + TWO, BUNDLES], TEXT + equal)
    assert (two.cycles, two.missing) == (66032, 0)
    with pytest.raises(RuntimeError, match="estimates by libtpu, got none: Check failed: of libt"):
        profile.profile_step(command, TEXT)
