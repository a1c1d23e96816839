"""Exports and deltas: every byte, key and place is checked; no file outside is ever read."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from file_cases import TEXTS, mutations, resigned, rewrite, swap
from kernel_cases import assert_same_bits
from keyed_cases import Keyed, changed_rows, table, version, write_delta

from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.io import FollowingModel, apply_delta, export_model, load_model, quantize_rows
from tpu_embed.io.delta import delta_files
from tpu_embed.io.files import checksum
from tpu_embed.io.serving import model_files

KEYED = {"t": table("t", dim=4), "u": table("u", dim=4, unseen="shared", dtype="bfloat16")}
ROWS = {name: TableConfig(6, 4, name=name) for name in ("films", "users", "days")}
FEATURES = {name: FeatureConfig(table) for name, table in {**ROWS, **KEYED}.items()}
REQUEST = dict.fromkeys(ROWS, np.array([[1, 2], [5, -1]]))
REQUEST |= dict.fromkeys(KEYED, np.array([[3, 5], [20, 7]]))
EXAMPLE = np.ones((2, 3), np.float32)
WEIGHTS = dict.fromkeys(FEATURES) | {"films": np.ones((2, 2), np.float32)}


def model(activations, dense):
    return activations | {"dense": dense.sum(1)}


def answer(served):
    return served(REQUEST, EXAMPLE, weights=WEIGHTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two exports of one form, `a` and `b`, with rows, int8 and keys; and a delta of each."""
    root = tmp_path_factory.mktemp("exports")
    for name, first in (("a", 0), ("b", 10)):
        rng, maps = np.random.default_rng(first), {}
        keyed = {n: Keyed(one, range(first, first + 8), first) for n, one in KEYED.items()}
        tables = {one: rng.normal(size=(6, 4)).astype(np.float32) for one in ROWS}
        tables["days"] = quantize_rows(tables["days"])
        for one in KEYED:
            tables[one], maps[one] = keyed[one].trained()
        options = {"inputs": (EXAMPLE,), "weights": WEIGHTS, "platforms": "cpu"}
        options |= {"version": version(0), "vocabularies": maps}
        export_model(root / name, model, tables, FEATURES, REQUEST, **options)
        changes = {one: changed_rows([1, 3, 5], rng.normal(size=(3, 4))) for one in ROWS}
        for one, lost in (("u", 0), ("t", 1)):
            changed = [3 + first, 6 + first, 20]
            lost = [lost + first, lost + first + 1]
            changes[one] = keyed[one].change(changed, lost, shared=one == "u")
        write_delta(root / f"delta-{name}", version(0), version(1), changes)
    return root


@pytest.fixture(scope="module")
def expected(root):
    return answer(load_model(root / "a"))


@pytest.fixture
def copy(root, tmp_path):
    return Path(shutil.copytree(root, tmp_path / "copy"))


def load(path):
    """Read a delta or a model, as the directory's name says."""
    return delta_files.read(path) if "delta" in path.name else load_model(path)


def refused(path, said, error=ValueError):
    return pytest.raises(error, match=re.escape(f"{path}: ") + said)


def test_any_damaged_file_is_refused_by_name(copy):
    rng = np.random.default_rng(0)
    found = [path for one in ("a", "delta-a") for path in (copy / one).rglob("*.*")]
    assert len(found) == 2 + 5 + 4 + 1 + 6 + 8
    for path in found:
        directory = copy / path.relative_to(copy).parts[0]
        content = path.read_bytes()
        flips = [0, len(content) // 2, len(content) - 1, *rng.integers(0, len(content), 3)]
        for at in flips:
            other = bytearray(content)
            other[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(other)
            with refused(path, ".*expected .* got "):
                load(directory)
        for size in (0, 1, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            with refused(path, "expected .*; .*copy"):
                load(directory)
        path.unlink()
        with refused(path, "expected a file, got none; .*copy", FileNotFoundError):
            load(directory)
        path.mkdir()
        with refused(path, "expected .*, got "):
            load(directory)
        path.rmdir()
        path.symlink_to(path)
        with refused(path, "", (ValueError, FileNotFoundError)):
            load(directory)
        path.unlink()
        path.write_bytes(content)
        load(directory)


def npy(root, name, part="values"):
    return root / "tables" / f"{name}.{part}.npy"


SWAPS = {
    "two tables": (("a", "films", "values"), ("a", "users", "values")),
    "two tables of a delta": (("delta-a", "films", "values"), ("delta-a", "users", "values")),
    "two parts": (("a", "days", "scale"), ("a", "days", "offset")),
    "two exports": (("a", "films", "values"), ("b", "films", "values")),
    "two deltas": (("delta-a", "films", "values"), ("delta-b", "films", "values")),
    "keys of two exports": (("a", "t", "keys"), ("b", "t", "keys")),
    "rows of keys of two exports": (("a", "t", "values"), ("b", "t", "values")),
    "keys and lost ones": (("delta-a", "t", "keys"), ("delta-a", "t", "lost")),
    "lost keys of two tables": (("delta-a", "u", "lost"), ("delta-a", "t", "lost")),
    "two shared rows": (("delta-a", "u", "shared"), ("delta-b", "u", "shared")),
}


@pytest.mark.parametrize("case", SWAPS)
def test_a_table_in_the_place_of_another_is_refused_by_name(copy, case):
    first, second = (npy(copy / one[0], *one[1:]) for one in SWAPS[case])
    swap(first, second)
    with refused(first, "expected (checksum|.* bytes).*, got"):
        load(copy / SWAPS[case][0][0])


def test_a_program_or_metadata_of_another_export_is_refused_by_name(copy):
    program = copy / "a" / "model.stablehlo"
    program.write_bytes(program.read_bytes().replace(b"jit", b"jut"))
    with pytest.raises(ValueError, match=r"model\.stablehlo: expected checksum"):
        load_model(copy / "a")
    shutil.copyfile(copy / "b" / "model.stablehlo", program)
    swap(*(copy / name / "metadata.json" for name in "ab"))
    with pytest.raises(ValueError, match=r"a/tables/\w+\.\w+\.npy: expected checksum"):
        load_model(copy / "a")


def test_a_server_may_leave_the_tables_bytes_unread(copy, expected):
    """Then only sizes and forms are compared: it says so."""
    model, path = load_model(copy / "a", check=False), npy(copy / "a", "films")
    assert_same_bits(answer(model), expected)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    load_model(copy / "a", check=False)
    for damaged, said in (
        (content[:-1], "expected "),
        (content[:128] + b" " * 16, "expected "),
        (b"PK\x03\x04" + content[4:], "expected float32 of shape"),
        (content[:10] + b"[" * 100 + content[110:], "expected float32 of shape"),
    ):
        path.write_bytes(damaged)
        with refused(path, said):
            load_model(copy / "a", check=False)


# -- places ---------------------------------------------------------------------------------------

NAMES = ["../b/tables/films.values.npy", "/etc/passwd", "tables/../../b/x", "", "tables", "a\0b"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("directory", ["a", "delta-a"])
def test_metadata_cannot_name_another_place(copy, name, directory):
    def elsewhere(metadata):
        metadata["tables"]["films"]["files"]["values"]["file"] = name

    rewrite(copy / directory / "metadata.json", elsewhere)
    said = r"metadata\.json: file: expected 'tables/films\.values\.npy', got "
    with pytest.raises(ValueError, match=said):
        load(copy / directory)
    if directory == "a":
        shutil.copyfile(copy / "b" / "metadata.json", copy / "a" / "metadata.json")
        rewrite(copy / "a" / "metadata.json", lambda one: one["program"].update(file=name))
        with pytest.raises(ValueError, match=r"file: expected 'model\.stablehlo', got"):
            load(copy / "a")


@pytest.mark.parametrize(
    "file", ["tables/films.values.npy", "model.stablehlo", "metadata.json", "tables/t.keys.npy"]
)
def test_a_link_to_outside_is_refused(copy, file, tmp_path):
    root = copy / "a"
    path = root / file
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    expected = re.escape(f"{path}: expected a file inside {root}, got a link to ")
    with pytest.raises(ValueError, match=expected):
        load_model(root, check=False)
    (tmp_path / "outside").rename(root / "inside")
    path.unlink()
    path.symlink_to(root / "inside")
    load_model(root)


def test_a_link_to_the_whole_directory_is_followed(copy, expected):
    (copy / "current").symlink_to(copy / "a")
    assert_same_bits(answer(load_model(copy / "current")), expected)


# -- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("directory", ["a", "delta-a"])
def test_metadata_that_is_none_is_refused_by_name(copy, case, directory):
    path = copy / directory / "metadata.json"
    path.write_bytes(TEXTS[case])
    with pytest.raises(ValueError, match=re.escape(f"{path}") + ".*expected .*, got "):
        load(copy / directory)


@pytest.mark.parametrize("other", [1, 2, 3])
@pytest.mark.parametrize("directory", ["a", "delta-a"])
def test_another_format_is_named(copy, directory, other):
    rewrite(copy / directory / "metadata.json", lambda one: one.update(format=other))
    with pytest.raises(ValueError, match=rf"metadata\.json: format: expected 4, got {other}; read"):
        load(copy / directory)


def check_mutations(directory, read, wanted):
    """Change metadata in every place and sign it anew; return where that changed no number."""
    path, accepted = directory / "metadata.json", set()
    for place, changed in mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(resigned(changed)))
        try:
            found = read(directory)
        except (ValueError, FileNotFoundError) as error:
            if not re.search(f"{directory}.*expected .*, got ", str(error)):
                raise
        else:
            accepted.add(place)
            for name, one in found.items():
                assert_same_bits(one, wanted[name])
    return accepted


@pytest.mark.whole
def test_metadata_of_other_types_is_refused_or_harmless(copy, expected):
    def read(path):
        model_files.read_metadata(path)
        return answer(load_model(path))

    accepted = check_mutations(copy / "a", read, expected)
    assert {place[0] for place in accepted} == {"outputs", "platforms", "version"}


def test_metadata_of_a_delta_of_other_types_is_refused_or_harmless(copy):
    def arrays(path):
        return {name: one.arrays for name, one in delta_files.read(path).tables.items()}

    accepted = check_mutations(copy / "delta-a", arrays, arrays(copy / "delta-a"))
    assert accepted == {("tables", one, "gone") for one in FEATURES}, "a delta of fewer tables"


# -- contents that are signed: a checksum is no signature -----------------------------------------


def put(directory, name, part, array):
    """Write another array, and a description that fits it."""
    path = npy(directory, name, part)
    np.save(path, array)

    def known(metadata):
        said = metadata["tables"][name]["files"][part]
        said |= {"crc32": checksum(path, ""), "bytes": path.stat().st_size}
        said |= {"shape": list(array.shape), "dtype": str(array.dtype)}

    rewrite(directory / "metadata.json", known)


def as_keys(*keys):
    return np.array(keys, np.uint64)


@pytest.mark.parametrize("ids", [[-1, 3, 5], [1, 3, 6], [3, 1, 5], [1, 1, 5]])
def test_ids_of_a_delta_are_ascending_and_inside(copy, ids):
    put(copy / "delta-a", "films", "ids", np.array(ids, np.int32))
    with pytest.raises(ValueError, match="table 'films': expected ascending ids from 0 to 5"):
        delta_files.read(copy / "delta-a")


MODELS = {
    "not ascending": ("t", as_keys(0, 1, 2, 3, 4, 5, 7, 6), "table 't': expected ascending keys"),
    "twice": ("u", as_keys(0, 1, 2, 3, 4, 5, 6, 6), "table 'u': expected ascending keys"),
    "signed": ("t", np.arange(8), "table 't': expected .*got .*int64"),
    "of another rank": ("t", as_keys(*range(8))[None], "table 't': expected"),
    "more than rows": ("t", as_keys(*range(41)), "table 't': expected"),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.quick(2)
def test_keys_of_a_model_are_ascending_and_have_rows(copy, case):
    name, keys, text = MODELS[case]
    put(copy / "a", name, "keys", keys)
    with pytest.raises(ValueError, match=text):
        load_model(copy / "a")
    put(copy / "a", name, "keys", as_keys(2, 4))  # which is believed
    assert load_model(copy / "a").keys(name)[0].tolist() == [2, 4]


WHOLE = "ascending keys, each with a row or lost"
DELTAS = {
    "keys that do not ascend": ("t", "keys", as_keys(3, 20, 6), WHOLE),
    "a key twice": ("u", "keys", as_keys(3, 6, 6), WHOLE),
    "lost keys that do not ascend": ("t", "lost", as_keys(2, 1), WHOLE),
    "a lost key twice": ("t", "lost", as_keys(2, 2), WHOLE),
    "a key that is lost too": ("t", "lost", as_keys(1, 6), WHOLE),
    "the last key lost too": ("t", "lost", as_keys(20, 21), WHOLE),
    "the first key lost too": ("t", "lost", as_keys(1, 3), WHOLE),
    "fewer keys": ("t", "keys", as_keys(3, 6), "table 't': expected .*got"),
    "signed lost keys": ("t", "lost", np.array([1, 2]), "table 't': expected .*got"),
    "two shared rows": ("u", "shared", np.zeros((2, 4), np.uint16), "table 'u': expected .*got"),
    "a shared row of floats": ("u", "shared", np.zeros((1, 4), np.float32), "table 'u': expected"),
    "a wide shared row": ("u", "shared", np.zeros((1, 5), np.uint16), "table 'u': expected"),
    "wide rows": ("t", "values", np.zeros((3, 5), np.float32), "table 't': expected .*got"),
}


@pytest.mark.parametrize("case", DELTAS)
@pytest.mark.quick(3)
def test_what_a_delta_says_of_keys_is_whole(copy, case):
    name, part, array, text = DELTAS[case]
    put(copy / "delta-a", name, part, array)
    model = load_model(copy / "a")
    served, before = FollowingModel(model), answer(model)
    for apply in (model.apply, model.apply_in_place, served.apply):
        with pytest.raises(ValueError, match=text):
            apply(copy / "delta-a")
    for one in (model, served):
        assert_same_bits(answer(one), before)
        assert one.version == version(0)


def test_lost_keys_that_are_not_there_are_ignored(copy):
    put(copy / "delta-a", "t", "lost", as_keys(0, 1, 2**63))
    put(copy / "delta-a", "u", "keys", as_keys())
    put(copy / "delta-a", "u", "values", np.zeros((0, 4), np.uint16))
    model = load_model(copy / "a").apply(copy / "delta-a")
    assert model.keys("t")[0].tolist() == [2, 3, 4, 5, 6, 7, 20]
    assert model.keys("u")[0].tolist() == [2, 3, 4, 5, 6, 7]


PROGRAMS = {
    "another table": lambda one: one["features"]["films"].update(table="none"),
    "another dtype": lambda one: one["features"]["films"].update(dtype="int64"),
    "another width": lambda one: one["features"]["films"].update(shape=[None, 3]),
    "no weights": lambda one: one["features"]["films"].update(weights=None),
    "another input": lambda one: one["inputs"][0].update(shape=[None, 4]),
    "a feature less": lambda one: one["features"].pop("films"),
    "a table less": lambda one: one["tables"].pop("users"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_that_takes_something_else_is_named(copy, case):
    rewrite(copy / "a" / "metadata.json", PROGRAMS[case])
    with pytest.raises(ValueError, match=r"model\.stablehlo: expected a program of .*, got "):
        load_model(copy / "a")


def test_a_program_of_another_jax_is_named(copy):
    program = copy / "a" / "model.stablehlo"
    program.write_bytes(b"x" * program.stat().st_size)

    def newer(metadata):
        metadata["jax"] = "9.9"
        metadata["program"]["crc32"] = checksum(program, "")

    rewrite(copy / "a" / "metadata.json", newer)
    with pytest.raises(ValueError, match=r"a program that JAX .* reads, got one that JAX 9.9"):
        load_model(copy / "a")


def test_a_delta_in_the_place_of_another_is_refused_before_a_row_is_set(copy):
    served, tables = load_model(copy / "a"), {"films": np.ones((6, 4), np.float32)}
    swap(npy(copy / "delta-a", "films"), npy(copy / "delta-b", "films"))
    for apply in (served.apply, lambda path: apply_delta(tables, path, served.version)):
        with pytest.raises(ValueError, match=r"films\.values\.npy: expected checksum"):
            apply(copy / "delta-a")
    assert (tables["films"] == 1).all()
