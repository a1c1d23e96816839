"""What libtpu writes of a compiled program is read to the last operation."""

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
