"""The reader of compiled programs, on lines written by compilers and on our own program."""

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed.planning.hlo import Program, moved

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
  ROOT %gather_rows.7 = f32[64,128] custom-call(%k.0, %k.1), custom_call_target="tpu_custom_call"
}, execution_thread="sparsecore"

%bags (b.0: f32[1000,128], b.1: s32[80], b.2: s32[64], …, b.4: f32[9,128]) -> f32[9,128] {
  %b.0 = f32[1000,128]{1,0} parameter(0)
  %b.1 = s32[80]{0} parameter(1)
  %b.2 = s32[64]{0} parameter(2)
  %b.3 = s32[64]{0} parameter(3)
  %b.4 = f32[9,128]{1,0} parameter(4)
  ROOT %gather_sum.1 = f32[9,128] custom-call(%b.0, %b.1, %b.2, %b.3, %b.4), KERNEL
}, execution_thread="sparsecore"

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
  %sorted = (s32[64]{0}, s32[64]{0}) sort(%ids, %ids), dimensions={0}
  ROOT %new = f32[1000,128]{1,0:T(8,128)} scatter(%table, %ids, %back), to_apply=%add
}
"""
TEXT = TEXT.replace("KERNEL", 'custom_call_target="tpu_custom_call"')
ROWS, IDS = 64 * 128 * 4, 64 * 4


def test_instructions_are_read():
    found = Program(TEXT).instructions
    gather, kernel = found["gather.1"], found["gather_rows.7"]
    assert (gather.opcode, gather.size, gather.operands) == ("gather", ROWS, ("p.0", "p.1"))
    assert (gather.computation, gather.root) == ("fused", True)
    assert (kernel.opcode, kernel.size) == ("gather_rows", ROWS)
    assert found["rows"].fusion == "fused"
    assert found["near"].on_chip
    assert not found["turned"].on_chip
    assert (found["rows"].length, found["flags"].length, found["sent"].length) == (64, 1, 0)
    assert (found["flags"].size, found["sent"].size) == (1, 2 * ROWS)


def test_what_stays_inside_a_fusion_is_not_in_memory():
    program = Program(TEXT)
    stored = {one.name for one in program.instructions.values() if program.in_memory(one)}
    assert "inner" not in stored
    assert {"gather.1", "sum.1", "q.1", "new"} <= stored


def test_what_is_moved_follows_rows_and_not_tables():
    assert moved(Program(TEXT)) == {
        "gather": 2 * ROWS + ROWS,
        "gather_rows": 2 * ROWS,
        "gather_sum": ROWS + 2 * IDS + 9 * 128 * 4,
        "scatter": (IDS + ROWS + IDS) + 2 * (IDS + ROWS),
        "all-to-all": 2 * ROWS,
        "copy": ROWS + 2 * ROWS,
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
