"""The reader of compiled programs, on lines written by compilers and on our own program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.planning.compiled import compile_for
from tpu_embed.planning.profile import Program, moved

TEXT = """
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
    assert moved(Program(TEXT)) == {  # what stays inside a fusion is not in memory
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
