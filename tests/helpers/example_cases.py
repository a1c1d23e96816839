"""Run an example in a process of its own, or import one of its modules; write its data."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(example, *arguments, cwd):
    """Return what the example prints; without the tests' own 8 devices unless it asks for them."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    options = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=cwd, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return np.array([float(x) for x in re.findall(pattern, text)])


def config_of(text):
    """Return the numbers of a config, as attributes."""
    found = {}
    exec(text, found)
    return types.SimpleNamespace(**found)


def table(path, header, rows, separator):
    lines = [header] if header else []
    path.write_text("\n".join(lines + [separator.join(map(str, row)) for row in rows]) + "\n")


def load(name, monkeypatch):
    """Return a module of the examples, which is forgotten after the test."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def load_from(folder, name, monkeypatch):
    """Return a module of a folder of examples; it and its neighbours are forgotten later."""
    for path in (EXAMPLES, EXAMPLES / folder):
        monkeypatch.syspath_prepend(str(path))
    for neighbour in EXAMPLES.rglob("*.py"):
        monkeypatch.setitem(sys.modules, neighbour.stem, None)  # undone after the test
        del sys.modules[neighbour.stem]
    return importlib.import_module(name)
