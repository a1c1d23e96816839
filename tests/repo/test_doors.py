"""A feature ends at one door: it is named in few rooms of the package, and in no more than now."""

import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tpu_embed"
NAMED = {  # what the identifiers of a feature look like, and in how many rooms they may stand
    "jagged": (r"jagged", 9),
    "rows on the host": (r"on_host|host_?rows|host_?storage|hosted|homes", 12),
    "several processes": (
        r"^(process_count|process_index|agreement|raise_on_all|all_processes|gather_bytes|share)$",
        10,
    ),
    "keys without a row": (r"unseen", 8),
    "signal handlers": (r"_signals|keyboardinterrupt", 0),
}


def identifiers(path):
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        return {token.string.lower() for token in tokens if token.type == tokenize.NAME}


def room(path):
    """Return the package that a module is in; each package of `core` and `io` is a room."""
    first, *below = path.relative_to(PACKAGE).parts[:-1] or (".",)
    return f"{first}/{below[0]}" if below and first in ("core", "io", "training") else first


@pytest.fixture(scope="module")
def modules():
    return {path: identifiers(path) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("feature", NAMED)
def test_a_feature_is_named_in_no_more_rooms(feature, modules):
    pattern, most = NAMED[feature]
    rooms = {
        room(path) for path, names in modules.items() if any(re.search(pattern, n) for n in names)
    }
    assert len(rooms) <= most, f"{feature}: {sorted(rooms)}; see docs/architecture.md"
    assert rooms or not most, "nothing has this name any more"
