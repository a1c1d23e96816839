"""pandas DataFrames, Arrow tables and record batches where a mapping of features is expected."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from facade_cases import mesh
from streamed import Streamed

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig

COLUMNS = {"user": np.array([3, 1, 2, 0]), "item": np.array([5, 5, 0, 4], np.int32)}
TABLE = TableConfig(8, 2, name="t")
FEATURES = {"user": FeatureConfig(TABLE), "item": FeatureConfig(TABLE)}
LABEL = {"label": np.array([0.5, 1.0, 0.0, 1.0]), "text": ["a", "b", "c", None]}
MAKERS = {
    "DataFrame": pd.DataFrame,
    "Table": pa.table,
    "RecordBatch": pa.RecordBatch.from_pydict,
    "Streamed": lambda columns: Streamed(pa.table(columns)),
}


class Frame(pd.DataFrame):
    """A subclass, as geopandas has one."""


@pytest.fixture(scope="module")
def engine():
    return tpu_embed.EmbeddingEngine(FEATURES, mesh=mesh(2))


@pytest.mark.parametrize("make", [*MAKERS.values(), Frame])
@pytest.mark.parametrize("more", [{}, LABEL])
def test_a_frame_is_placed_as_its_columns_are(engine, make, more):
    """Whatever other columns it has, and whatever order they are in."""
    placed, expected = engine.place(make(more | COLUMNS)), engine.place(COLUMNS)
    assert placed.spec == expected.spec
    np.testing.assert_array_equal(placed.packed, expected.packed)


@pytest.mark.parametrize("make", MAKERS.values())
def test_a_missing_column_is_named(engine, make, refused):
    frame = make({"item": COLUMNS["item"]} | LABEL)
    refused(r"features: user is missing: expected 2 entries", engine.place, frame)


def test_missing_values_of_a_frame_are_padding(engine):
    columns = {"user": pa.array([3, None, 2, 0]), "item": pa.array([[5], None, [None, 0], []])}
    given = {"user": np.array([3, -1, 2, 0]), "item": [[5], [], [0], []]}
    for frame in (pa.table(columns), Streamed(pa.table(columns | LABEL))):
        np.testing.assert_array_equal(engine.place(frame).packed, engine.place(given).packed)


def test_a_dict_has_the_columns_of_the_features_alone(engine, refused):
    """A misspelt feature would otherwise be left alone, too."""
    says = "label, text are not among the features: .*got 4 entries .*; leave out what is no"
    refused(says, engine.place, COLUMNS | LABEL)
    one_more = COLUMNS | {"label": LABEL["label"]}
    refused("features: label is not among the features", engine.place, one_more)


@pytest.mark.parametrize("kind", ["DataFrame", "Table"])
def test_two_columns_of_one_name_are_refused(engine, kind):
    """pandas would give both at once, which looks like a feature of two ids per bag."""
    names, arrays = ["user", "item", "user"], [COLUMNS["user"], COLUMNS["item"], COLUMNS["user"]]
    frame = pd.DataFrame(np.stack(arrays, axis=1), columns=names)
    table = pa.Table.from_arrays([pa.array(one) for one in arrays], names=names)
    with pytest.raises(ValueError, match=f"column 'user' of a {kind}: expected one .* got 2 of it"):
        engine.place(frame if kind == "DataFrame" else table)


@pytest.mark.parametrize("make", MAKERS.values())
@pytest.mark.parametrize("config", [list, tuple])
def test_a_frame_is_no_list(make, config):
    listed = tpu_embed.EmbeddingEngine(config(FEATURES.values()))
    with pytest.raises(TypeError, match=f"features: the top: expected a {config.__name__}"):
        listed.place(make(COLUMNS))


def test_columns_of_two_levels_are_nested_features():
    nested = {"click": dict(FEATURES), "view": {"user": FEATURES["user"]}}
    engine = tpu_embed.EmbeddingEngine(nested, mesh=mesh(2))
    pairs = [("click", "user"), ("click", "item"), ("view", "user"), ("view", "label")]
    values = [*COLUMNS.values(), COLUMNS["user"], LABEL["label"]]
    frame = pd.DataFrame(dict(zip(pairs, values, strict=True)))
    frame.columns = pd.MultiIndex.from_tuples(pairs)
    expected = engine.place({"click": COLUMNS, "view": {"user": COLUMNS["user"]}})
    np.testing.assert_array_equal(engine.place(frame).packed, expected.packed)


@pytest.mark.parametrize(("name", "make"), MAKERS.items())
def test_pad_batch_says_what_to_give(name, make, refused):
    refused(f"got {name}; give a dict of its columns", tpu_embed.pad_batch, make(COLUMNS), 8)
