"""Rows of jagged features on the host."""

import numpy as np
import pytest

from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.core.ids import host_ids

TABLE = TableConfig(10, 2)


def sparse(column, examples=4):
    return SparseIds(np.array([[1, 0], [2, column]]), np.array([3, 4]), (examples, column + 1))


def test_a_far_column_is_refused_before_it_takes_memory(refused):
    feature = FeatureConfig(TABLE, jagged=True)
    says = r"'x'.*100000002 places for 2 ids: example 2 .* column 100000000; max_sequence_length"
    refused(says, host_ids, "feature 'x'", feature, "t", sparse(10**8), None)
    assert host_ids("x", feature, "t", sparse(10**6), None).rows.row_splits[-1] == 10**6 + 2
    cut = FeatureConfig(TABLE, jagged=True, max_sequence_length=5)
    splits = host_ids("x", cut, "t", sparse(10**8), None).rows.row_splits
    assert splits.tolist() == [0, 0, 1, 6, 6]


def rows_of(ids, form):
    """Return rows in a form of ids; a hole -1 is padding, or a column that is left out."""
    if form == "dense":
        width = max(len(row) for row in ids)
        return np.array([row + [-1] * (width - len(row)) for row in ids])
    entries = [(e, c, n) for e, row in enumerate(ids) for c, n in enumerate(row) if n >= 0]
    examples, columns, numbers = np.array(entries).T
    return SparseIds(np.stack([examples, columns], 1), numbers, (len(ids), 9))


ROWS = [[1, 2, 3, 4, 5], [6], [-1, 7, -1, 8], [9, -1, 2, 3], [5, 4, 3]]
LAST = [[3, 4, 5], [6], [7, -1, 8], [-1, 2, 3], [5, 4, 3]]
FIRST = [[1, 2, 3], [6], [-1, 7, -1], [9, -1, 2], [5, 4, 3]]


@pytest.mark.parametrize("form", ["dense", "sparse", "ragged"])
@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("jagged", [False, True])
def test_the_first_or_the_last_ids_are_kept(form, keep, jagged):
    given, expected = ROWS, {"first": FIRST, "last": LAST}[keep]
    if form == "ragged":
        given = [[n for n in row if n >= 0] for row in ROWS]
        expected = [row[:3] if keep == "first" else row[-3:] for row in given]
    ids = RaggedIds.from_lists(given) if form == "ragged" else rows_of(given, form)
    feature = FeatureConfig(TABLE, 3, jagged=jagged, keep=keep)
    found = host_ids("feature 'x'", feature, "t", ids, None)
    if jagged:
        splits = found.rows.row_splits
        assert np.diff(splits).tolist() == [len(row) for row in expected]
        line = np.full(splits[-1], -1)
        line[found.rows.places] = found.ids
        assert line.tolist() == [n for row in expected for n in row]
        return
    line = np.full((5, 3), -1)
    if found.bags is None:
        line[:] = found.ids[..., 0]
    else:
        line.reshape(-1)[found.bags] = found.ids
    assert line.tolist() == [row + [-1] * (3 - len(row)) for row in expected]


def test_only_sequences_are_cut(refused):
    refused(r"keep: .*max_sequence_length", FeatureConfig, TABLE, keep="last")
    refused(r"keep: .*first.*last", FeatureConfig, TABLE, 3, keep="both")
