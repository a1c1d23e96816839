"""Fixtures of the DLRM-DCNv2 example: lines in Criteo's format, as files and converted."""

import gzip

import numpy as np
import pytest
from dlrm_cases import ROWS, criteo, dlrm_data, line, write


@pytest.fixture(scope="session")
def lines():
    """Return 100 lines, some fields missing, and what they should become."""
    rng = np.random.default_rng(0)
    label = rng.integers(2, size=100)
    integers = rng.integers(-3, 1000, size=(100, 13))
    numbers = rng.integers(2**32, size=(100, 26))
    no_integer, no_number = rng.random((100, 13)) < 0.2, rng.random((100, 26)) < 0.2
    text = [
        line(
            label[i],
            ["" if no_integer[i, j] else str(integers[i, j]) for j in range(13)],
            ["" if no_number[i, j] else f"{numbers[i, j]:08x}" for j in range(26)],
        )
        for i in range(100)
    ]
    dense = np.log(np.where(no_integer, 0, np.maximum(integers, 0)) + 1.0)
    ids = np.where(no_number, 0, numbers) % np.array(ROWS)
    return text, label, dense, ids


@pytest.fixture(scope="session")
def files(lines, tmp_path_factory):
    """Return a plain file of 60 lines and a compressed one of 40."""
    directory = tmp_path_factory.mktemp("criteo")
    packed = gzip.compress("\r\n".join(lines[0][60:]).encode())  # no end of line after the last
    (directory / "day_1.gz").write_bytes(packed)
    return [write(directory / "day_0", lines[0][:60]), directory / "day_1.gz"]


@pytest.fixture(scope="session")
def converted(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("binary")
    assert criteo.convert(files, directory, ROWS) == 100
    return directory


@pytest.fixture(scope="session")
def stored(converted):
    return dlrm_data.Stored.open(converted, ROWS)
