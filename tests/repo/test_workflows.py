"""What the workflows and the pre-commit hooks run exists here."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets() -> set[str]:
    rules = re.findall(r"^([\w-]+(?: [\w-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    return {name for rule in rules for name in rule.split()}


def test_workflows_call_targets_of_the_makefile():
    texts = [path.read_text() for path in WORKFLOWS]
    called = {name for text in texts for name in re.findall(r"run: make ([\w-]+)", text)}
    matrix = re.findall(r"target: \[(.*)\]", "".join(texts))
    called |= {name for listed in matrix for name in listed.split(", ")}
    assert {"test", "lint", "docs", "wheel", "test-all"} <= called <= targets()


def test_oldest_versions_are_those_that_the_package_asks_for():
    oldest = (ROOT / ".github" / "oldest.txt").read_text().split()
    wanted = (ROOT / "pyproject.toml").read_text()
    assert f'"{oldest[0].replace("==", ">=")}"' in wanted
    assert [line.split("==")[1] for line in oldest] == [oldest[0].split("==")[1]] * 2


def test_hooks_are_the_tools_of_make_lint():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = re.findall(r"entry: \.venv/bin/python -m (\w+(?: check| format)?)", hooks)
    lint = (ROOT / "Makefile").read_text()
    assert len(tools) == 3
    assert all(f"$(PY) -m {tool}" in lint for tool in tools)


def test_benchmarks_of_the_makefile_exist():
    (listed,) = re.findall(
        r"for name in (.*); do \\\n.*benchmarks", (ROOT / "Makefile").read_text()
    )
    assert {f"{name}.py" for name in listed.split()} <= {
        path.name for path in (ROOT / "benchmarks").iterdir()
    }
