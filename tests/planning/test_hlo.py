"""The reader of compiled programs, on lines as compilers write them and on a program of our own."""

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed.planning.hlo import instructions, moved

TEXT = """
HloModule jit_step, is_scheduled=true

%fused (p.0: f32[1000,128], p.1: s32[64,1]) -> f32[64,128] {
  %p.0 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[64,1]{0,1:T(1,128)} parameter(1)
  ROOT %gather.1 = f32[64,128]{1,0:T(8,128)} gather(%p.0, %p.1), offset_dims={1}
}

ENTRY %main {
  %table = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %ids = s32[64,1]{0,1:T(1,128)} parameter(1)
  %rows = f32[64,128]{1,0:T(8,128)} fusion(%table, %ids), kind=kCustom, calls=%fused
  %sent = (f32[64,128]{1,0}, f32[64,128]{1,0}) all-to-all-start(%rows), replica_groups={{0,1}}
  %back = f32[64,128]{1,0} all-to-all-done(%sent)
  %halves = bf16[64,128]{1,0:T(8,128)(2,1)} copy(%back)
  %flags = pred[] constant(false)
  %sorted = (s32[64]{0}, s32[64]{0}) sort(%ids, %ids), dimensions={0}
  ROOT %new = f32[1000,128]{1,0:T(8,128)} scatter(%table, %ids, %back), to_apply=%add
}
"""


def test_instructions_are_read_with_their_sizes():
    found = {one.opcode: one for one in instructions(TEXT)}
    row_bytes = 64 * 128 * 4
    assert found["gather"] == ("gather", row_bytes, (1000 * 128 * 4, 256))
    assert found["all-to-all-start"].operands == (row_bytes,)
    assert found["copy"].result == row_bytes // 2
    assert found["constant"].result == 1
    assert found["sort"].operands == (256, 256)


def test_what_is_moved_follows_rows_and_not_tables():
    row_bytes = 64 * 128 * 4
    assert moved(TEXT) == {
        "gather": 2 * row_bytes,
        "all-to-all": 2 * row_bytes,
        "copy": row_bytes,
        "sort": 4 * 256,
        "scatter": 2 * (256 + row_bytes),
    }


def test_a_program_of_this_machine_is_read():
    def step(table, ids):
        return table.at[ids].set(table[ids] * 2)

    lowered = jax.jit(step, donate_argnums=0).lower(jnp.zeros((1000, 8)), np.zeros(5, np.int32))
    text = lowered.compile().as_text()
    assert {one.opcode for one in instructions(text)} >= {"parameter", "gather", "scatter"}
    found = moved(text)
    assert found["gather"] == 2 * 5 * 8 * 4
    assert found["scatter"] < 1000 * 8 * 4
