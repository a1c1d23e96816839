"""Memory-mapped examples: all of them, shuffled by blocks, in order and padded."""

import numpy as np
import pytest
from dlrm_cases import CONFIG, ROWS, criteo, dlrm_data, joined, write


def test_stored_is_what_was_read(files, stored):
    want = joined([b for path in files for b in criteo.read(path, ROWS)])
    got = stored.at(slice(None))
    assert isinstance(stored.ids, np.memmap)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


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


def test_an_epoch_without_a_batch_is_refused(stored):
    with pytest.raises(ValueError, match="batch size: expected at most 100, the examples, got 101"):
        next(stored.shuffled(101, seed=0, epoch=0))


def test_evaluation_sees_all_and_pads_the_last_batch(stored):
    batches = list(stored.in_order(32))
    assert [len(batch.label) for batch in batches] == [32] * 4
    assert (batches[-1].label[4:] == -1).all()
    assert (batches[-1].ids[4:] == -1).all()
    real = [dlrm_data.Examples(*(a[b.label >= 0] for a in b)) for b in batches]
    assert rows_of(stored, real) == list(range(100))
