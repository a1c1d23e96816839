"""Rows at home on the host: a dictionary's results, whatever is written, read and removed."""

import contextlib
import errno
import math
import mmap
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from random_rows import FIELDS, Model, check_random_rows, draw_ids, draw_rows, no_file_beyond

from tpu_embed.kernels import host_native, row_store_reference
from tpu_embed.storage import HostRows, RowField

KERNELS = {"native": host_native, "reference": row_store_reference}


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    chosen = KERNELS[request.param]
    monkeypatch.setattr("tpu_embed.kernels.dispatch.row_store_kernels", lambda: chosen)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.quick(4)
def test_rows_are_those_of_a_dictionary(kernels, seed, in_file, tmp_path):
    rng = np.random.default_rng(seed)
    check_random_rows(rng, HostRows(FIELDS, tmp_path if in_file else None), calls=30)
    assert list(tmp_path.iterdir()) == []  # a scratch file has no name


def test_a_store_gives_room_back(kernels, tmp_path):
    fields = {"values": RowField((128,), np.dtype(np.float32))}  # 32,768 rows in a segment
    store, n = HostRows(fields, tmp_path), 100_000
    ids = np.arange(n, dtype=np.uint64)
    rows = {"values": np.random.default_rng(0).random((n, 128), np.float32)}
    store.write(ids, rows)
    full = store.nbytes
    assert store.remove(ids[: n - 1000]) == n - 1000
    assert store.nbytes < full / 3
    assert store._rows.numbers.places == 1000
    read, found = store.read(ids)
    assert np.flatnonzero(found).tolist() == list(range(n - 1000, n))
    np.testing.assert_array_equal(read["values"][found], rows["values"][n - 1000 :])
    # Room that was given back is asked for again.
    store.write(ids, rows)
    read, found = store.read(ids)
    assert found.all()
    np.testing.assert_array_equal(read["values"], rows["values"])


@pytest.mark.whole
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("row_bytes", [40, 508, 12_000])
@pytest.mark.quick(1)
def test_a_store_begins_small_and_doubles(row_bytes, in_file, tmp_path):
    """Both take the same bytes for as many rows, through all segments before the first full one."""
    full = max(4096 * row_bytes, 1 << 24)  # a full segment has no more
    # Segments of a file are whole pages; the least power of two of such rows fills some.
    page = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes) * row_bytes if in_file else 1
    stores, count, found = [], 0, []
    with contextlib.ExitStack() as files:
        for kernels in KERNELS.values():
            file = files.enter_context(tempfile.TemporaryFile(dir=tmp_path)) if in_file else None
            stores.append(kernels.RowStore([row_bytes], file))
        for more in (1, 2, 97, 1000, 900, 5000, 3000):
            ids = np.arange(count, count + more, dtype=np.uint64)
            rows = np.random.default_rng(more).integers(0, 256, (more, row_bytes), np.uint8)
            for store in stores:
                store.write(ids, [rows], 1)
            count += more
            (taken,) = {store.numbers.row_bytes for store in stores}
            found.append(taken)
            used = count * row_bytes
            assert used <= taken <= max(1 << 16, page, min(2 * used, used + full))
        assert len(set(found)) > 3
        read = [np.empty((count, row_bytes), np.uint8) for _ in stores]
        for store, one in zip(stores, read, strict=True):
            assert store.read(np.arange(count, dtype=np.uint64), [one]).all()
        np.testing.assert_array_equal(*read)
        np.testing.assert_array_equal(read[0][-more:], rows)


def test_both_stores_list_ids_in_the_same_order():
    lists = []
    for kernels in KERNELS.values():
        store, rng = kernels.RowStore([4], None), np.random.default_rng(0)
        for _ in range(10):
            ids = draw_ids(rng, 200, 300)
            store.write(ids, [np.zeros((ids.size, 4), np.uint8)], 1)
            store.remove(draw_ids(rng, 100, 300))
        before = store.list(1)
        store.compact()
        lists.append([before.tolist(), store.list(1).tolist(), store.numbers[:2]])
    assert lists[0] == lists[1]


def test_threads_read_while_others_write(kernels):
    # Each thread has ids of its own, the store grows meanwhile, and nobody waits for the other.
    store = HostRows(FIELDS)

    def work(number):
        rng, model = np.random.default_rng(number), Model()
        for _ in range(6):
            ids = draw_ids(rng, 1000, 3000) + np.uint64(number)
            rows = draw_rows(rng, ids.size)
            store.write(ids, rows)
            model.write(ids, rows)
            model.check(store, ids[::7])
            dropped = ids[rng.random(ids.size) < 0.3]
            model.remove(dropped)
            store.remove(dropped)
        model.check(store, np.array(sorted(model.rows), np.uint64))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_a_full_disk_is_told_and_nothing_changes(kernels, tmp_path):
    store, rng = HostRows(FIELDS, tmp_path), np.random.default_rng(0)
    ids, rows = draw_ids(rng, 1000, 1000), draw_rows(rng, 1000)
    store.write(ids, rows)
    more = np.arange(10**9, 10**9 + 2_000_000, dtype=np.uint64)
    zeros = {name: np.zeros((more.size, *f.shape), f.dtype) for name, f in FIELDS.items()}
    with no_file_beyond(1 << 25), pytest.raises(OSError, match="File too large") as raised:
        store.write(more, zeros)
    assert raised.value.errno == errno.EFBIG
    assert len(store) == 1000
    read, found = store.read(ids)
    assert found.all()
    np.testing.assert_array_equal(read["values"], rows["values"])
    assert not store.contains(more[:10]).any()


def test_messages(tmp_path):
    rows, ids = draw_rows(np.random.default_rng(0), 2), np.arange(2, dtype=np.uint64)
    store = HostRows(FIELDS)
    nothing, doubles = RowField((0,), np.dtype(np.float32)), rows["values"].astype(np.float64)
    for call, said in (
        (lambda: HostRows({}), "expected fields of some bytes, got no field"),
        (lambda: HostRows({"a": nothing}), r"expected fields of some bytes, got none in \['a'\]"),
        (lambda: HostRows(FIELDS, tmp_path / "nowhere"), r"got '.*nowhere'; make the folder"),
        (lambda: store.write(ids, {"values": rows["values"]}), r"got rows of \['values'\]"),
        (lambda: store.write(ids, {**rows, "values": doubles}), r"float32\[2, 3\], got float64\["),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert len(store) == 0


def test_a_snapshot_is_not_changed_by_what_is_written_or_removed_later():
    rng, ids = np.random.default_rng(0), np.arange(30, dtype=np.uint64)
    for _ in range(30):
        store = HostRows({"v": RowField((2,), np.dtype(np.float32))})
        store.write(ids, {"v": rng.random((30, 2), np.float32)})
        before, found = store.read(ids)[0]["v"], []
        for _, rows in store.snapshot(ids).blocks(4):
            found.append(rows["v"])
            some = rng.permutation(35)[:9].astype(np.uint64)
            if rng.random() < 0.3:
                store.remove(some)
            else:
                store.write(some, {"v": rng.random((9, 2), np.float32)})
        np.testing.assert_array_equal(np.concatenate(found), before)
