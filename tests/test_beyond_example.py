"""The example of a table beyond the devices: the same bits, and a limit of memory that is real."""

import pytest
from example_cases import ROOT, numbers, run

CONFIG = (ROOT / "configs" / "beyond.py").read_text()
SMALL = """
rows, device_rows, dim, batches, window, batch_size, bag = 4_000, 200, 4, 40, 20, 32, 3
"""


def config_in(folder, changed=""):
    path = folder / "small.py"
    path.write_text(CONFIG + changed)
    return path


@pytest.mark.whole
def test_both_runs_are_equal_and_rows_move(tmp_path):
    config = config_in(tmp_path, SMALL)
    out = run("beyond.py", "--devices", 8, "--config", config, cwd=tmp_path)
    assert out.startswith("8 device(s), 4000 rows, 200 on them\n")
    assert "errors and rows are equal, bit for bit" in out
    assert (numbers(r"brought (\d+) rows", out) > 0).all()
    first, last = numbers(r"error (\S+) ", out)
    assert last < first
    assert numbers(r"(\d+) rows at home", out) > 200
    assert (tmp_path / "build" / "beyond.png").stat().st_size > 1000


@pytest.mark.whole
def test_rows_in_a_file_do_not_count_as_memory(tmp_path):
    # 182 MB of rows; 64 may be asked for.
    arguments = "beyond.py", "--devices", 1, "--config", config_in(tmp_path), "--limit", 64
    out = run(*arguments, "--path", tmp_path, cwd=tmp_path)
    assert numbers(r"at home take (\d+) MB", out) > 2 * 64
    with pytest.raises(AssertionError, match="MemoryError: no memory for the rows"):
        run(*arguments, cwd=tmp_path)
