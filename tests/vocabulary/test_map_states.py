"""States of maps: what cannot be one is refused, and one fits another capacity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_cases import assert_same, take

from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap
from tpu_embed.vocabulary.map import fit

BATCHES = st.lists(st.lists(st.integers(0, 15), max_size=8), max_size=12)


def grown(batches, capacity, **options):
    """Return a map that has taken the batches."""
    grown = VocabularyMap(DynamicVocabulary(**options), capacity)
    for batch in batches:
        take(grown, batch)
    return grown


# -- Other capacities ------------------------------------------------------------------------------


@settings(max_examples=100)
@given(BATCHES, st.sampled_from(["lru", "lfu", "none"]), st.integers(1, 9), st.integers(1, 9))
def test_the_best_keys_stay(batches, evict, before, after):
    """Those that the map would evict last; what is left is a state that a map goes on from."""
    old = grown(batches, before, evict=evict, admit_after=2)
    vocabulary = DynamicVocabulary(evict=evict, admit_after=2, waiting=3)
    state = old.state()
    fitted, rows_before = fit(state, after, vocabulary)
    columns = zip(*(getattr(state, name).tolist() for name in state._fields[:4]), strict=True)
    scores = [((seen if evict == "lfu" else 0, last, row), key) for key, row, last, seen in columns]
    best = [key for _, key in sorted(scores)[max(0, len(scores) - after) :]]
    assert sorted(fitted.keys.tolist()) == sorted(best)
    of_key = dict(zip(state.keys.tolist(), state.rows.tolist(), strict=True))
    assert rows_before.tolist() == [of_key[key] for key in fitted.keys.tolist()]
    pairs = list(zip(rows_before.tolist(), fitted.rows.tolist(), strict=True))
    kept = [was for was, _ in pairs if was < after]
    assert [now for was, now in pairs if was < after] == kept
    moved = [now for was, now in sorted(pairs) if was >= after]
    free = [row for row in range(after) if row not in kept]
    assert moved == free[: len(moved)]
    new = VocabularyMap(vocabulary, after)
    new.load_state(fitted)
    assert_same(new.state(), fitted)
    counters = new.counters
    assert counters["admitted"] == counters["evicted"] + counters["expired"] + len(new)
    assert fitted.waiting_keys.tolist() == state.waiting_keys.tolist()[-3:]
    forgotten = max(0, state.waiting_keys.size - 3)
    assert counters["forgotten"] == old.counters["forgotten"] + forgotten


def test_a_state_fits_its_own_capacity():
    old = grown([[1, 2, 3], [2], [9, 8]], 4)
    fitted, rows_before = fit(old.state(), 4, DynamicVocabulary())
    assert_same(fitted, old.state())
    assert rows_before.tolist() == fitted.rows.tolist()


def test_the_shared_row_is_not_fitted_to():
    old = grown([[1, 2, 3]], 3)
    fitted, rows_before = fit(old.state(), 3, DynamicVocabulary(unseen="shared"))
    assert fitted.keys.tolist() == [3, 2]
    assert rows_before.tolist() == [2, 1]


# -- What cannot be a state ------------------------------------------------------------------------

REFUSED = [
    ("rows", lambda x: x.astype(np.int32), "rows: expected int64 of shape .* got int32"),
    ("last_seen", lambda x: x[1:], "last_seen: expected int64 of shape"),
    ("counters", lambda x: x[1:], r"counters: expected int64 of shape \(5,\)"),
    ("step", lambda x: x - 9, "step: expected a number in"),
    ("step", lambda x: x - 1, r"last_seen: expected steps in \[1, 1\]"),
    ("rows", lambda x: x[::-1], r"rows: expected ascending numbers in \[0, 4\)"),
    ("rows", lambda x: x + 2, r"rows: expected ascending numbers in \[0, 4\)"),
    ("rows", lambda x: x - 1, "rows: expected ascending"),
    ("batches_seen", lambda x: x * 0, "batches_seen: expected counts in"),
    ("waiting_counts", lambda x: x + 9, "waiting_counts: expected counts in"),
    ("keys", lambda x: x * 0, "keys: expected distinct keys, none of them waiting"),
    ("waiting_keys", lambda x: x * 0 + 1, "keys: expected distinct keys, none of"),
]


@pytest.mark.parametrize(("field", "change", "said"), REFUSED)
def test_what_no_map_can_have_is_refused(field, change, said):
    old = grown([[1, 2, 3], [1, 2, 3, 4]], 4, admit_after=2)
    before = old.state()
    wrong = before._replace(**{field: change(getattr(before, field))})
    with pytest.raises(ValueError, match=rf"^MapState\.{said}"):
        old.load_state(wrong)
    assert_same(old.state(), before)
    take(old, [4])
    assert old.find(np.array([4], np.uint64)).tolist() == [3]
