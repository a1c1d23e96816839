"""Rows of jagged features on the host."""

import numpy as np
import pytest

from tpu_embed import FeatureConfig, SparseIds, TableConfig
from tpu_embed.core.ids import host_ids

TABLE = TableConfig(10, 2)


def sparse(column, examples=4):
    return SparseIds(np.array([[1, 0], [2, column]]), np.array([3, 4]), (examples, column + 1))


def test_a_far_column_is_refused_before_it_takes_memory():
    feature = FeatureConfig(TABLE, jagged=True)
    says = r"'x'.*100000002 places for 2 ids: example 2 .* column 100000000; max_sequence_length"
    with pytest.raises(ValueError, match=says):
        host_ids("feature 'x'", feature, "t", sparse(10**8), None)
    assert (
        host_ids("feature 'x'", feature, "t", sparse(10**6), None).rows.row_splits[-1] == 10**6 + 2
    )
    cut = FeatureConfig(TABLE, jagged=True, max_sequence_length=5)
    assert host_ids("feature 'x'", cut, "t", sparse(10**8), None).rows.row_splits.tolist() == [
        0,
        0,
        1,
        6,
        6,
    ]
