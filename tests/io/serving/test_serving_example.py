"""Run the serving example as a user would: train, export, and call in other processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.whole
def test_other_processes_say_what_the_first_one_says(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "serving.py"), "--steps", "8"]
    command += ["--directory", str(tmp_path / "ranker")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "ranker/float32 is there: remove it, or give --directory" in again.stderr
    assert not again.stdout  # before it trains
    lines = done.stdout.splitlines()[-3:]
    first, exact, small = (np.array(re.findall(r"0\.\d{6}", line), float) for line in lines)
    assert len(first) == 3
    # One example there, 64 here: the products of the model are summed in another order.
    np.testing.assert_allclose(exact, first, atol=2e-6)
    np.testing.assert_allclose(small, first, atol=0.01)  # rows are off by 1/510 of their range
