"""Exports of tables with keys answer as training would, before and after deltas."""

import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from fresh_cases import same
from keyed_cases import Keyed, export, export_arrays, looked_up, table, version, write_delta
from living_cases import ids, simple

from tpu_embed import DynamicVocabulary, FeatureConfig, FixedVocabulary, TableConfig, hash_ids, io
from tpu_embed.io.serving import served_tables

KEYS = [3, 5, 2**40, 2**63, 2**64 - 2]
B = 4


def drawn(seed, shape, *, unsigned=False):
    """Return keys of both signs, some of them unseen and some padding; no -1 if unsigned."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(np.array([*KEYS, 7, 9, 2**62], np.uint64), shape)
    return keys if unsigned else np.where(rng.random(shape) < 0.3, -1, keys.view(np.int64))


def jagged(keys):
    """Return keys whose padding is at the end of each row."""
    return np.where(np.cumsum(keys == -1, axis=1) > 0, -1, keys)


def follow(path, model, tables, check, changes=3):
    """Apply deltas that change, bring and take keys; call `check` after each."""
    rng, known = np.random.default_rng(9), [*KEYS, 7, 9, 2**62]
    for step in range(1, changes + 1):
        deltas = {}
        for one in tables:
            picked = rng.permutation(len(known)).tolist()
            changed, lost = ([known[i] for i in picked[a:b]] for a, b in ((0, 3), (3, 5)))
            deltas[one.config.name] = one.change(changed, lost, shared=one.unseen == "shared")
        delta = write_delta(path / f"delta-{step}", version(step - 1), version(step), deltas)
        model = (model.apply if step % 2 else model.apply_in_place)(delta)
        check(model)
    return model


FORMS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "a shared row": {"unseen": "shared"},
    "a shared row of bfloat16": {"unseen": "shared", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(1)
def test_an_export_answers_as_training_would(tmp_path, form):
    options = FORMS[form]
    tables = [Keyed(table("t", **options), KEYS, 1), Keyed(table("empty", **options), [], 2)]
    first, empty = (one.config for one in tables)
    features = {
        "bag": FeatureConfig(first),
        "one": FeatureConfig(empty),
        "sequence": FeatureConfig(first, max_sequence_length=2),
        "jagged": FeatureConfig(first, max_sequence_length=3, jagged=True),
        "odd": FeatureConfig(first),
    }

    def request(seed, scale=1):
        return {
            "bag": drawn(seed, (B * scale, 5)),
            "one": drawn(seed + 1, B * scale),
            "sequence": drawn(seed + 2, (B * scale, 3)),
            "jagged": jagged(drawn(seed + 3, (B * scale, 3))),
            "odd": drawn(seed + 4, (3 * scale, 2), unsigned=True),
        }

    weights = dict.fromkeys(features) | {"bag": np.full((B, 5), 0.5, np.float32)}
    model = export(tmp_path / "model", tables, features, request(0), weights=weights)
    assert model.keys("empty")[0].size == 0
    assert set(model.metadata["features"]["odd"]["size"]) == {"b", "1"}  # a size of its own

    def check(model):
        for seed, scale in ((10, 1), (20, 2)):
            given = request(seed, scale)
            scales = {"bag": np.random.default_rng(seed).random((B * scale, 5), np.float32)}
            scales = dict.fromkeys(features) | scales
            found = model(given, weights=scales)
            expected = looked_up(tables, features, given, scales)
            # The program makes the gains of weighted means, which the host rounds once.
            np.testing.assert_allclose(found.pop("bag"), expected.pop("bag"), 1e-6, 1e-6)
            same(found, expected)
        for one in tables:
            assert model.keys(one.config.name)[0].tolist() == sorted(one.rows)

    check(model)
    follow(tmp_path, model, tables, check)


@pytest.mark.parametrize("unseen", ["zero", "shared"])
@pytest.mark.quick(1)
def test_a_quantized_table_has_keys(tmp_path, unseen):
    one = Keyed(table("t", unseen=unseen), KEYS, 1)
    features, given = {"x": FeatureConfig(one.config)}, {"x": drawn(1, (B, 3))}

    def trained():
        array, vocabulary = one.trained()
        return {"t": io.quantize_rows(array)}, {"t": vocabulary}

    def check(model):
        arrays, maps = trained()
        same(model(given), io.serving_lookup(arrays, given, features, vocabularies=maps))

    arrays, maps = trained()
    example = {"x": np.zeros((B, 3), np.uint64)}
    options = {"vocabularies": maps, "version": version(0)}
    model = export_arrays(tmp_path / "model", arrays, features, example, **options)
    check(model)
    follow(tmp_path, model, [one], check)


def test_a_table_grows_beyond_its_room(tmp_path, monkeypatch):
    """Until then nothing compiles; then one program does, for every later model."""
    monkeypatch.setattr(served_tables, "_LEAST_ROOM", 3)
    one = Keyed(table("t", size=500), [1, 2], 0)
    features, given = {"x": FeatureConfig(one.config)}, {"x": np.arange(60).reshape(4, 15)}
    model = export(tmp_path / "model", [one], features, given)
    assert len(model.tables["t"]["values"]) == 1 + 2 + 3
    same(model(given), looked_up([one], features, given))
    sizes, compiled = [], model._program._cache_size()
    for step in range(1, 12):
        change = one.change(range(3 * step, 3 * step + 3), [3 * step - 1] if step % 2 else [])
        delta = write_delta(tmp_path / f"{step}", version(step - 1), version(step), {"t": change})
        before, answer = model, jax.tree.map(np.array, model(given))
        model = model.apply(delta)
        same(model(given), looked_up([one], features, given))
        same(before(given), answer)
        sizes.append(len(model.tables["t"]["values"]))
        assert len(one.rows) < sizes[-1]
        assert model._program._cache_size() == compiled + len({*sizes} - {6})
    assert sizes[0] == 6
    assert 2 < len({*sizes}) < 8
    keys, rows = model.keys("t")
    assert keys.tolist() == sorted(one.rows)
    assert rows.max() <= len(keys) + 1


def test_an_export_has_no_more_room_than_the_table(tmp_path):
    one = Keyed(table("t", size=7), KEYS, 0)
    example = {"x": np.zeros((B, 1), int)}
    model = export(tmp_path / "model", [one], {"x": FeatureConfig(one.config)}, example)
    assert model.tables["t"]["values"].shape == (8, 3)
    assert not np.asarray(model.tables["t"]["values"])[[0, 6, 7]].any()


# -- forms of keys ---------------------------------------------------------------------------------

NAMES = ["red", "green", "", "blau", "größer"]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Return a table whose keys are those of strings, its features and its model."""
    one, path = Keyed(table("t"), hash_ids(NAMES[:3], None), 3), tmp_path_factory.mktemp("named")
    features = {"x": FeatureConfig(one.config)}
    return one, features, export(path / "model", [one], features, {"x": np.array(NAMES)})


def test_strings_are_keys_and_missing_ones_are_nobody(named):
    one, features, model = named
    expected = looked_up([one], features, {"x": hash_ids(NAMES, None)})
    assert np.asarray(expected["x"]).any(axis=1).tolist() == [True] * 3 + [False] * 2
    for column in (np.array(NAMES), pa.array(NAMES).dictionary_encode()):
        same(model({"x": column}), expected)
        same(looked_up([one], features, {"x": column}), expected)
    for column in (
        np.array(["red", None, "green", np.nan, "red"], object),
        np.ma.masked_array(NAMES, [False, True, False, True, False]),
        pd.Series(["red", None, "green", pd.NA, "red"], dtype="string"),
    ):
        found = model({"x": column})
        assert np.asarray(found["x"]).any(axis=1)[:4].tolist() == [True, False, True, False]
        same(found, looked_up([one], features, {"x": column}))


def test_masked_keys_and_columns_of_integers_are_served(tmp_path):
    one = Keyed(table("t", unseen="shared"), KEYS, 3)
    features = {"x": FeatureConfig(one.config)}
    model = export(tmp_path / "model", [one], features, {"x": np.zeros(B, np.int64)})
    for column in (
        np.ma.masked_array([3, 5, 7, -1], [True, False, False, False]),
        np.ma.masked_array(np.array([2**64 - 2, 2**63, 9, 3], np.uint64), [0, 0, 1, 1]),
        pd.Series([3, None, 7, 5], dtype="Int64"),
        pa.array([2**63, None, 2**64 - 1, 3], pa.uint64()),
        np.array([3, -2, 5, -1], np.int64),
        np.array([3, 5, 7, 255], np.uint8),
        np.array([3, 5, 7, -1], np.int8),
        np.array([3, 5, 7, -1], ">i8"),
        jnp.array([3, 5, 7, -1]),
        np.array([2**64 - 1, 2**63, 5, 2**40], np.uint64),
    ):
        same(model({"x": column}), looked_up([one], features, {"x": column}))


REFUSED = {
    "floats": (np.zeros(B), TypeError, "feature 'x': expected .*integer.*float64"),
    "bools": (np.zeros(B, bool), TypeError, "feature 'x': expected .*integer.*bool"),
    "dates": (np.array([datetime.date(2026, 1, 1)] * B), TypeError, "feature 'x'"),
    "rank 0": (np.int64(3), ValueError, r"feature 'x': expected shape \[B\], got \[\]"),
    "rank 2": (np.zeros((B, 2), int), ValueError, r"expected shape \[B\], got \[4, 2\]"),
    "a tuple": ((1, 2), ValueError, "feature 'x': expected an array of ids, .* got tuple"),
    "nobody": (np.zeros(0, int), ValueError, "feature 'x': expected a positive batch size"),
    "mixed": (np.array(["red", 3, 4, 5], object), TypeError, "feature 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_key_is_refused(named, case):
    given, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        named[2]({"x": given})


def test_strings_are_no_row_numbers(tmp_path):
    arrays = {"plain": np.ones((4, 2), np.float32)}
    features = {"x": FeatureConfig(TableConfig(4, 2, name="plain"))}
    with pytest.raises(TypeError, match="feature 'x': expected ids of an integer dtype, got <U3"):
        export_arrays(tmp_path / "model", arrays, features, {"x": np.array(["red"] * 3)})
    model = export_arrays(tmp_path / "model", arrays, features, {"x": np.zeros(3, int)})
    for given in (np.array(["red"] * 3), pd.Series(["red"] * 3)):
        with pytest.raises(TypeError, match="feature 'x': expected"):
            model({"x": given})
    with pytest.raises(ValueError, match="table: expected a table with keys"):
        model.keys("plain")


# -- what is exported ------------------------------------------------------------------------------

ONE = table("t", size=6)
ARRAY = np.ones((6, 3), np.float32)
FIXED = FixedVocabulary([1, 2], [0, 5])
WRONG = {
    "no vocabulary": ({"vocabularies": None}, ValueError, "none of \\['t'\\]; give vocabularies"),
    "a list": ({"vocabularies": [FIXED]}, TypeError, "expected engine.vocabularies, or a mapping"),
    "a dict": ({"vocabularies": {"t": {1: 0}}}, TypeError, "a FixedVocabulary, got dict"),
    "another table": ({"vocabularies": {"u": FIXED}}, ValueError, "a dynamic vocabulary, got u"),
    "rows beyond": (
        {"vocabularies": {"t": FixedVocabulary([1], [6])}}, ValueError, "rows below 6, got row 6",
    ),
    "a step": ({"version": 3}, TypeError, "version: expected a Version, or None, got int"),
    "floats": ({"features": {"x": np.zeros(B)}}, TypeError, "ids of an integer dtype, got float"),
    "rank 0": ({"features": {"x": np.int64(1)}}, ValueError, r"expected \[B\] or \[B, H\]"),
    "a list of keys": ({"features": {"x": [1, 2]}}, TypeError, "x: expected one feature's value"),
    "another batch": ({"batch": 3}, ValueError, "batch: expected that of features, 4, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_exported_leaves_nothing(tmp_path, case):
    changed, error, text = WRONG[case]
    given = {"vocabularies": {"t": FIXED}, "features": {"x": np.zeros(B, int)}} | changed
    examples, features = given.pop("features"), {"x": FeatureConfig(ONE)}
    with pytest.raises(error, match=text):
        export_arrays(tmp_path / "model", {"t": ARRAY}, features, examples, **given)
    assert not [*tmp_path.iterdir()]


def test_an_export_is_of_one_moment(tmp_path):
    engine, state = simple(4)
    touched, features = io.TouchedRows(engine), {"x": FeatureConfig(engine.table_configs["t"])}

    def exported(name, version):
        options = {"vocabularies": engine.vocabularies, "version": version}
        given = {"x": np.zeros(2, int)}
        return export_arrays(tmp_path / name, engine.tables(state), features, given, **options)

    first = touched.version(state)
    state, _ = engine.admit(state, engine.place(ids(7, 8)))
    text = "version: expected that of 1 admitted batches, as vocabularies, got 0; export tables"
    with pytest.raises(ValueError, match=text):
        exported("old", first)
    engine.place(ids(9, 10))  # what is placed ahead is served to nobody
    assert exported("new", touched.version(state)).keys("t")[0].tolist() == [7, 8]


def test_a_table_without_a_name_is_named_by_its_config(tmp_path):
    one = TableConfig(6, 3, vocabulary=DynamicVocabulary())
    features, example, maps = {"x": FeatureConfig(one)}, {"x": np.zeros(B, int)}, {one: FIXED}
    model = export_arrays(tmp_path / "m", {one: ARRAY}, features, example, vocabularies=maps)
    assert model.keys("table_0")[0].tolist() == [1, 2]
    found = np.asarray(model({"x": np.array([1, 2, 3])})["x"])
    assert found.any(axis=1).tolist() == [True, True, False]
