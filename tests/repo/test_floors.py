"""Check the rules of the architecture: floors, no work at import, docstrings."""

import ast
from pathlib import Path, PurePosixPath

import floors
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p.relative_to(ROOT) for p in (ROOT / floors.PACKAGE).rglob("*.py"))
MODULES = {floors.module_name(PurePosixPath(p)) for p in FILES}


def faults(path, source, modules=MODULES):
    path, tree = PurePosixPath(path), ast.parse(source)
    found = floors.import_work(path, tree) + floors.docstring_faults(path, tree)
    return floors.import_faults(path, tree, modules) + found


def test_files_keep_the_rules():
    assert not [fault for path in FILES for fault in faults(path, (ROOT / path).read_text())]


def test_examples_are_short():
    lines = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "examples").glob("*.py")}
    assert not {name: n for name, n in lines.items() if n > 150}


def test_nothing_is_imported_in_a_circle():
    trees = {PurePosixPath(path): ast.parse((ROOT / path).read_text()) for path in FILES}
    assert not floors.circles(trees, MODULES)
    trees[PurePosixPath("tpu_embed/config.py")] = ast.parse("import tpu_embed.core.ids.padding")
    leaves = PurePosixPath("tpu_embed/core/ids/leaves.py")
    trees[leaves] = ast.parse("import tpu_embed.config")
    assert {"tpu_embed.config", "tpu_embed.core.ids.padding"} <= {*floors.circles(trees, MODULES)}


HOST = "core/ids/host_ids.py"
LAYOUT = "core/layout/layout.py"
BAD = {
    "higher floor": ("optimizers/sgd.py", "from tpu_embed.core import engine"),
    "relative": (HOST, "from ...training import gradients"),
    "later in core, relative": (LAYOUT, "from .. import engine"),
    "past a package": (LAYOUT, "from tpu_embed.core.ids.host_ids import HostIds"),
    "sibling": ("io/files.py", "from tpu_embed.planning import memory"),
    "device query": (HOST, "import jax\nN = len(jax.devices())"),
    "default argument": (HOST, "from jax import numpy as np\ndef _f(x=np.ones(3)): ..."),
    "environment": (HOST, "import os\nos.environ['XLA_FLAGS'] = ''"),
    "no method docstring": (HOST, 'class C:\n    """Doc."""\n    def public(self): ...'),
}
GOOD = {
    "lower floor": (HOST, "from tpu_embed import _checks, config"),
    "earlier in core": (LAYOUT, "from tpu_embed.core.ids import HostIds"),
    "same package": ("io/serving/served.py", "from tpu_embed.io import files"),
    "later": (HOST, "import jax\ndef _f():\n    return jax.devices()"),
}
NAMES = "_checks config core core.ids core.ids.host_ids core.layout core.engine io.files io.serving"
SKETCH = {"tpu_embed", *(f"tpu_embed.{name}" for name in NAMES.split())}


@pytest.mark.parametrize("case", [*BAD, *GOOD])
def test_checker_sees_and_allows(case):
    path, body = (BAD | GOOD)[case]
    found = faults(f"tpu_embed/{path}", f'"""Doc."""\n{body}\n', SKETCH)
    assert len(found) == (case in BAD)


@pytest.mark.parametrize("path", ["tpu_embed/other.py", "tpu_embed/core/other.py"])
def test_file_without_a_place_is_named(path):
    with pytest.raises(ValueError, match=r"other has no (floor|place)"):
        faults(path, '"""Doc."""\nfrom tpu_embed.core import ids\n', SKETCH)
