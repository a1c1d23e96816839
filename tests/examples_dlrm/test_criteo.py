"""The reader of Criteo's files and what it stores: each field, each fault, and shuffled epochs."""

import gzip
import re

import numpy as np
import pytest
from dlrm_cases import CONFIG, ROWS, criteo, dlrm_data, joined, line, write


@pytest.mark.parametrize("block", [7, 1000, None])
def test_criteo_reads_plain_and_compressed_and_stores(lines, files, stored, block):
    _, label, dense, ids = lines
    got = stored.at(slice(None))
    if block is not None:
        batches = [b for path in files for b in criteo.read(path, ROWS, lines=block)]
        assert max(len(batch.label) for batch in batches) == min(block, 60)
        got = joined(batches)
    assert [a.dtype for a in got] == [np.float32, np.float32, np.int32]
    np.testing.assert_array_equal(got.label, label)
    np.testing.assert_allclose(got.dense, dense, rtol=1e-6)  # float32 against float64
    np.testing.assert_array_equal(got.ids, ids)


def test_criteo_takes_numbers_of_64_bits(tmp_path):
    path = write(tmp_path / "day", [line(numbers=["f" * 16, "F"])])
    ids = next(criteo.read(path, ROWS)).ids[0]
    assert ids[:3].tolist() == [(2**64 - 1) % ROWS[0], 15 % ROWS[1], 0]


BAD_LINES = [
    ("", "expected 40 fields separated by tabs, got 1"),
    (line(label=2), "field 1: expected the label, 0 or 1, got b'2'"),
    (line(integers=["", "1.5"]), "field 3: expected an integer of 18 digits at most"),
    (line(numbers=["0x1f"]), "field 15: expected hexadecimal digits, 16 at most, or nothing"),
    (line(numbers=["f" * 17]), "field 15: expected hexadecimal digits, 16 at most"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_LINES)
def test_criteo_names_file_and_line(lines, tmp_path, bad, message):
    path = write(tmp_path / "day", [*lines[0][:12], bad, *lines[0][12:20]])
    with pytest.raises(ValueError, match=re.escape(f"{path}:13: {message}")):
        list(criteo.read(path, ROWS, lines=5))


def test_criteo_names_a_file_cut_short_or_empty(files, tmp_path):
    path = tmp_path / "day.gz"
    empty = "day.gz:1: expected lines, got an empty file"
    for content, words in (
        (files[1].read_bytes()[:-200], r"day.gz:\d+: expected whole gzip data, got: Compressed"),
        (b"", empty),
        (gzip.compress(b""), empty),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            list(criteo.read(path, ROWS))


def test_convert_refuses_before_it_writes(files, tmp_path):
    assert criteo.convert([files[0]], tmp_path, ROWS) == 60
    for path in (tmp_path / "day_9", tmp_path):
        with pytest.raises(ValueError, match=f"{path}: expected a file to read, got none there"):
            criteo.convert([files[0], path], tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"label.bin: is read, and would be written over"):
        criteo.convert([tmp_path / "label.bin"], tmp_path, ROWS)
    with pytest.raises(ValueError, match="expected files to convert, got none"):
        criteo.convert([], tmp_path, ROWS)
    assert len(dlrm_data.Stored.open(tmp_path, ROWS)) == 60  # what was there is as it was


def test_stored_refuses_what_is_not_whole(files, converted, tmp_path):
    with pytest.raises(ValueError, match=r"expected ids mod .*got mod .*same --scale"):
        dlrm_data.Stored.open(converted, CONFIG.rows)
    criteo.convert(files, tmp_path, ROWS)
    with (tmp_path / "ids.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"ids.bin: expected 10400 bytes, got 10401"):
        dlrm_data.Stored.open(tmp_path, ROWS)
    bad = write(tmp_path / "bad", ["?"])
    with pytest.raises(ValueError, match="bad:1: expected 40 fields"):
        criteo.convert([files[0], bad], tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"expected meta.json: convert with"):
        dlrm_data.Stored.open(tmp_path, ROWS)


def rows_of(stored, batches):
    """Return which rows the batches hold: all ids of an example tell it from others."""
    place = {example.tobytes(): row for row, example in enumerate(stored.dense)}
    assert len(place) == len(stored)
    return [place[example.tobytes()] for batch in batches for example in batch.dense]


@pytest.mark.parametrize("block", [1, 7])
def test_epochs_are_shuffled_by_seed_and_epoch(stored, block):
    def epoch(seed, number):
        batches = list(stored.shuffled(30, seed=seed, epoch=number, block=block))
        assert [len(batch.label) for batch in batches] == [30, 30, 30]
        return rows_of(stored, batches)

    first = epoch(0, 0)
    assert first == epoch(0, 0)
    assert len(set(first)) == 90
    assert len({tuple(first), tuple(epoch(0, 1)), tuple(epoch(1, 0))}) == 3
    left_out = [set(range(100)) - set(epoch(0, number)) for number in range(4)]
    assert len(set.union(*left_out)) > 10  # not the same ones in every epoch
    with pytest.raises(ValueError, match="batch size: expected at most 100, the examples, got 101"):
        next(stored.shuffled(101, seed=0, epoch=0))


def test_evaluation_sees_all_and_pads_the_last_batch(stored):
    batches = list(stored.in_order(32))
    assert [len(batch.label) for batch in batches] == [32] * 4
    assert (batches[-1].label[4:] == -1).all()
    assert (batches[-1].ids[4:] == -1).all()
    real = [dlrm_data.Examples(*(a[b.label >= 0] for a in b)) for b in batches]
    assert rows_of(stored, real) == list(range(100))
