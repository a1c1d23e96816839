"""Keys of exports and deltas: other ones than were written are refused before they are used."""

import json
import re

import numpy as np
import pytest
from file_cases import mutations, resigned, rewrite
from kernel_cases import assert_same_bits
from keyed_cases import Keyed, export, table, version, write_delta

from tpu_embed import FeatureConfig
from tpu_embed.io import FollowingModel, load_model
from tpu_embed.io.delta import delta_files
from tpu_embed.io.files import checksum

TABLES = {"t": table("t"), "u": table("u", unseen="shared", dtype="bfloat16")}
FEATURES = {name: FeatureConfig(one) for name, one in TABLES.items()}
REQUEST = {name: np.array([3, 5, 20, 7]) for name in TABLES}


@pytest.fixture
def root(tmp_path):
    """Return a folder with an export of 8 keys per table, and a delta of 3 keys and 2 lost ones."""
    tables = {name: Keyed(one, range(8)) for name, one in TABLES.items()}
    export(tmp_path / "model", [*tables.values()], FEATURES, REQUEST)
    changes = {n: one.change([3, 6, 20], [1, 2], shared=n == "u") for n, one in tables.items()}
    write_delta(tmp_path / "delta", version(0), version(1), changes)
    return tmp_path


def put(directory, name, part, array):
    """Write another array, and a description that fits it."""
    path = directory / "tables" / f"{name}.{part}.npy"
    np.save(path, array)

    def known(metadata):
        said = metadata["tables"][name]["files"][part]
        said |= {"crc32": checksum(path, ""), "bytes": path.stat().st_size}
        said |= {"shape": list(array.shape), "dtype": str(array.dtype)}

    rewrite(directory / "metadata.json", known)


def as_keys(*keys):
    return np.array(keys, np.uint64)


MODELS = {
    "not ascending": ("t", as_keys(0, 1, 2, 3, 4, 5, 7, 6), "table 't': expected ascending keys"),
    "twice": ("u", as_keys(0, 1, 2, 3, 4, 5, 6, 6), "table 'u': expected ascending keys"),
    "signed": ("t", np.arange(8), "table 't': expected .*got .*int64"),
    "of another rank": ("t", as_keys(*range(8))[None], "table 't': expected"),
    "more than rows": ("t", np.arange(41, dtype=np.uint64), "table 't': expected"),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.quick(2)
def test_keys_of_a_model_are_ascending_and_have_rows(root, case):
    name, keys, text = MODELS[case]
    put(root / "model", name, "keys", keys)
    with pytest.raises(ValueError, match=text):
        load_model(root / "model")


def test_a_model_of_fewer_keys_is_one(root):
    """What is signed is believed: a checksum is no signature."""
    put(root / "model", "t", "keys", as_keys(2, 4))
    assert load_model(root / "model").keys("t")[0].tolist() == [2, 4]


DELTAS = {
    "keys that do not ascend": ("t", "keys", as_keys(3, 20, 6), "ascending keys, each with a row"),
    "a key twice": ("u", "keys", as_keys(3, 6, 6), "ascending keys, each with a row or lost"),
    "lost keys that do not ascend": ("t", "lost", as_keys(2, 1), "ascending keys, each with a row"),
    "a lost key twice": ("t", "lost", as_keys(2, 2), "ascending keys, each with a row or lost"),
    "a key that is lost too": ("t", "lost", as_keys(1, 6), "ascending keys, each with a row or"),
    "the last key lost too": ("t", "lost", as_keys(20, 21), "ascending keys, each with a row or"),
    "the first key lost too": ("t", "lost", as_keys(1, 3), "ascending keys, each with a row or"),
    "fewer keys": ("t", "keys", as_keys(3, 6), "table 't': expected .*got"),
    "signed lost keys": ("t", "lost", np.array([1, 2]), "table 't': expected .*got"),
    "two shared rows": ("u", "shared", np.zeros((2, 3), np.uint16), "table 'u': expected .*got"),
    "a shared row of floats": ("u", "shared", np.zeros((1, 3), np.float32), "table 'u': expected"),
    "a wide shared row": ("u", "shared", np.zeros((1, 4), np.uint16), "table 'u': expected"),
    "wide rows": ("t", "values", np.zeros((3, 4), np.float32), "table 't': expected .*got"),
}


@pytest.mark.parametrize("case", DELTAS)
@pytest.mark.quick(3)
def test_what_a_delta_says_of_keys_is_whole(root, case):
    name, part, array, text = DELTAS[case]
    put(root / "delta", name, part, array)
    model = load_model(root / "model")
    served, before = FollowingModel(model), model(REQUEST)
    for apply in (model.apply, model.apply_in_place, served.apply):
        with pytest.raises(ValueError, match=text):
            apply(root / "delta")
    for one in (model, served):
        assert_same_bits(one(REQUEST), before)
        assert one.version == version(0)


def test_lost_keys_that_are_not_there_are_ignored(root):
    put(root / "delta", "t", "lost", as_keys(0, 1, 2**63))
    put(root / "delta", "u", "keys", as_keys())
    put(root / "delta", "u", "values", np.zeros((0, 3), np.uint16))
    model = load_model(root / "model").apply(root / "delta")
    assert model.keys("t")[0].tolist() == [2, 3, 4, 5, 6, 7, 20]
    assert model.keys("u")[0].tolist() == [0, 3, 4, 5, 6, 7]


def outcomes(directory, read):
    """Yield what was changed in the metadata, signed anew, and what is read then, or the error."""
    path = directory / "metadata.json"
    for place, changed in mutations(json.loads(path.read_text())):
        if place[0] in ("inputs", "outputs", "features"):  # in `test_export_damage.py`
            continue
        path.write_text(json.dumps(resigned(changed)))
        try:
            yield place, read(directory)
        except (ValueError, FileNotFoundError) as error:
            yield place, error


def test_metadata_of_other_types_is_refused_or_harmless(root):
    expected = load_model(root / "model")(REQUEST)
    for place, found in outcomes(root / "model", lambda path: load_model(path)(REQUEST)):
        if isinstance(found, Exception):
            assert re.search(f"{root}.*expected .*, got ", str(found)), (place, found)
        else:
            assert place[0] in ("platforms", "version"), "what no call depends on"
            assert_same_bits(found, expected)


@pytest.mark.whole
def test_metadata_of_a_delta_of_other_types_is_refused_or_harmless(root):
    wanted = {name: one.arrays() for name, one in delta_files.read(root / "delta").tables.items()}
    for place, found in outcomes(root / "delta", delta_files.read):
        if isinstance(found, Exception):
            assert re.search(f"{root}.*expected .*, got ", str(found)), (place, found)
        else:
            assert place[1:] in {(name, "gone") for name in TABLES}, place
            for name, one in found.tables.items():
                assert_same_bits(one.arrays(), wanted[name])
