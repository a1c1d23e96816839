"""What `benchmarks/tpu_cycles.py` reads of the programs that libtpu writes for SparseCores."""

import runpy
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/tpu_cycles.py"

PROGRAM = """scs
0x0: {  	(pc) =	sbr.rel $0x88  }
tec
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
"""11 bundles: a loop of 4 in a loop of 8, which a forward branch leaves out."""


def test_bundles_are_counted_and_innermost_loops_found(tmp_path):
    read_kernels = runpy.run_path(str(BENCHMARK), run_name="not_main")["read_kernels"]
    (tmp_path / "call.1_1795400008462017_bundles.txt").write_text(PROGRAM)
    (tmp_path / "sc-start.0_17954000084620_bundles.txt").write_text(PROGRAM.split("tec")[0])
    (found,) = read_kernels(tmp_path, "")
    assert (found.bundles, found.loops) == (11, [4])
