"""What the files of the project say of each other, of `make` and of what is installed is so."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import setuptools

import tpu_embed

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE, PYPROJECT = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
PROJECT = tomllib.loads(PYPROJECT)["project"]

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
FIND = "import site, sys; site.addsitedir(sys.argv[1]); import tpu_embed; print(tpu_embed.__file__)"


def run(*command, cwd):
    """Return what a command prints, without the packages that the tests themselves see."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=own, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_editable_package_is_found_beside_its_clone(tmp_path):
    """There, the clone is a folder of the package's name, which Python takes for a namespace."""
    clone, site = tmp_path / "tpu_embed", tmp_path / "site"
    package = clone / "tpu_embed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # no setup.py, which compiles kernels
        shutil.copy(ROOT / name, clone)
    run(sys.executable, "-c", BUILD, str(tmp_path), cwd=clone)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    # Without the packages of this environment, in which our own clone may be installed.
    found = run(sys.executable, "-S", "-c", FIND, str(site), cwd=tmp_path)
    assert Path(found.strip()) == package / "__init__.py"


NEEDS = """
import pathlib, sys
sys.path.append(sys.argv[1])
from setuptools import build_meta
print(build_meta.get_requires_for_build_wheel())
"""


def test_jaxlib_is_fetched_only_where_none_is_installed(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    where = Path(setuptools.__file__).parent
    (tmp_path / "alone").mkdir()
    for package in (where, where.parent / "_distutils_hack"):
        (tmp_path / "alone" / package.name).symlink_to(package)
    needs = ("-c", NEEDS, str(tmp_path / "alone"))
    assert "jaxlib" not in run(sys.executable, *needs, cwd=tmp_path)
    assert "['jaxlib>=0.10.2']" in run(sys.executable, "-S", *needs, cwd=tmp_path)
    assert "jax>=0.10.2" in PROJECT["dependencies"]


def extras_of(target, environment):
    """Return the extras that `make` would install for a target, in this environment."""
    said = run("make", "--dry-run", target, f"VENV={environment}", cwd=ROOT)
    return re.findall(r'"tpu-embed\[(.*)\]"', said)


def test_an_example_installs_what_it_needs(tmp_path):
    for target, extra in (("example", "examples"), ("setup", "dev"), ("lint", "dev")):
        assert extras_of(target, tmp_path) == [extra]


def test_one_environment_serves_both_commands(tmp_path):
    """Whichever comes first; the package itself is installed, and its kernels compiled, once."""
    for first, second in (("examples", "setup"), ("dev", "example")):
        environment = tmp_path / first
        environment.mkdir()
        for stamp in (".installed", f".with-{first}"):
            (environment / stamp).touch()
        said = run("make", "--dry-run", second, f"VENV={environment}", cwd=ROOT)
        assert "--editable" not in said
        assert len(extras_of(second, environment)) == 1


def test_the_version_and_its_date_are_the_same_wherever_they_stand():
    version, cited = PROJECT["version"], (ROOT / "CITATION.cff").read_text()
    (date,) = re.findall("^date-released: (.*)$", cited, re.M)
    headings = re.findall("^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["## [Unreleased]", f"## [{version}] - {date}"]
    assert f"\nversion: {version}\n" in cited
    assert tpu_embed.__version__ == version, "run `make setup`: what is installed is older"


def test_the_commands_of_a_release_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "RELEASING.md").read_text()))
    assert {"lint", "test-all", "wheel"} <= named <= targets()


def targets():
    return set(" ".join(re.findall(r"^([\w-]+(?: [\w-]+)*):(?!=)", MAKEFILE, re.M)).split())


def test_workflows_call_targets_of_the_makefile():
    paths = (ROOT / ".github" / "workflows").glob("*.yml")
    text = "\n".join(path.read_text() for path in paths)
    called = {*re.findall(r"run: make ([\w-]+)", text)}
    called |= {*", ".join(re.findall(r"target: \[(.*)\]", text)).split(", ")}
    assert {"test", "lint", "docs", "wheel", "test-all"} <= called <= targets()


def test_oldest_versions_are_those_that_the_package_asks_for():
    oldest = (ROOT / ".github" / "oldest.txt").read_text().split()
    assert f'"{oldest[0].replace("==", ">=")}"' in PYPROJECT
    assert [line.split("==")[1] for line in oldest] == [oldest[0].split("==")[1]] * 2


def test_hooks_are_the_tools_of_make_lint():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = re.findall(r"entry: \.venv/bin/python -m (\w+(?: check| format)?)", hooks)
    assert len(tools) == 3
    assert all(f"$(PY) -m {tool}" in MAKEFILE for tool in tools)


def test_benchmarks_of_the_makefile_exist():
    (listed,) = re.findall(r"for name in (.*); do \\\n.*benchmarks", MAKEFILE)
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in listed.split())


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
    programs = re.compile(r"\b(\w+)\.py\b")
    named = {n: imported(p) | {*programs.findall(p.read_text())} for n, p in files.items()}
    reached = {name for name in files if name.startswith("test_") or name == "conftest"}
    while more := {name for one in reached for name in named[one] & files.keys()} - reached:
        reached |= more
    assert {path.stem for path in (ROOT / "tests" / "helpers").rglob("*.py")} <= reached
