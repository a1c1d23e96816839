"""The example of smaller tables: at random a bfloat16 table arrives, to nearest it stalls."""

import pytest
from example_cases import numbers, run


@pytest.mark.whole
def test_small_steps_stall_where_they_are_rounded_to_nearest(tmp_path):
    out = run("smaller.py", "--devices", 1, "--rows", 64, "--steps", 2000, cwd=tmp_path)
    full, nearest, stochastic = numbers(r"distance (\S+) after", out)
    assert full < stochastic < 0.06 < 0.2 < nearest
    assert (tmp_path / "build" / "smaller.png").stat().st_size > 1000
