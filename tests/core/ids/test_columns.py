"""Columns of pandas and Arrow, and lists with missing values, as ids and weights of a feature."""

import datetime
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from facade_cases import mesh
from streamed import Streamed

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig, hash_ids
from tpu_embed.core.ids import host_ids
from tpu_embed.io import serving_lookup
from tpu_embed.metrics import batch_statistics
from tpu_embed.vocabulary import DynamicVocabulary

NAN = float("nan")


def _host(ids, weights=None, *, combiner="mean", **options):
    feature = FeatureConfig(TableConfig(300, 4, combiner=combiner), **options)
    return host_ids("user/x", feature, "items", ids, weights)


ONE_ID_EACH = {
    "list": [7, None, 5],
    "list with NaN": [7, NAN, 5],
    "objects": np.array([7, None, 5], object),
    "objects of pandas": np.array([7, pd.NA, np.int64(5)], object),
    "not a time": np.array([7, pd.NaT, 5], object),
    "masked": np.ma.masked_array([7, 299, 5], [False, True, False]),
    "masked unsigned": np.ma.masked_array(np.array([7, 9, 5], np.uint8), [False, True, False]),
    "with -1": pd.Series([7, -1, 5]),
    "Int64": pd.Series([7, None, 5], dtype="Int64"),
    "UInt8": pd.Series([7, None, 5], dtype="UInt8"),
    "UInt64": pd.Series([7, None, 5], dtype="UInt64"),
    "array of pandas": pd.array([7, None, 5], dtype="Int32"),
    "index": pd.Index([7, -1, 5]),
    "objects in a series": pd.Series([7, None, 5], dtype=object),
    "pandas in Arrow": pd.Series([7, None, 5], dtype="int32[pyarrow]"),
    "Arrow": pa.array([7, None, 5], pa.int16()),
    "Arrow unsigned": pa.array([7, None, 5], pa.uint64()),
    "Arrow slice": pa.array([1, 7, None, 5, 2])[1:4],
    "Arrow chunks": pa.chunked_array([[7, None], [5]]),
    "Arrow dictionary": pa.array([7, None, 5]).dictionary_encode(),
    "streamed": Streamed(pa.chunked_array([[7, None], [5]], pa.int16())),
}


@pytest.mark.parametrize("column", ONE_ID_EACH.values(), ids=ONE_ID_EACH)
def test_what_is_missing_from_a_column_is_padding(column):
    host = _host(column)
    assert (host.padded, host.ids.tolist()) == (True, [[[7]], [[-1]], [[5]]])
    assert host.shape == _host(np.array([7, -1, 5])).shape  # so it runs the same program


def test_columns_without_gaps_without_ids_and_without_rows():
    for column in ([7, 0, 5], pd.Series([7, 0, 5], dtype="Int64"), pa.array([7, 0, 5])):
        host = _host(column)
        assert (host.padded, host.ids.ravel().tolist()) == (False, [7, 0, 5])
    for column in (pa.nulls(2), [None, None]):
        assert _host(column).ids.ravel().tolist() == [-1, -1]
    for column in (pa.chunked_array([], pa.int64()), pd.Series([], dtype="Int64")):
        assert _host(column).shape.batch == 0


def test_a_frame_of_columns_is_an_array_of_bags():
    frame = pd.DataFrame({"a": pd.array([7, None], dtype="Int64"), "b": [3, 4]})
    assert _host(frame).ids.tolist() == [[[7, 3]], [[-1, 4]]]


BAGS = {
    "lists": [[7, 3], [], [5]],
    "no list": [[7, 3], None, [5]],
    "tuples": [(7, 3), (), (5,)],
    "arrays": [np.array([7, 3]), np.array([], int), np.array([5])],
    "objects": np.array([[7, 3], [], [5]], object),
    "series": pd.Series([[7, 3], None, [5]]),
    "series of arrays": pd.Series([np.array([7, 3]), np.array([], int), np.array([5])]),
    "pandas in Arrow": pd.Series([[7, 3], None, [5]], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
    "Arrow": pa.array([[7, 3], None, [5]]),
    "Arrow chunks": pa.chunked_array([[[7, 3]], [[], [5]]], pa.large_list(pa.int32())),
    "streamed": Streamed(pa.chunked_array([[[7, 3], None], [[5]]])),
}


@pytest.mark.parametrize("column", BAGS.values(), ids=BAGS)
def test_a_column_of_lists_is_ragged(column):
    host = _host(column)
    assert host.shape == _host(RaggedIds([7, 3, 5], [0, 2, 2, 3])).shape
    assert (host.ids.tolist(), host.bags.tolist()) == ([7, 3, 5], [0, 0, 2])
    assert _host([[7, 3], [5, 1]]).bags.tolist() == [0, 0, 1, 1]  # lists of equal lengths, too


WITH_GAPS = [
    [[7, None, 3], [None]],
    [[7, NAN, 3], [None]],
    pd.Series([[7, None, 3], [None]]),
    pa.array([[7, None, 3], [None]], pa.list_(pa.uint8())),
    SparseIds([[0, 0], [0, 1], [0, 2], [1, 0]], [7, None, 3, None], (2, 3)),
]


@pytest.mark.parametrize("policy", ["error", "drop", "clip"])
@pytest.mark.parametrize("column", WITH_GAPS)
def test_an_id_that_is_missing_leaves_its_bag_with_its_weight(column, policy):
    host = _host(column, np.array([0.5, 2.0, 3.0, 4.0]), on_bad_id=policy)
    assert (host.ids.tolist(), host.bags.tolist()) == ([7, 3], [0, 0])
    # Weights of means are scaled by a number per bag, so only their ratio says something.
    assert host.weights[1] / host.weights[0] == 6.0
    assert host.shape.batch == 2
    gap = _host(column, on_bad_id=policy, max_sequence_length=3)
    assert (gap.ids.tolist(), gap.bags.tolist()) == ([7, 3], [0, 2])


def test_bad_ids_beside_missing_ones_are_named(refused):
    refused("got id 300 at example 1, position 1;", _host, [[7], [None, 300]])
    refused("got id -2 at example 2;", _host, pd.Series([7, None, -2], dtype="Int64"))
    assert _host(pd.Series([7, None, 900], dtype="Int64"), on_bad_id="clip").ids[2] == 299


WEIGHTS = {
    "lists": [[0.5, 1.0], [], [2.0]],
    "series": pd.Series([[0.5, 1.0], None, [2.0]]),
    "series of arrays": pd.Series([np.array([0.5, 1.0]), np.array([]), np.array([2.0])]),
    "Arrow": pa.array([[0.5, 1.0], None, [2.0]], pa.list_(pa.float32())),
    "flat series": pd.Series([0.5, 1.0, 2.0]),
    "flat Arrow": pa.array([0.5, 1.0, 2.0]),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_columns_of_weights(weights):
    host = _host(pd.Series([[7, 3], None, [5]]), weights, combiner="sum")
    assert host.weights.dtype == np.float32
    assert host.weights.tolist() == [0.5, 1.0, 2.0]


BAD_WEIGHTS = [
    ([[7, 3]], [[1.0]], ValueError, "the row_splits of the ids, got others"),
    ([[7, 3]], [[1.0, None]], ValueError, "expected real numbers, got object"),
    ([[7, 3]], [[1.0, NAN]], ValueError, r"finite in float32, got nan at \[1\]"),
    ([[7, 3]], pa.array([[1.0, None]]), ValueError, r"finite in float32, got nan at \[1\]"),
    (np.array([[7, 3]]), [[1.0, 2.0]], ValueError, "expected an array, as the ids, got list"),
    ([7, 3], [1.0, 2.0], ValueError, r"expected no weights for ids \[B\]"),
]


@pytest.mark.parametrize(("ids", "weights", "kind", "says"), BAD_WEIGHTS)
def test_weights_that_are_refused(ids, weights, kind, says, refused):
    refused("weights of user/x: .*" + says, _host, ids, weights, error=kind)


def test_gaps_in_lists_of_a_file_need_the_backend_of_arrow(tmp_path, refused):
    pd.DataFrame({"tags": [[7, None], [3]]}).to_parquet(tmp_path / "tags.parquet")
    column = pd.read_parquet(tmp_path / "tags.parquet")["tags"]
    says = r'for lists .*read_parquet\(…, dtype_backend="pyarrow"\)'
    refused(says, _host, column, error=TypeError)
    kept = pd.read_parquet(tmp_path / "tags.parquet", dtype_backend="pyarrow")["tags"]
    assert _host(kept).ids.tolist() == [7, 3]


TIMES = r".*; times are no ids: give whole numbers, such as the hour"
FLOATS = r"integer dtype, got float64; NaN in a pandas column .*astype\(\"Int64\"\).*fillna\(-1\)"


NO_IDS = [
    (pd.Series([7, None]), FLOATS),
    ([7, 1.5], FLOATS),
    (pd.Series([7, None], dtype="Float64"), "got Float64|got float64"),
    (pa.array([1.5]), FLOATS),
    ([[1.5], [2]], FLOATS),
    (pd.Series(["a", None]), "got objects of str; tpu_embed.hash_ids"),
    (pa.array([["a"]]), "got objects of str; tpu_embed.hash_ids"),
    (pd.Series([True]), "got bool"),
    (pd.Series(pd.to_datetime(["2020-01-01"])), f"got datetime64{TIMES}"),
    (pd.Series(pd.to_datetime(["2020-01-01"]).tz_localize("UTC")), f"of Timestamp{TIMES}"),
    (pa.array([datetime.date(2020, 1, 1), None]), f"got datetime64{TIMES}"),
    (np.array([[3]], "timedelta64[s]"), f"got timedelta64{TIMES}"),
    ([None, datetime.datetime(2020, 1, 1)], f"got objects of datetime{TIMES}"),
    ([[1], 2], "expected a list of lists, got 2"),
    ([2**64], "got objects of int"),
]


@pytest.mark.parametrize(("column", "says"), NO_IDS)
def test_columns_that_are_not_ids(column, says, refused):
    refused("user/x: .*" + says, _host, column, error=TypeError)


def test_lists_of_other_things_are_no_bags(refused):
    refused("lists of different lengths; from_lists takes one flat", _host, [[[1], [2, 3]]])
    with pytest.raises(ValueError, match="expected ids whose values are known, got a tracer"):
        jax.jit(lambda ids: _host([ids, ids]).ids)(np.ones(2, int))


def test_columns_through_an_engine():
    """Lookup of columns, with what is missing, is that of arrays padded with -1."""
    features = dict.fromkeys(("one", "bag"), FeatureConfig(TableConfig(10, 4, name="items")))
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(1))
    state = engine.init(jax.random.key(0))
    columns = {"one": pd.Series([3, None], dtype="UInt8"), "bag": pa.array([[1, None, 2], None])}
    arrays = {"one": np.array([3, -1]), "bag": np.array([[1, -1, 2], [-1, -1, -1]])}
    found, expected = (engine.lookup(state, engine.place(given)) for given in (columns, arrays))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not jnp.any(found["one"][1])
    counted = batch_statistics(engine, columns)["items"]
    assert (counted["ids"], counted["unique"], counted["bad"]) == (3, 3, 0)
    served = serving_lookup(engine.tables(state), columns, features)
    np.testing.assert_array_equal(served["one"], expected["one"])


def test_neither_pandas_nor_arrow_is_imported():
    code = (
        "import sys, numpy as np, jax, tpu_embed, tpu_embed.data\n"
        "from tpu_embed import FeatureConfig, TableConfig\n"
        "engine = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(9, 2)))\n"
        "engine.place([[1, None]]), tpu_embed.hash_ids(['a', None], 9)\n"
        "tpu_embed.pad_batch(np.zeros(3, np.uint8), 2)\n"
        "print([name for name in ('pandas', 'pyarrow', 'grain') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


WORDS = [["Alien", None], None, ["Brazil", "a name of more than twelve letters"]]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view(), pa.large_string()])
@pytest.mark.parametrize("longer", [0, 5])
def test_strings_of_polars_are_hashed(kind, longer):
    """It hands over views of strings, and categories of such, for which Arrow can do little."""
    flat = [word for words in WORDS for word in words or []]
    expected = hash_ids(flat, 1_000)
    column = pa.chunked_array([pa.array(flat).cast(kind)])
    entries = pa.array(["Alien", "Brazil", flat[-1], *"abcde"[:longer]]).cast(kind)
    codes = pa.array([0, None, 1, 2], pa.uint32())
    categories = pa.chunked_array([pa.DictionaryArray.from_arrays(codes, entries)])
    lists = pa.chunked_array([pa.array(WORDS).cast(pa.large_list(kind))])
    for given in (column, Streamed(column), categories, Streamed(categories)):
        np.testing.assert_array_equal(hash_ids(given, 1_000), expected)
    for given in (lists, Streamed(lists)):
        found = hash_ids(given, 1_000)
        assert found.row_splits.tolist() == [0, 2, 2, 4]
        assert found.values.tolist() == [expected[0], None, *expected[2:]]


def test_a_stream_needs_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"\.Streamed: expected pyarrow, .*; pip install pyarrow"):
        _host(Streamed(pa.chunked_array([[7]])))


def test_a_stream_of_other_types_is_refused(refused):
    class Wide(Streamed):
        def __arrow_c_stream__(self, requested_schema=None):
            raise pa.ArrowInvalid("Invalid or unsupported format string: '_pli128'")

    says = r"\.Wide: expected columns of types that pyarrow has.*128"
    refused(says, _host, Wide(None), error=TypeError)


NAMES = ["anna", "bo", None, "anna", "cleo", "bo", "dora", "anna"]
KEYED = FeatureConfig(TableConfig(9, 2, vocabulary=DynamicVocabulary()))
PLAIN = FeatureConfig(TableConfig(9, 2))
OF_NAMES = {
    "list": NAMES,
    "array": np.array([name or "" for name in NAMES]),
    "objects": np.array(NAMES, object),
    "pandas": pd.Series(NAMES),
    "category": pd.Series(NAMES, dtype="category"),
    "arrow": pa.array(NAMES),
    "dictionary": pa.array(NAMES).dictionary_encode(),
    "longer dictionary": pa.array([*NAMES, *"abcdefgh"]).dictionary_encode()[:8],
    "bags": [[name] if name else [] for name in NAMES],
}


@pytest.mark.parametrize("given", OF_NAMES.values(), ids=OF_NAMES)
def test_strings_are_the_keys_of_a_living_table(given, refused):
    found = host_ids("feature 'x'", KEYED, "t", given, None)
    expected = host_ids("feature 'x'", KEYED, "t", hash_ids(given, None), None)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.ids, expected.ids)
    refused(r"'x'.*hash_ids", host_ids, "feature 'x'", PLAIN, "t", given, None, error=TypeError)


@pytest.mark.parametrize("feature", [PLAIN, KEYED])
def test_floats_are_neither_ids_nor_keys(feature, refused):
    column = pd.Series([1, None, 2**53 + 1])
    for given, says in (
        (column, "last digits are gone; read the file again"),
        (column[:2], r'astype\("Int64"\)'),
        (np.array([1.5, "a"], object), r"^feature 'x': .*(float, str|float)"),
    ):
        refused(says, host_ids, "feature 'x'", feature, "t", given, None, error=TypeError)
