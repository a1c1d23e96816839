"""What `RELEASING.md` says of the version, the changelog and the commands is so."""

import re
import tomllib
from pathlib import Path

import tpu_embed

ROOT = Path(__file__).resolve().parents[2]


def lines(name, beginning):
    """Return the lines of a file that begin with a pattern."""
    return re.findall(f"^{beginning}.*$", (ROOT / name).read_text(), re.MULTILINE)


def test_the_version_and_its_date_are_the_same_wherever_they_stand():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = dict(
        line.split(": ", 1) for line in lines("CITATION.cff", r"(?:version|date-released):")
    )
    unreleased, newest = lines("CHANGELOG.md", "## ")[:2]
    assert unreleased == "## [Unreleased]"
    assert newest == f"## [{version}] - {cited['date-released']}"
    assert cited["version"] == version
    assert tpu_embed.__version__ == version, "run `make setup`: what is installed is older"


def test_the_commands_of_a_release_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "RELEASING.md").read_text()))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"lint", "test-all", "wheel"} <= named <= set(targets)
