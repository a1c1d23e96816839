"""What compilers say of a step: bytes that it moves, cycles by libtpu, and its estimated time."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import FeatureConfig, TableConfig, optimizers, planning
from tpu_embed.planning.compiled import Compiled, compile_for, estimate
from tpu_embed.planning.profile import Operation, Profile, Program, moved, profile_step

HLO = """
HloModule jit_step, is_scheduled=true

%fused (p.0: f32[1000,128], p.1: s32[64,1]) -> f32[64,128] {
  %p.0 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[64,1]{0,1:T(1,128)} parameter(1)
  ROOT %gather.1 = f32[64,128]{1,0:T(8,128)} gather(%p.0, %p.1), offset_dims={1}
}

%sums (q.0: f32[16,128], q.1: f32[1000,128], q.2: s32[64,1]) -> f32[16,128] {
  %q.0 = f32[16,128]{1,0:T(8,128)} parameter(0)
  %q.1 = f32[1000,128]{1,0:T(8,128)} parameter(1)
  %q.2 = s32[64,1]{0,1:T(1,128)} parameter(2)
  %inner = f32[64,128]{1,0:T(8,128)} gather(%q.1, %q.2), offset_dims={1}
  ROOT %sum.1 = f32[16,128]{1,0:T(8,128)} scatter(%q.0, %q.2, %inner), to_apply=%add
}

%kernel (k.0: f32[1000,128], k.1: s32[64]) -> f32[64,128] {
  %k.0 = f32[1000,128]{1,0} parameter(0)
  %k.1 = s32[64]{0} parameter(1)
  ROOT %gather_rows.7 = f32[64,128] custom-call(%k.0, %k.1), custom_call_target="tpu_custom_call"@
}, execution_thread="sparsecore"

%silent (s.0: f32[64,128], s.1: s32[64]) -> f32[16,128] {
  %s.0 = f32[64,128]{1,0} parameter(0)
  %s.1 = s32[64]{0} parameter(1)
  ROOT %sum_rows.1 = f32[16,128]{1,0} custom-call(%s.0, %s.1), custom_call_target="tpu_custom_call"
}, execution_thread="sparsecore"

%rule (r.0: f32[64,128], r.1: f32[64,128], r.2: f32[64,128]) -> (f32[64,128], f32[64,128]) {
  %r.0 = f32[64,128]{1,0} parameter(0)
  %r.1 = f32[64,128]{1,0} parameter(1)
  %r.2 = f32[64,128]{1,0} parameter(2)
  %half = f32[] constant(0.5)
  %halves = f32[64,128]{1,0} broadcast(%half), dimensions={}
  %square = f32[64,128]{1,0} multiply(%r.1, %halves)
  %sum = f32[64,128]{1,0} add(%square, %r.2)
  %less = f32[64,128]{1,0} subtract(%r.0, %sum)
  ROOT %both = (f32[64,128]{1,0}, f32[64,128]{1,0}) tuple(%less, %sum)
}

%first (f.0: f32[1000,128]) -> f32[64,128] {
  %f.0 = f32[1000,128]{1,0} parameter(0)
  %same = f32[1000,128]{1,0} bitcast(%f.0)
  %head = f32[64,128]{1,0} slice(%same), slice={[0:64], [0:128]}
  %turn = f32[64,128]{0,1} copy(%head)
  ROOT %half = f32[64,128]{1,0} multiply(%turn, %turn)
}

ENTRY %main {
  %table = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %ids = s32[64,1]{0,1:T(1,128)} parameter(1)
  %zeros = f32[16,128]{1,0} broadcast()
  %rows = f32[64,128]{1,0:T(8,128)} fusion(%table, %ids), kind=kCustom, calls=%fused
  %summed = f32[16,128]{1,0:T(8,128)} fusion(%zeros, %table, %ids), kind=kCustom, calls=%sums
  %sent = (f32[64,128]{1,0}, f32[64,128]{1,0}) all-to-all-start(%rows), replica_groups={{0,1}}
  %back = f32[64,128]{1,0} all-to-all-done(%sent)
  %near = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%back)
  %turned = f32[64,128]{0,1:T(8,128)} copy(%back)
  %flags = pred[] constant(false)
  %zero = f32[] constant(0)
  %filled = f32[64,128]{1,0:T(8,128)} broadcast(%zero), dimensions={}
  %filled_near = f32[64,128]{1,0:T(8,128)S(1)} broadcast(%zero), dimensions={}
  %joined = f32[128,128]{1,0} concatenate(%back, %filled_near), dimensions={0}
  %applied = (f32[64,128]{1,0}, f32[64,128]{1,0S(1)}) fusion(%back, %near, %turned), calls=%rule
  %part = f32[64,128]{1,0} fusion(%table), kind=kLoop, calls=%first
  %sorted = (s32[64]{0}, s32[64]{0}) sort(%ids, %ids), dimensions={0}
  ROOT %new = f32[1000,128]{1,0:T(8,128)} scatter(%table, %ids, %back), to_apply=%add
}
""".replace("@", ', backend_config={"cost_estimate":{"flops":"0","bytes_accessed":"65536"}}')
ROWS, IDS, SUMS = 64 * 128 * 4, 64 * 4, 16 * 128 * 4


def test_what_is_moved_follows_rows_and_not_tables():
    assert moved(Program(HLO)) == {  # what stays inside a fusion is not in memory
        "gather": 2 * ROWS + ROWS,
        "gather_rows": 2 * ROWS,
        "sum_rows": ROWS + IDS + SUMS,
        # Two read ids; the rule reads two operands, as the third is near, and writes one result;
        # the last one reads and writes a slice.
        "fusion": 2 * IDS + (2 * ROWS + ROWS) + (ROWS + ROWS),
        "scatter": (IDS + ROWS + IDS) + 2 * (IDS + ROWS),
        "all-to-all": 2 * ROWS,
        "copy": ROWS + 2 * ROWS,
        # A fill inside a fusion, or in a core's own memory, writes nothing.
        "broadcast": SUMS + ROWS,
        "concatenate": ROWS + 2 * ROWS,
        "sort": 4 * IDS,
    }


def test_a_program_of_this_machine_is_read():
    def step(table, ids):
        return table.at[ids].set(table[ids] * 2)

    lowered = jax.jit(step, donate_argnums=0).lower(jnp.zeros((1000, 8)), np.zeros(5, np.int32))
    program = Program(lowered.compile().as_text())
    opcodes = {one.opcode for one in program.instructions.values()}
    assert opcodes >= {"parameter", "gather", "scatter"}
    found = moved(program)
    assert 0 < found["gather"] <= 2 * 5 * 8 * 4
    assert 0 < found["scatter"] < 1000 * 8 * 4


def test_what_lowers_a_step_is_a_function():
    """It is refused before a topology is described, which takes libtpu."""
    with pytest.raises(TypeError, match=r"compile_for: lower: expected a function.*got int"):
        compile_for("v5e:2x2", {}, None, {}, lower=3)  # type: ignore[arg-type]


ESTIMATE = 'hlo_op_estimate {{\n  hlo_op_name: "{}"\n  estimated_cycles: {}\n{}}}\n'
SORT = ESTIMATE.format("sort.47", 26025, "  num_equivalent_hlos: 1\n  scalar_inputs: 0\n")
TWO = ESTIMATE.format("gather_fusion.2", 20000, "  num_equivalent_hlos: 2\n")
TWO += ESTIMATE.format("add.3", 7, "")
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
        Operation("gather_fusion.2", 20000, 2),
        Operation("sort.47", 26025, 1),
        Operation("add.3", 7, 1),
    ]
    with pytest.raises(RuntimeError, match="estimates by libtpu, got none: Check failed: of libt"):
        profile_step(command, TEXT)


MOVED = {"gather": 819_000, "copy": 819_000}
PROFILE = Profile([Operation("sort", 1_750_000, 2), Operation("add", 7, 1)], 3)


def compiled_for(topology):
    feature = FeatureConfig(TableConfig(1000, 16, name="films"))
    batch = jax.ShapeDtypeStruct((64, 2), np.int32)
    plan = planning.plan(feature, optimizers.SGD(0.1), topology, batch)
    return Compiled(plan, 1.0, 2, 3, 4, dict.fromkeys(MOVED, 1), MOVED, "HloModule")


def test_the_longest_bound_is_the_estimate():
    compiled = compiled_for("v6e:2x2")
    found = estimate(compiled, PROFILE)
    assert found.bounds == {"memory": 1e-6, "TensorCore": 3_500_007 / 1.75e9}
    assert found.seconds == found.bounds["TensorCore"]
    text = found.explain()
    assert "at least 2.000 ms, the bound by the TensorCore; nothing was" in text
    assert "3,500,007 cycles by libtpu's profile at 1.75 GHz; 3 operation(s) not counted" in text
    assert "1.6 MiB moved at 1,638 GB/s" in text
    short = estimate(compiled, Profile(PROFILE.operations[1:], 0))
    assert short.seconds == 1e-6
    assert "the bound by the memory" in short.explain()


@pytest.mark.parametrize(("topology", "profile"), [("v5e:2x2", PROFILE), ("v6e:2x2", None)])
def test_cycles_that_are_not_known_are_left_out(topology, profile):
    found = estimate(compiled_for(topology), profile)
    assert list(found.bounds) == ["memory"]
    assert "TensorCore  not known" in found.explain()
    figures = found.figures()
    assert (figures["cycles"], figures["seconds"]) == (None, figures["bounds"]["memory"])


def test_a_chip_of_two_devices_shares_its_bandwidth():
    chips = planning.CHIPS
    assert estimate(compiled_for("tpu7x:1x1x1")).bandwidth * 2 == 7.38e12
    assert chips["v3"].bandwidth * chips["v3"].devices == 900
    assert {name for name, chip in chips.items() if chip.clock} == {"v5p", "v6e"}
