"""What `docs/release.md` says of the version, the changelog and the commands is so."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_same_in_both_places():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == version


def test_the_changelog_begins_with_what_is_not_released():
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "[Unreleased]"


def test_the_commands_of_a_release_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "docs/release.md").read_text()))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"lint", "test-all", "wheel"} <= named <= set(targets)
