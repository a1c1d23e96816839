"""The notebook runs from its first cell to its last, on one device."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = json.loads((ROOT / "examples/first_steps.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

PROGRAM = """
import json, sys
namespace = {"__name__": "__main__"}
cells = json.load(sys.stdin)
for number, source in enumerate(cells, 1):
    exec(compile(source, f"cell {number}", "exec"), namespace)
(again,) = [source for source in cells if "trained = train(200)" in source]
finished = namespace["trained"].step
exec(again, namespace)  # as in a notebook that is run a second time
print(namespace["jax"].device_count(), "device,", end=" ")
print(finished, "steps, then", namespace["trained"].step)
"""


def test_it_has_no_results_of_an_earlier_run():
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK["cells"])
    assert [cell["id"] for cell in NOTEBOOK["cells"]] == sorted(
        {cell["id"] for cell in NOTEBOOK["cells"]}, key=lambda name: int(name.split("-")[1])
    )


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_cells_fit_on_a_narrow_screen(number):
    ast.parse(CELLS[number])
    assert max(map(len, CELLS[number].splitlines())) <= 100


def test_all_cells_run_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as on most machines
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(
        command, input=json.dumps(CELLS), cwd=tmp_path, text=True, capture_output=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("1 device, 400 steps, then 200\n")
    assert "got id 100 at example 5" in ran.stdout
