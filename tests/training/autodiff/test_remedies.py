"""Every error of `training` names a remedy."""

import ast
from pathlib import Path

import pytest

from tpu_embed import training

PACKAGE = Path(training.__file__).parent
FILES = sorted(path.name for path in PACKAGE.glob("*.py"))


def without_remedy(source):
    """Return the lines of the messages that have none."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) == "message" and "remedy" not in {k.arg for k in call.keywords}
    ]


@pytest.mark.parametrize("name", FILES)
def test_errors_have_a_remedy(name):
    assert without_remedy((PACKAGE / name).read_text()) == []


def test_an_error_without_a_remedy_is_found():
    source = "message('x', expected='a', got='b')\nmessage('x', expected='a', got='b', remedy='c')"
    assert without_remedy(source) == [1]
