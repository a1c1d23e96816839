"""The ids of a batch, counted by hand."""

import json

import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.metrics import batch_statistics


def test_ids_are_counted_by_table():
    films, users = TableConfig(10, 2, name="films"), TableConfig(5, 2, name="users")
    features = {
        "bag": FeatureConfig(films, on_bad_id="drop"),
        "ragged": FeatureConfig(films, on_bad_id="drop"),
        "sequence": FeatureConfig(films, max_sequence_length=2),
        "sparse": FeatureConfig(users, on_bad_id="clip"),
    }
    ids = {
        "bag": np.array([[7, -1], [7, 3], [12, 3], [-1, -1]]),
        "ragged": RaggedIds.from_lists([[7, 7], [-3], [1], []]),
        "sequence": np.array([[2, -1, 9], [-1, -1, 9], [9, 7, 9], [2, 1, 9]]),
        "sparse": SparseIds.from_lists([[9], [], [4, 1], []]),
    }
    statistics = batch_statistics(EmbeddingEngine(features, mesh=mesh(2)), ids, hottest=3)
    names = "ids", "unique", "unique_ratio", "bad", "hottest", "hottest_share"
    expected = {
        "films": (12, 5, 5 / 12, 2, [(7, 5), (1, 2), (2, 2)], 5 / 12),
        "users": (3, 2, 2 / 3, 1, [(4, 2), (1, 1)], 2 / 3),
    }
    assert statistics == {
        name: dict(zip(names, numbers, strict=True)) for name, numbers in expected.items()
    }
    assert json.loads(json.dumps(statistics))["films"]["hottest"][0] == [7, 5]


@pytest.fixture
def engine():
    return EmbeddingEngine([FeatureConfig(TableConfig(4, 2, name="t"))], mesh=mesh(1))


def test_a_batch_without_ids(engine):
    empty = {"ids": 0, "unique": 0, "unique_ratio": 0.0, "bad": 0, "hottest": []}
    assert batch_statistics(engine, [np.full((2, 3), -1)]) == {"t": {**empty, "hottest_share": 0.0}}


def test_what_place_refuses_is_refused(engine):
    for ids, hottest, said in (
        ([np.array([4])], 1, r"ids in \[0, 4\) of table 't', got id 4"),
        ([np.array([1])] * 2, 1, "features: "),
        ([np.array([1])], 0, "hottest: expected an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            batch_statistics(engine, ids, hottest=hottest)
