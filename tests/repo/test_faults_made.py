"""The faults that are made by hand can be made: the text that each replaces stands once."""

import faults
from faults_made import MADE


def test_the_replaced_text_stands_once():
    assert len(faults.made()) == len(MADE)  # it refuses others
    assert all(new != old for _, old, new, _ in MADE)
