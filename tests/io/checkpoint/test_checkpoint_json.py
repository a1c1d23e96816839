"""Files that are damaged, or of other contents, give a clear error, or the same bits."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import contents, small_engine, small_state
from facade_cases import assert_same
from file_cases import DEEP, TEXTS, mutations, resigned, rewrite

from tpu_embed.io import CheckpointManager, restore, save

MODEL = {"w": jnp.arange(6.0).reshape(2, 3), "b": np.arange(2, dtype=np.int32)}
FILES = [
    "tables/tables.json",
    "tables/checksums.0.json",
    "tables/item/table/zarr.json",
    "model/leaves.json",
    "model/checksums.json",
    "position/value.json",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "saved"
    save(path, small_engine(), small_state(), model=MODEL, position={"epoch": 3})
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def outcome(path, read):
    """Return what is read, or our error; another one is raised."""
    try:
        return read()
    except (ValueError, FileNotFoundError) as error:
        if re.search(f"{path}.*expected .*, got ", str(error), re.DOTALL):
            return "refused"
        raise


def files(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def damages(data):
    """Yield bytes that were cut short or made longer, and with single bits flipped."""
    for length in (0, len(data) // 2, len(data) - 1):
        yield data[:length]
    rng = np.random.default_rng(len(data))
    for place in (0, len(data) // 2, len(data) - 1, *rng.integers(0, len(data), 2)):
        bit = 1 << int(rng.integers(8))
        yield data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
    yield data + b" " * 8 + data


NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Orbax's own, which are not read."""


def check_restored(path, wanted):
    found = outcome(path, lambda: restore(path, small_engine(), model=MODEL))
    assert (found == "refused") == (wanted == "refused")
    if found != "refused":
        assert_same(*(contents(small_engine(), one) for one in (found.state, small_state())))
        assert_same((found.model, found.position), (MODEL, {"epoch": 3}))


def test_damaged_files_are_refused(copy):
    for name in files(copy):
        file, wanted = copy / name, "same" if name.endswith(NOTES) else "refused"
        data = file.read_bytes()
        for damaged in damages(data):
            file.write_bytes(damaged)
            check_restored(copy, wanted)
        file.unlink()
        check_restored(copy, wanted)
        file.write_bytes(data)
    check_restored(copy, "same")


@pytest.mark.parametrize("part", ["tables", "tables/item/slots", "model", "position"])
def test_lost_directories_are_refused(copy, part):
    shutil.rmtree(copy / part)
    check_restored(copy, "refused")


@pytest.mark.parametrize("case", [*TEXTS, "a directory"])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_no_json_of_ours_is_refused_by_name(copy, file, case):
    path = copy / file
    path.unlink()
    if case == "a directory":
        path.mkdir()
    else:
        path.write_bytes(TEXTS[case])
    with pytest.raises(ValueError, match=f"{copy}.*expected .*, got ") as error:
        restore(copy, small_engine(), model=MODEL)
    assert path.name in str(error.value)


def test_a_manifest_of_other_types_is_refused_or_harmless(copy):
    path, wanted = copy / "tables/tables.json", contents(small_engine(), small_state())
    manifest, accepted = json.loads(path.read_text()), set()
    manifest["value"]["tables"]["item"]["config"] = {}  # any object, for people
    for place, changed in mutations(manifest):
        path.write_text(json.dumps(resigned(changed)))
        found = outcome(copy, lambda: restore(copy, small_engine(), convert=True))
        if found != "refused":
            accepted.add(".".join(map(str, place[1:3])))
            assert_same(contents(small_engine(), found.state), wanted)
    numbers = {"counters.bad_ids", "counters.overflows"}
    assert accepted == {"features.0", *numbers}, "what says nothing of tables"


@pytest.mark.parametrize(
    "file",
    ["tables/checksums.0.json", "model/leaves.json", "model/checksums.json", "position/value.json"],
)
def test_other_files_of_other_types_are_refused(copy, file):
    path = copy / file
    model = MODEL if file.startswith("model") else None
    for place, changed in mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(resigned(changed)))
        found = outcome(copy, lambda: restore(copy, small_engine(), model=model))
        if path.name == "value.json" and place[0] == "value" and place[1:] != ("gone",):
            assert found.position == changed["value"]  # it may be anything
        elif path.name != "checksums.json" or place[-1] != "gone":  # nothing is said of it
            assert found == "refused", place


@pytest.mark.parametrize("given", [1, 3, None, True])
def test_another_format_is_named(copy, given):
    path = copy / "tables/tables.json"
    changed = json.loads(path.read_text()) | {"format": given}
    # Files of the first format named none: the manifest inside had one.
    path.write_text(
        json.dumps(resigned(changed) if given else {"crc32": 1, "value": {"format": 1}})
    )
    said = rf"tables\.json: format: expected 2, got {given}; read it with the tpu_embed that wrote"
    with pytest.raises(ValueError, match=said):
        restore(copy, small_engine())


@pytest.mark.parametrize(
    ("key", "number"), [("step", 2**31), ("step", -1), ("processes", 0), ("processes", 2**63)]
)
def test_numbers_out_of_range_are_refused(copy, key, number):
    rewrite(copy / "tables/tables.json", lambda found: found["value"].update({key: number}))
    said = rf"tables\.json: 'value': '{key}': expected an integer from \d to \d+, got {number}"
    with pytest.raises(ValueError, match=said):
        restore(copy, small_engine())


@pytest.mark.parametrize("text", [DEEP, "[1]", '{"commit_timestamp_nsecs": "x"}', ""])
@pytest.mark.quick(2)
def test_notes_of_orbax_keep_nobody_from_saving(tmp_path, text):
    with CheckpointManager(tmp_path, small_engine(), keep=2) as manager:
        manager.save(1, small_state())
        manager.save(2, small_state())
    (tmp_path / "2/_CHECKPOINT_METADATA").write_text(text)
    with CheckpointManager(tmp_path, small_engine(), keep=2) as manager:
        manager.restore()
        manager.save(3, small_state())
        manager.wait()
        assert manager.all_steps() == [2, 3]
