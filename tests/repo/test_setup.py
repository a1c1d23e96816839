"""What an editable installation puts on the path, and what each `make` target installs."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parents[2]

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
    shutil.copy(ROOT / "setup.py", tmp_path)
    where = Path(setuptools.__file__).parent
    (tmp_path / "alone").mkdir()
    for package in (where, where.parent / "_distutils_hack"):
        (tmp_path / "alone" / package.name).symlink_to(package)
    needs = ("-c", NEEDS, str(tmp_path / "alone"))
    assert "jaxlib" not in run(sys.executable, *needs, cwd=tmp_path)
    assert "['jaxlib>=0.10.2']" in run(sys.executable, "-S", *needs, cwd=tmp_path)
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "jax>=0.10.2" in required


def extras_of(target, environment):
    """Return the extras that `make` would install for a target, in this environment."""
    said = run("make", "--dry-run", target, f"VENV={environment}", cwd=ROOT)
    return [line.split('"')[1] for line in said.splitlines() if '"tpu-embed[' in line]


def test_an_example_installs_what_it_needs(tmp_path):
    assert extras_of("example", tmp_path) == ["tpu-embed[examples]"]
    assert extras_of("setup", tmp_path) == ["tpu-embed[dev]"]
    assert extras_of("lint", tmp_path) == ["tpu-embed[dev]"]


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
