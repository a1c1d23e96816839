"""The declaration of a dynamic vocabulary: what it takes and what it refuses."""

import dataclasses

import numpy as np
import pytest

from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap


def test_values_are_kept():
    one = DynamicVocabulary(admit_after=np.int64(3), evict="lfu", ttl=5, unseen="shared", waiting=9)
    assert one == DynamicVocabulary(admit_after=3, evict="lfu", ttl=5, unseen="shared", waiting=9)
    assert type(one.admit_after) is int
    assert hash(one) == hash(dataclasses.replace(one))
    assert DynamicVocabulary(waiting=0).waiting == 0


REFUSED = [
    ({"admit_after": 0}, r"\.admit_after: expected an integer >= 1, got 0"),
    ({"admit_after": True}, r"\.admit_after: .* got True"),
    ({"evict": "fifo"}, r"\.evict: expected 'lru' \| 'lfu' \| 'none', got 'fifo'"),
    ({"ttl": 0}, r"\.ttl: expected an integer >= 1, got 0"),
    ({"ttl": 2.5}, r"\.ttl: .* got 2.5"),
    ({"unseen": "drop"}, r"\.unseen: expected 'zero' \| 'shared', got 'drop'"),
    ({"waiting": -1}, r"\.waiting: expected an integer >= 0, got -1"),
    ({"waiting": 0, "admit_after": 2}, r"\.waiting: expected an integer >= 1, got 0"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_values_that_are_refused(options, said):
    with pytest.raises(ValueError, match="^DynamicVocabulary" + said):
        DynamicVocabulary(**options)


MAPS = [
    ({}, 0, 0, "^capacity: expected an integer >= 1, got 0"),
    ({"unseen": "shared"}, 1, 0, "^capacity: expected an integer >= 2, got 1"),
    ({}, 2**31, 0, "^capacity: expected at most 2147483647, got 2147483648"),
    ({}, 2**30, 0, r"^DynamicVocabulary\.waiting: expected at most .*; give `waiting`"),
    ({}, 4, -1, "^lookahead: expected an integer >= 0, got -1"),
]


@pytest.mark.parametrize(("options", "capacity", "lookahead", "said"), MAPS)
def test_maps_that_are_refused(options, capacity, lookahead, said):
    with pytest.raises(ValueError, match=said):
        VocabularyMap(DynamicVocabulary(**options), capacity, lookahead)
