"""Hashing: the formula and its stability, and keys in columns and bags."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig, hash_ids
from tpu_embed.io import serving_lookup

MASK = 2**64 - 1
V = 1_000_003


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def _formula(key: int | str | bytes, vocabulary_size: int, seed: int = 0) -> int:
    s = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    if isinstance(key, int):
        return _mix((key & MASK) ^ s) % vocabulary_size
    data = key.encode() if isinstance(key, str) else key
    h = _mix(len(data) ^ s)
    for start in range(0, len(data), 8):
        h = _mix(h ^ int.from_bytes(data[start : start + 8], "little"))
    return h % vocabulary_size


def test_golden_values_never_change():
    strings = ["", "a", "a\0", "é", "日本語テキスト", "x" * 17]
    golden = [964807871, 285699961, 445989397, 592153821, 614717690, 346042372]
    assert hash_ids(strings, 10**9).tolist() == golden
    golden = [773569330625, 759174143445, 730658713157]
    assert hash_ids([0, -1, 2**63], 10**12, seed=7).tolist() == golden


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(text, max_size=8), st.integers(0, MASK), st.integers(1, 2**63 - 1))
def test_strings_follow_the_formula(keys, seed, size):
    expected = [_formula(key, size, seed) for key in keys]
    encoded = [key.encode() for key in keys]
    columns = [keys, encoded, np.array(keys, object)]
    if not any(key.endswith("\0") for key in keys):  # which an array of fixed width drops
        columns += [np.array(keys, "U"), np.array(encoded, "S")]
    for column in columns:
        assert hash_ids(column, size, seed=seed).tolist() == expected


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=8), st.integers(0, MASK))
def test_integers_follow_the_formula(keys, seed):
    assert hash_ids(keys, V, seed=seed).tolist() == [_formula(key, V, seed) for key in keys]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_any_width_agree(dtype):
    keys = np.arange(100).astype(dtype) - np.array(50 if np.dtype(dtype).kind == "i" else 0, dtype)
    swapped = keys.astype(keys.dtype.newbyteorder())
    for column in (keys, swapped):
        assert hash_ids(column, V).tolist() == [_formula(key, V) for key in keys.tolist()]


def test_shape_and_dtype():
    keys = np.array([["a", "b", "c"], ["delta", "", "f"]])
    ids = hash_ids(keys, 2**31 - 1)
    assert (ids.shape, ids.dtype) == ((2, 3), np.int32)
    assert hash_ids(keys, 2**31).dtype == np.int64
    assert hash_ids("abc", V).shape == ()
    assert hash_ids("abc", V) == hash_ids(["abc"], V)[0]
    assert hash_ids(np.zeros((0, 3), "U4"), V).shape == (0, 3)
    assert hash_ids(jnp.arange(3), V).tolist() == hash_ids([0, 1, 2], V).tolist()
    assert hash_ids(keys.T, V).tolist() == hash_ids(keys, V).T.tolist()
    assert hash_ids(keys[:, 0], V).tolist() == hash_ids(["a", "delta"], V).tolist()
    assert hash_ids(keys.astype(np.dtypes.StringDType()), V).tolist() == hash_ids(keys, V).tolist()
    assert hash_ids(["\ud800"], V) == hash_ids(np.array(["\ud800"]), V)


NOTHING = [None, float("nan"), pd.NA, pd.NaT, np.datetime64("NaT")]


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
@pytest.mark.parametrize("present", [["a", "日本"], [b"a", b"b"], [7, -1], [2**63, -1]], ids=str)
def test_a_missing_key_is_not_hashed(nothing, present):
    first, last = (_formula(key, V) for key in present)
    keys = [present[0], nothing, present[1]]
    for column in (keys, np.array(keys, object), pd.Series(keys, dtype=object)):
        assert hash_ids(column, V).tolist() == [first, -1, last]
        assert hash_ids(column, V, missing=3).tolist() == [first, 3, last]
    masked = np.ma.masked_array(np.array(present, object), [True, False])
    assert hash_ids(masked, V).tolist() == [-1, last]
    assert hash_ids([[present[0], nothing], present], V).tolist() == [[first, -1], [first, last]]


STRINGS = ["a", None, "日本語テキスト", "", "x" * 17, "a"]
COLUMNS = {
    "string": pd.Series(STRINGS, dtype="string"),
    "string in Python": pd.Series(STRINGS, dtype="string[python]"),
    "inferred": pd.Series(STRINGS),
    "ArrowDtype": pd.Series(STRINGS, dtype=pd.ArrowDtype(pa.large_string())),
    "categories": pd.Series(STRINGS, dtype="category"),
    "Arrow": pa.array(STRINGS),
    "Arrow bytes": pa.array(STRINGS).cast(pa.binary()),
    "Arrow views": pa.array(STRINGS, pa.string_view()),
    "Arrow slice": pa.array(["before", *STRINGS, "after"])[1:-1],
    "Arrow chunks": pa.chunked_array([STRINGS[:2], [], STRINGS[2:]]),
    "Arrow dictionary": pa.array(STRINGS).dictionary_encode(),
    "Arrow dictionary with null": pa.DictionaryArray.from_arrays([0, 1, 2, 3, 4, 0], STRINGS[:5]),
    "Arrow dictionaries": pa.chunked_array(
        [pa.array(part).dictionary_encode() for part in (STRINGS[:3], STRINGS[3:])]
    ),
    "masked": np.ma.masked_array([key or "" for key in STRINGS], [key is None for key in STRINGS]),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=list(COLUMNS))
def test_columns_of_strings(column):
    expected = [-1 if key is None else _formula(key, V, 5) for key in STRINGS]
    ids = hash_ids(column, V, seed=5)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


INTEGERS = [
    pd.Series([7, None, 9], dtype="UInt16"),
    pd.Series([7, None, 9], dtype="int64[pyarrow]"),
    pa.array([7, None, 9]),
    pa.array([7, None, 9]).dictionary_encode(),
    pd.Series(["7", None, "9"]).map(int, na_action="ignore").astype("Int64"),
]


@pytest.mark.parametrize("column", INTEGERS)
def test_columns_of_integers(column):
    assert hash_ids(column, V).tolist() == [_formula(7, V), -1, _formula(9, V)]


def test_columns_that_are_empty_or_all_missing():
    for column in ([], pa.array([], pa.string()), pa.chunked_array([], pa.string())):
        assert hash_ids(column, V).shape == (0,)
    for column in ([None, None], pa.nulls(2), pa.nulls(2, pa.string())):
        assert hash_ids(column, V).tolist() == [-1, -1]


BAGS = [["a", None], [], ["b", "c\0", "a"], [None]]
FLAT = [key for bag in BAGS for key in bag]


KEYS_IN_BAGS = [
    BAGS,
    np.array([*BAGS, None], object)[:-1],
    pd.Series(BAGS),
    pd.Series([np.array(bag, object) for bag in BAGS]),
    pd.Series(BAGS, dtype=pd.ArrowDtype(pa.list_(pa.string()))),
    pa.array(BAGS),
    pa.array(BAGS, pa.large_list(pa.dictionary(pa.int8(), pa.string()))),
    pa.chunked_array([BAGS[:1], BAGS[1:]]),
    RaggedIds.from_lists(BAGS),
    RaggedIds.from_arrow(pa.array(BAGS)),
    RaggedIds(pa.array(FLAT), [0, 2, 2, 5, 6]),
]


@pytest.mark.parametrize("bags", KEYS_IN_BAGS)
def test_bags_of_strings_are_bags_of_ids(bags):
    ids = hash_ids(bags, V)
    assert isinstance(ids, RaggedIds)
    assert ids.row_splits.tolist() == [0, 2, 2, 5, 6]
    # A key that is missing from a bag is masked: -1 would be a bad id there.
    assert ids.values.tolist() == [None if key is None else _formula(key, V) for key in FLAT]
    shared = hash_ids(bags, V, missing=0)
    assert shared.values.tolist() == [0 if key is None else _formula(key, V) for key in FLAT]


def test_containers_keep_their_weights_and_places():
    ragged = hash_ids(RaggedIds(["a", "b"], [0, 0, 2], [0.5, 2.0]), V)
    assert (ragged.row_splits.tolist(), ragged.weights.tolist()) == ([0, 0, 2], [0.5, 2.0])
    sparse = hash_ids(SparseIds([[0, 1], [2, 0]], [7, None], (3, 2), [0.5, 2.0]), V)
    assert (sparse.dense_shape, sparse.weights.tolist()) == ((3, 2), [0.5, 2.0])
    assert sparse.indices.tolist() == [[0, 1], [2, 0]]
    assert sparse.values.tolist() == [_formula(7, V), None]


def test_a_missing_key_leaves_its_bag():
    feature = FeatureConfig(TableConfig(V, 1, combiner="sum", name="t"))
    ids = hash_ids(RaggedIds(["a", None, "b"], [0, 3], [0.5, 2.0, 3.0]), V)
    found = serving_lookup({"t": np.arange(V, dtype=np.float32)[:, None]}, ids, feature)
    assert found.tolist() == [[0.5 * _formula("a", V) + 3 * _formula("b", V)]]


def test_without_a_vocabulary_size_ids_have_63_bits():
    keys = ["a", None, "b"]
    ids = hash_ids(keys, None)
    assert ids.dtype == np.int64
    assert ids.tolist() == [_formula("a", 2**63), -1, _formula("b", 2**63)]
    assert hash_ids(keys, None, missing=2**63 - 1)[1] == 2**63 - 1
    assert hash_ids(keys, 10, missing=10)[1] == 10  # of a table of 11 rows


FLOATS = r"expected strings or integers, got float64; .*astype\(\"Int64\"\)"


REFUSED = [
    (pd.Series([7, None]), {}, FLOATS),
    (np.array([np.nan]), {}, FLOATS),
    (np.ones(3, bool), {}, "expected strings or integers, got bool"),
    ([1.5], {}, "expected strings or integers, not both, got objects of float"),
    (["a"], {"vocabulary_size": 0}, "vocabulary_size: expected an integer >= 1, got 0"),
    (["a"], {"vocabulary_size": 2**63}, r"expected vocabulary_size < 2\*\*63"),
    (["a"], {"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ([2**64], {}, "expected integers of 64 bits, got a larger one"),
    *((["a"], {"missing": n}, "missing: expected ") for n in (-2, 2**31, 0.5, None)),
]


@pytest.mark.parametrize(("keys", "options", "says"), REFUSED)
def test_refusals(keys, options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        hash_ids(keys, **{"vocabulary_size": 10} | options)
