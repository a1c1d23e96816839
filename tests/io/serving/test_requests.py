"""What a served model takes, cut as in training; `test_random_requests.py` has every form."""

import jax
import numpy as np
import pandas as pd
import pytest
from facade_cases import mesh
from keyed_cases import Keyed, export, export_arrays, table

import tpu_embed as te
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig, io, optimizers

LIVING, HOST = {"vocabulary": te.DynamicVocabulary()}, {"storage": te.HostStorage(device_rows=4)}


@pytest.mark.parametrize("of_table", [LIVING, {**LIVING, **HOST}, {}, HOST], ids=str)
def test_the_last_ids_are_counted_before_any_is_left_out(of_table, tmp_path):
    """99 has no row; it is the last thing that the user saw."""
    config = TableConfig(10, 1, name="t", **of_table)
    rule = "error" if "vocabulary" in of_table else "drop"
    features = {"seen": FeatureConfig(config, max_sequence_length=2, keep="last", on_bad_id=rule)}
    engine = te.EmbeddingEngine(features, optimizers.SGD(0.5), mesh=mesh(1))
    state, values = engine.init(jax.random.key(0)), np.array([[1.0], [2.0], [3.0]], np.float32)
    numbers = {"keys" if "vocabulary" in of_table else "rows": np.array([1, 2, 3])}
    state = engine.set_rows(state, "t", values=values, **numbers)
    if "storage" not in of_table:
        tables = engine.tables(state)
    elif "vocabulary" in of_table:
        tables = {"t": lambda ids: engine.rows(state, "t", ids)}
    else:
        tables = {"t": io.host_table(engine, state, "t")}
    asked = {"seen": np.array([[1, 2, 3, 99], [99, 3, 1, 2], [1, 99, -1, -1]])}
    maps = {"vocabularies": engine.vocabularies} if "vocabulary" in of_table else {}
    served = export_arrays(tmp_path / "m", tables, features, asked, **maps)(asked)["seen"]
    np.testing.assert_array_equal(served[:, :, 0], [[3, 0], [1, 2], [1, 0]])
    placed = engine.lookup(state, engine.place(asked, training=False))
    for found in (placed, io.serving_lookup(tables, asked, features, **maps)):
        np.testing.assert_array_equal(served, found["seen"])


# -- forms ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Return a model of a bag with weights, of a sequence and of one id for each example."""
    one = Keyed(table("t", unseen="shared"), te.hash_ids(["red", "green"], None), 3)
    features = dict.fromkeys(("bag", "one"), FeatureConfig(one.config))
    features["seen"] = FeatureConfig(one.config, max_sequence_length=2, keep="last")
    example = {"bag": np.zeros((2, 3), int), "seen": np.zeros((2, 4), int), "one": np.zeros(2, int)}
    weights = dict.fromkeys(features) | {"bag": np.ones((2, 3), np.float32)}
    return export(tmp_path_factory.mktemp("named") / "m", [one], features, example, weights=weights)


WEIGHTED = RaggedIds([1], [0, 1, 1], weights=[1.0])
REFUSED = {
    "a longer array": ({"bag": np.zeros((2, 4), int)}, r"'bag': .*\[B, 3\], got \[2, 4\]; .* cut"),
    "a longer row": ({"bag": [[1, 2, 3, 4], [5]]}, r"'bag': expected shape \[B, 3\], got \[2, 4\]"),
    "a wider shape": ({"bag": SparseIds([[0, 0]], [3], (2, 5))}, r"\[B, 3\], got \[2, 5\]"),
    "a longer sequence": ({"seen": [[1] * 5, []]}, r"'seen': .*\[B, 4\], got \[2, 5\]"),
    "a row for one id": ({"one": [[1], [2]]}, r"'one': expected shape \[B\], got \[2, 1\]"),
    "one id for a row": ({"bag": [1, 2]}, r"'bag': expected shape \[B, 3\], got \[2\]"),
    "another size": ({"one": ["red"] * 3}, "'one': expected a positive batch size, 2 .* got 3"),
    "wrong splits": ({"bag": RaggedIds([1], [0, 2])}, "'bag': expected RaggedIds.row_splits that"),
    "weights twice": ({"bag": WEIGHTED}, "feature 'bag': expected weights in one place"),
    "other weights": ({"seen": WEIGHTED}, r"weights: .* \['bag'\], got \['bag', 'seen'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(named, case):
    changed, text = REFUSED[case]
    ids = {"bag": [[1], []], "seen": [[1], [2]], "one": [1, 2]} | changed
    weights = dict.fromkeys(ids) | {"bag": [[1.0], []] if "bag" not in changed else np.ones(1)}
    with pytest.raises(ValueError, match=text):
        named(ids, weights=weights)


def test_columns_of_a_frame_are_served(tmp_path):
    table, rows = TableConfig(4, 2, name="t"), np.arange(8, dtype=np.float32).reshape(4, 2)
    features = {"user": FeatureConfig(table), "tags": FeatureConfig(table)}
    example = {"user": np.zeros(2, int), "tags": np.zeros((2, 3), int)}
    frame = pd.DataFrame({"user": [1, 3], "tags": [[0, 2], []], "label": [0.5, 1.0]})
    served = export_arrays(tmp_path / "m", {"t": rows}, features, example)(frame)
    found = io.serving_lookup({"t": rows}, frame, features)
    jax.tree.map(np.testing.assert_array_equal, served, found)


def test_a_missing_id_at_the_end_of_a_jagged_row_is_not_clipped(tmp_path):
    """Where it clips bad ids, the program knows no id that it gives a row of zeros."""
    table, rows = TableConfig(4, 1, name="t"), np.arange(1, 5, dtype=np.float32)[:, None]
    features = {
        "all": FeatureConfig(table, jagged=True, on_bad_id="clip"),
        "two": FeatureConfig(table, 2, jagged=True, on_bad_id="clip"),
    }
    example = dict.fromkeys(features, np.zeros((2, 3), int))
    served = export_arrays(tmp_path / "m", {"t": rows}, features, example)
    cut = np.array([[1, -1, 2], [2, -1, -1]])
    for two in (cut, [[1, None, 2], [2]], [[1, None], [2]]):
        found = served({"all": [[None, 9], [2]], "two": two})
        assert found["all"].row_splits.tolist() == found["two"].row_splits.tolist() == [[0, 2, 3]]
        assert found["all"].values[0, :, 0].tolist() == [0, 4, 3, 0, 0, 0]
        assert found["two"].values[0, :, 0].tolist() == [2, 0, 3, 0]
    for path in features:
        text = f"feature {path!r}: expected rows that do not end in a missing id, .* in example 1;"
        with pytest.raises(ValueError, match=text):
            served({"all": cut, "two": cut, path: [[1], [None]]})
