"""The notebook runs from its first cell to its last, on one device."""

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

INSTALL = """
import subprocess, sys
sys.path.insert(0, "")  # as in a notebook; -I and -S leave out whatever is installed here
subprocess.run = lambda command, **_: print("install", command[-1])
exec(sys.stdin.read())
"""


def run(folder, given, *arguments):
    options = {"cwd": folder, "text": True, "capture_output": True, "timeout": 500}
    return subprocess.run([sys.executable, *arguments], input=given, **options)


def test_it_has_no_results_of_an_earlier_run_and_fits_on_a_narrow_screen():
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK["cells"])
    numbers = [int(cell["id"].split("-")[1]) for cell in NOTEBOOK["cells"]]
    assert numbers == sorted(set(numbers))
    assert max(len(line) for cell in CELLS for line in cell.splitlines()) <= 100


CLONES = [("", "./tpu_embed"), ("tpu_embed", "."), ("tpu_embed/examples", "..")]


@pytest.mark.parametrize(("folder", "clone"), CLONES)
def test_it_installs_the_clone(tmp_path, folder, clone):
    """Also where `import tpu_embed` finds the clone's folder, which is no package."""
    for name in ("tpu_embed", "examples"):
        (tmp_path / "tpu_embed" / name).mkdir(parents=True)
    (tmp_path / "tpu_embed" / "tpu_embed" / "__init__.py").touch()
    ran = run(tmp_path / folder, CELLS[0], "-I", "-S", "-c", INSTALL)
    assert ran.stdout == f"install {clone}\n", ran.stderr


def test_all_cells_run_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as on most machines
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ran = run(tmp_path, json.dumps(CELLS), "-c", PROGRAM)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("1 device, 400 steps, then 200\n")
    assert "got id 100 at example 5" in ran.stdout
    # What is left in the folder of the notebook is nothing that git would list.
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {f"{left.name}/" for left in tmp_path.iterdir()} <= set(ignored)
