"""One word, one thing: words that were given up, and why; comments where they are needed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted((ROOT / "tpu_embed").rglob("*.py"))
PATTERNS = "docs/**/*.md examples/**/*.py benchmarks/**/*.py README.md CONTRIBUTING.md"
PROSE = [*CODE, *(path for pattern in PATTERNS.split() for path in sorted(ROOT.glob(pattern)))]

REFUSED = {
    r"\bdoors?\b": "say functional API or stateful API",
    r"\b(Feature|Row|Bag)Form\b": "FeatureShape, RowFormat and BagLayout are three things",
    r"\bGroup(Spec)?\b": "tables in one array are a stack: Stack, StackSpec",
    r"\b(Unions|Ticket|StateHolder)\b": "say Rooms, Order and StateKeeper",
    r"\bsteps_of\b|: Steps\b": "a batch has ValidSteps, a state has a map_version",
    r"\bCalled by\b": "who calls goes stale; say what it is for",
    r"^(Enters|Leaves):": "say Input and Output",
    (
        r"\b(a|an|one) "
        r"(activation|array|bag|gradient|id|key|leaf|line|lookup|number|part|row|weight) "
        r"an? (bag|block|column|device|feature|id|layer|leaf|lookup|row|shard|slot|stack|table)\b"
    ): "say one … per …",
}
"""Patterns that code and docs do not have, and what is said instead."""


def found(pattern, paths=PROSE):
    """Return path:line of every line that has the pattern."""
    wanted = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if wanted.search(line)
    ]


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_word_is_given_up(pattern):
    assert not found(pattern), REFUSED[pattern]


def test_a_group_is_a_group_of_replicas_or_of_rows_on_the_host():
    core = [path for path in CODE if not {"training", "storage", "vocabulary"} & {*path.parts}]
    assert not found(r"(?<!\.)\bgroups?\b(?!\()", core), "tables in one array are a stack"


@pytest.mark.parametrize("package", ["core", "kernels", "training"])
def test_comments_say_why(package):
    """At least 3 lines of comments in 100 lines that are not empty, docstrings among them."""
    texts = (path.read_text() for path in CODE if package in path.parts)
    lines = "\n".join(texts).split("\n")
    comments = sum(line.lstrip().startswith("#") for line in lines)
    assert comments >= 0.03 * sum(map(bool, lines)), comments
