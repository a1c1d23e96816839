"""The map from keys to rows: equal to plain Python, in C++ and in NumPy, also when undone."""

import copy
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import vocabulary_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_vocabulary import HeapOracle, VocabularyOracle
from vocabulary_cases import NO_KEYS, NO_ROWS, ODD_KEYS, assert_same, built_kernels, make_map, take

from tpu_embed.kernels import cpu, host_native
from tpu_embed.kernels.vocabulary_reference import MAX_STEP

BUILT = built_kernels()
both = pytest.mark.parametrize("kernels", BUILT)
compiled = pytest.mark.skipif(len(BUILT) == 1, reason=f"library: {cpu.load().why_not}")


# -- Random batches --------------------------------------------------------------------------------

KEYS = st.integers(0, 11) | st.sampled_from(ODD_KEYS)
BATCHES = st.lists(st.lists(KEYS, max_size=8), max_size=14)
OPTIONS = st.fixed_dictionaries(
    {
        "admit_after": st.integers(1, 3),
        "evict": st.sampled_from(["lru", "lfu", "none"]),
        "ttl": st.none() | st.integers(1, 5),
        "waiting": st.integers(1, 6),
    }
)


@both
@settings(max_examples=150)
@given(BATCHES, OPTIONS, st.integers(1, 7), st.integers(0, 2), st.data())
@pytest.mark.quick(1)
def test_every_step_is_the_oracles(kernels, batches, options, capacity, lookahead, data):
    """Also after steps were undone, and states are those of the steps before."""
    found = make_map(kernels, capacity, lookahead, **options)
    oracle = VocabularyOracle(capacity, lookahead=lookahead, **options)
    past, earliest = [copy.deepcopy(oracle)], 0
    for batch in batches:
        vocabulary_cases.check_step(found, oracle, batch, at_once=data.draw(st.integers(0, 4)) == 0)
        past.append(copy.deepcopy(oracle))
        for step in {earliest, data.draw(st.integers(earliest, oracle.step))}:
            vocabulary_cases.check_state(found.state(step), past[step].state())
        if data.draw(st.integers(0, 3)) == 0:
            step = data.draw(st.integers(earliest, oracle.step))
            found.rewind(step)
            oracle = copy.deepcopy(past[step])
            del past[step + 1 :]
            vocabulary_cases.check_state(found.state(), oracle.state())
        if data.draw(st.integers(0, 3)) == 0:
            earliest = data.draw(st.integers(earliest, oracle.step))
            found.forget(earliest)
            assert found.earliest == earliest
    keys, rows = found.keys()
    assert found.find(keys).tolist() == rows.tolist()


@settings(max_examples=100)
@given(BATCHES, OPTIONS, st.integers(1, 7), st.integers(0, 2))
def test_the_oracle_of_long_streams_is_the_oracle(batches, options, capacity, lookahead):
    slow = VocabularyOracle(capacity, lookahead=lookahead, **options)
    fast = HeapOracle(capacity, lookahead=lookahead, **options)
    for batch in batches:
        assert slow.take(batch) == fast.take(batch)
    assert slow.state() == fast.state()


@both
@given(BATCHES, BATCHES, OPTIONS, st.integers(1, 7), st.integers(0, 2))
@settings(max_examples=50)
@pytest.mark.quick(1)
def test_a_loaded_state_goes_on_as_the_map_did(kernels, before, after, options, rows, lookahead):
    one = make_map(kernels, rows, lookahead, **options)
    for batch in before:
        take(one, batch)
    first = one.step
    for other_kernels in BUILT:
        two = make_map(other_kernels, rows, lookahead, **options)
        take(two, [99, 98])
        two.load_state(one.state())
        assert two.earliest == two.step == first
        for batch in after:
            assert_same(take(one, batch), take(two, batch))
        assert_same(one.state(), two.state())
        one.rewind(first)


@compiled
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.quick(3)
def test_streams_with_all_calls_are_the_same_natively(seed):
    vocabulary_cases.check_random_map(np.random.default_rng(seed))


# -- Examples --------------------------------------------------------------------------------------

LFU, WAIT, BRIEF = {"evict": "lfu"}, {"admit_after": 3, "waiting": 2}, {"evict": "none", "ttl": 2}
SEEN = [[1, 2, 3], [1, 2], [1], [3], [3]]
NEW = [[10], [11], [12], [20, 21, 22]]
EXAMPLES = {
    # 7 and 3 were seen in one step: the lower row first.
    "seen longest ago": (3, 0, {}, [[7, 5, 3], [5], [9, 9, 8]], [0, 0, 2], [0, 2]),
    "in the fewest batches": (3, 0, LFU, [*SEEN, [4]], [1], [1]),
    "4 was seen once": (3, 0, LFU, [*SEEN, [4], [5]], [1], [1]),
    # Three wait, one too many: 1 was first counted longest ago.
    "not in enough batches": (4, 0, WAIT, [[1, 1, 1], [2], [1, 3]], [-1, -1], []),
    "in enough batches": (4, 0, WAIT, [[1, 1], [2], [1, 3], [3, 2], [3, 2]], [0, 1], []),
    "its ttl has passed": (4, 0, BRIEF, [[8, 9], *[[8]] * 3], [0], [1]),
    "its ttl will pass": (4, 4, BRIEF, [[8, 9], *[[8]] * 4], [0], []),
    "a lookahead later": (4, 4, BRIEF, [[8, 9], *[[8]] * 5], [0], [1]),
    "rescued from its ttl": (2, 0, {"ttl": 1}, [[3], [], [3]], [0], []),
    "nothing ahead": (3, 0, {}, NEW, [0, 1, 2], [0, 1, 2]),
    "one batch ahead": (3, 1, {}, NEW, [0, 1, -1], [0, 1]),
    "two batches ahead": (3, 2, LFU, NEW, [0, -1, -1], [0]),
    "more keys than rows": (2, 0, {}, [range(5)], [0, 1, -1, -1, -1], []),
    "a shared row": (3, 0, {"unseen": "shared"}, [range(4)], [0, 1, -1, -1], []),
}


@both
@pytest.mark.parametrize("case", EXAMPLES)
def test_the_last_batch_of_an_example(kernels, case):
    capacity, lookahead, options, batches, rows, evicted = EXAMPLES[case]
    found = make_map(kernels, capacity, lookahead, **options)
    for batch in batches:
        taken = take(found, batch)
    assert found.find(np.array(batch, np.uint64)).tolist() == rows
    assert taken.evicted_rows.tolist() == evicted
    assert taken.unseen == rows.count(-1)


@both
def test_parts_of_arrays_are_taken_and_an_empty_batch_is_a_step(kernels):
    found, keys = make_map(kernels, 8), np.arange(8, dtype=np.uint64)
    assert found.take(NO_ROWS, keys[::2]).new_keys.tolist() == [0, 2, 4, 6]
    assert found.find(keys[::-2]).tolist() == [-1] * 4
    assert found.find(keys[::2]).tolist() == [0, 1, 2, 3]
    taken = found.take(NO_ROWS, NO_KEYS)
    assert (taken.step, taken.unseen, taken.rows.size, taken.new_rows.size) == (2, 0, 0, 0)
    assert found.find(NO_KEYS).dtype == np.int64
    assert (found.step, len(found)) == (2, 4)


# -- Refusals --------------------------------------------------------------------------------------


NOT_TAKEN = "known: expected rows of known keys, got the row "
REFUSED = [
    ([0, 2], [9], NOT_TAKEN + "2; "),
    ([4], [9], NOT_TAKEN + "4"),
    ([-1], [9], NOT_TAKEN + "-1"),
    ([2**40], [9], NOT_TAKEN + "1099511627776"),
    ([0], [9, 7], "unknown: expected keys without a row, got the key 7; "),
]


@both
@pytest.mark.parametrize(("known", "unknown", "said"), REFUSED)
def test_a_batch_that_does_not_fit_changes_nothing(kernels, known, unknown, said):
    found = make_map(kernels, 4)
    take(found, [7, 8])
    before = found.state()
    with pytest.raises(ValueError, match="^VocabularyMap.take: " + said):
        found.take(np.array(known), np.array(unknown, np.uint64))
    assert_same(found.state(), before)
    assert take(found, [9]).rows.tolist() == [2]


@both
def test_steps_that_the_log_does_not_reach_are_refused(kernels):
    found = make_map(kernels, 4)
    for key in range(3):
        take(found, [key])
    found.forget(1)
    found.forget(0)  # already forgotten
    for call in (found.rewind, found.state):
        for step in (0, 4, 1.0, True):
            with pytest.raises(ValueError, match=r"expected a step in \[1, 3\], which the log "):
                call(step)
    with pytest.raises(ValueError, match=r"^VocabularyMap.forget: expected a step of at most 3"):
        found.forget(4)
    found.rewind(1)
    assert found.find(np.arange(3, dtype=np.uint64)).tolist() == [0, -1, -1]


@both
def test_the_last_step_is_the_last(kernels):
    found = make_map(kernels, 2, evict="lfu")
    take(found, [7])
    found.load_state(found.state()._replace(step=np.array(MAX_STEP - 1)))
    assert take(found, [8, 9]).rows.tolist() == [1, 0]
    assert found.state().last_seen.tolist() == [MAX_STEP] * 2
    with pytest.raises(ValueError, match=r"^VocabularyMap.take: expected at most 4294967294 batc"):
        take(found, [8])
    assert found.step == MAX_STEP


@both
def test_a_map_is_not_copied(kernels):
    found = make_map(kernels, 4)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^pickle of VocabularyMap: .*load_state"):
            copied(found)


# -- Keys of a batch -------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("seed", range(8))
def test_keys_are_numbered_and_split_as_loops_do(seed):
    vocabulary_cases.check_random_keys(np.random.default_rng(seed))


@compiled
def test_many_keys_are_numbered():
    """The index grows while more keys come than it has room for at first, twice."""
    keys = np.random.default_rng(0).permutation(np.repeat(np.arange(30_000, dtype=np.uint64), 2))
    distinct, positions, first = host_native.distinct_keys(keys)
    np.testing.assert_array_equal(np.sort(distinct), np.arange(30_000))
    np.testing.assert_array_equal(distinct[positions], keys)
    np.testing.assert_array_equal(keys[first], distinct)
    assert (np.diff(first) > 0).all()
    assert all((keys[:at] != keys[at]).all() for at in first[::1_000])


# -- Threads ---------------------------------------------------------------------------------------


@both
def test_threads_may_take_batches(kernels):
    """Of keys of their own: every key has a row of its own, whatever the order of the batches."""
    found = make_map(kernels, 4 * 600)
    with ThreadPoolExecutor(4) as pool:
        batches = np.arange(4 * 600, dtype=np.uint64).reshape(80, 30)
        list(pool.map(functools.partial(take, found), batches))
    assert found.step == 80
    keys, rows = found.keys()
    assert sorted(keys.tolist()) == rows.tolist() == list(range(4 * 600))


@both
def test_find_sees_a_map_between_two_batches(kernels):
    """Whatever other threads take meanwhile: all keys of one batch have rows, or none has."""
    keys = np.arange(40_000, dtype=np.uint64).reshape(20, -1)
    found, done = make_map(kernels, keys.shape[1]), threading.Event()

    def look():
        while not done.is_set():
            for batch in keys:
                rows = found.find(batch)
                assert (rows == -1).all() or (rows == np.arange(batch.size)).all()

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        for batch in keys:
            take(found, batch)
        done.set()
        for one in looking:
            one.result()
    assert found.find(keys[-1]).tolist() == list(range(keys.shape[1]))
