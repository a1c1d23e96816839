"""What the package imports is declared, and what the tests' helpers offer is used."""

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Where a module has another name than what is installed: its distribution."""
OPTIONAL = {"grain": "grain"}
"""What only extras install -> the extra that has it."""
BROUGHT = {"pyarrow"}
"""What is imported only to read objects that users bring; if it is not there, an error says so."""


@functools.cache
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


def third_party(paths) -> set[str]:
    known = {*sys.stdlib_module_names, "tpu_embed"}
    return {name for path in paths for name in imported(path)} - known


def test_the_package_declares_what_it_imports():
    required = distributions(PROJECT["dependencies"])
    found = third_party((ROOT / "tpu_embed").rglob("*.py"))
    names = {name: DISTRIBUTIONS.get(name, name).lower() for name in found}
    missing = {name for name in found if names[name] not in required}
    missing -= {"jaxlib", *BROUGHT}  # jax itself requires jaxlib, in the version that it needs
    assert missing == set(OPTIONAL), f"not in `dependencies` of pyproject.toml: {missing}"
    for name in missing:
        extra = PROJECT["optional-dependencies"][OPTIONAL[name]]
        assert names[name] in distributions(extra), f"{name} is not in its extra"


def test_every_dependency_is_imported():
    found = third_party((ROOT / "tpu_embed").rglob("*.py"))
    names = {DISTRIBUTIONS.get(name, name).lower() for name in found}
    assert distributions(PROJECT["dependencies"]) <= names


HELPERS = sorted(p.stem for p in (ROOT / "tests" / "helpers").rglob("*.py"))


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.quick(27)
def test_every_helper_is_imported_by_a_test(helper):
    """Directly, or by a helper that a test imports; or it is run as a program of its own."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.stem != helper]
    reached = {helper}
    while more := {
        path.stem
        for path in files
        if path.stem not in reached and (imported(path) & reached or _runs(path, reached))
    }:
        reached |= more
    assert any(stem.startswith("test_") or stem == "conftest" for stem in reached)


def _runs(path: Path, helpers: set[str]) -> bool:
    """Tell whether a file names one of the helpers as a program, such as "second_process.py"."""
    return not helpers.isdisjoint(_programs(path))


@functools.cache
def _programs(path: Path) -> set[str]:
    return set(re.findall(r"\b(\w+)\.py\b", path.read_text()))
