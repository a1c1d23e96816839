"""Keys with and without a row are found alike by where keys come first, and by a pass over ids."""

import dataclasses

import numpy as np
import pytest

from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, RaggedIds, TableConfig
from tpu_embed.core.ids import host_ids, split_keys

IDS = np.random.default_rng(0).integers(0, 40, (16, 6))
PADDED = np.where(IDS < 8, -1, IDS)
RAGGED = RaggedIds(IDS.reshape(-1), np.arange(17) * 6)
LAST = {"max_sequence_length": 4, "keep": "last"}
KEYS, STORED = {"vocabulary": DynamicVocabulary()}, {"storage": HostStorage(device_rows=20)}
KNOWN = [
    (KEYS, IDS, {}),
    (KEYS, IDS[:, 0], {}),
    (KEYS, IDS, {"max_sequence_length": 6, "keep": "last"}),
    (STORED, IDS, {}),
    (STORED, IDS, {"max_sequence_length": 4}),
    (STORED, RAGGED, {}),
]
UNKNOWN = [(KEYS, PADDED, {}), (KEYS, IDS, LAST), (KEYS, RAGGED, {}), (STORED, PADDED, {})]


def read(made, ids, options):
    table = TableConfig(64, 4, combiner="sum", name="t", **made)
    return host_ids("x", FeatureConfig(table, **options), "t", ids, None)


@pytest.mark.parametrize(("made", "ids", "options"), KNOWN)
def test_first_places_split_as_a_pass_over_the_ids_does(made, ids, options):
    host = read(made, ids, options)
    assert host.first is not None
    rows = np.arange(host.keys.size, dtype=np.int32)
    rows[::3] = -1
    passed = split_keys(dataclasses.replace(host, first=None), rows)
    for one, other in zip(split_keys(host, rows), passed, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize(("made", "ids", "options"), UNKNOWN)
def test_no_first_places_of_keys_that_may_be_left_out(made, ids, options):
    assert read(made, ids, options).first is None
