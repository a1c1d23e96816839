"""What the package imports is declared, and what the tests' helpers offer is used."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Where a module has another name than what is installed: its distribution."""
OPTIONAL = {"grain"}
"""What only the extra of its name installs."""
BROUGHT = {"pyarrow"}
"""What is imported only to read objects that users bring; if it is not there, an error says so."""


def imported(path: Path) -> set[str]:
    """Return the first parts of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", one)[0].lower() for one in requirements}


def test_the_package_declares_what_it_imports_and_no_more():
    files = (ROOT / "tpu_embed").rglob("*.py")
    found = {name for path in files for name in imported(path)}
    # jax itself requires jaxlib, in the version that it needs.
    found -= {*sys.stdlib_module_names, "tpu_embed", "jaxlib", *BROUGHT}
    names = {DISTRIBUTIONS.get(name, name).lower() for name in found}
    assert names - OPTIONAL == distributions(PROJECT["dependencies"])
    assert names >= OPTIONAL
    for name in OPTIONAL:
        assert name in distributions(PROJECT["optional-dependencies"][name])


def test_every_helper_is_imported_by_a_test():
    """Directly, or by a helper that a test imports; or it is run as a program of its own."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
    # "second_process.py" in a text is a program.
    named = {
        n: imported(p) | {*re.findall(r"\b(\w+)\.py\b", p.read_text())} for n, p in files.items()
    }
    reached = {name for name in files if name.startswith("test_") or name == "conftest"}
    while more := {name for one in reached for name in named[one] & files.keys()} - reached:
        reached |= more
    assert {path.stem for path in (ROOT / "tests" / "helpers").rglob("*.py")} <= reached
