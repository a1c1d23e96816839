"""The faults that are made by hand can be made: the text that each replaces stands once."""

from pathlib import Path

import pytest
from faults_made import MADE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("path", "old", "new", "what"), MADE, ids=lambda one: None)
def test_the_replaced_text_stands_once(path, old, new, what):
    assert (ROOT / path).read_text().count(old) == 1, what
    assert new != old
