"""Test the parts of the DLRM-DCNv2 example: sizes, network, metric, data in all its forms."""

import dataclasses
import gc
import gzip
import importlib
import itertools
import re
import runpy
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))
criteo, dlrm_data, dlrm_model, multi_hot, planted = map(
    importlib.import_module, ("criteo", "dlrm_data", "dlrm_model", "multi_hot", "planted")
)

CONFIG = runpy.run_path(str(ROOT / "configs" / "dlrm_dcnv2.py"))["CONFIG"]
TINY = dataclasses.replace(
    CONFIG.scaled(1e-6, dim=4, most_hot=3), bottom=(8, 4), cross_rank=3, top=(8, 1)
)


# -- the workload ------------------------------------------------------------------------------


def test_config_is_the_workload():
    assert len(CONFIG.rows) == len(CONFIG.hots) == 26
    assert sum(CONFIG.rows) == 204_184_588
    assert sum(CONFIG.hots) == 214
    assert sum(CONFIG.rows) * CONFIG.dim * 4 == pytest.approx(104.5e9, rel=1e-3)
    assert sum(CONFIG.hots) * CONFIG.dim * 4 == pytest.approx(109.6e3, rel=1e-3)


def test_scaled_keeps_what_is_not_asked_for():
    small = CONFIG.scaled(1e-4)
    assert small.rows[:6] == (4000, 4, 4, 4, 4, 3)
    assert dataclasses.replace(small, rows=CONFIG.rows) == CONFIG
    assert CONFIG.scaled(1.0) == CONFIG
    other = CONFIG.scaled(0.5, dim=16, most_hot=10)
    assert (other.rows[0], other.bottom, max(other.hots)) == (20_000_000, (512, 256, 16), 10)
    thin = CONFIG.scaled(1, network=0.25)
    assert (thin.bottom, thin.cross_rank) == ((128, 64, 128), 128)
    assert thin.top == (256, 256, 128, 64, 1)


def test_config_refuses():
    with pytest.raises(ValueError, match="scale: expected 0 < scale <= 1, got 2"):
        CONFIG.scaled(2)
    with pytest.raises(ValueError, match="network: expected 0 < network <= 1, got 0"):
        CONFIG.scaled(1, network=0)
    with pytest.raises(ValueError, match="bottom: expected 64"):
        dataclasses.replace(CONFIG, dim=64)
    with pytest.raises(ValueError, match="hots: expected 26 as in rows, got 1"):
        dataclasses.replace(CONFIG, hots=(1,))


def test_features_are_the_tables_in_order():
    features = dlrm_model.feature_config(CONFIG)
    tables = [features[name].table for name in sorted(features)]
    assert tuple(table.vocabulary_size for table in tables) == CONFIG.rows
    assert [table.name for table in tables] == sorted(features)
    assert {(table.dim, table.combiner) for table in tables} == {(128, "sum")}


def test_rows_start_uniform():
    config = CONFIG.scaled(1e-5)
    features = dlrm_model.feature_config(config)
    for name in ("t00", "t05", "t10"):
        table = features[name].table
        rows = table.vocabulary_size
        values = table.initializer(jax.random.key(0), (rows, 128), jnp.float32)
        values, limit = np.asarray(values, np.float64), rows**-0.5
        assert np.abs(values).max() <= limit * (1 + 1e-6)
        error = limit**2 * (4 / 45) ** 0.5 / values.size**0.5  # of the mean of the squares
        assert abs((values**2).mean() - limit**2 / 3) < 5 * error, name


# -- the network -------------------------------------------------------------------------------


def test_network_has_the_workloads_parameters():
    network = nnx.eval_shape(lambda: dlrm_model.Dlrm(CONFIG, rngs=nnx.Rngs(0)))
    parts = [network.bottom, *network.crosses, network.top]
    sizes = [dlrm_model.parameter_count(part) for part in parts]
    assert sizes == [171_392, *[3_542_400] * 3, 5_245_953]
    assert dlrm_model.parameter_count(network) == 16_044_545


def randomised(network, rng):
    """Return the network with other values everywhere, biases too."""
    graph, params = nnx.split(network)
    return nnx.merge(
        graph, jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype) * 0.3, params)
    )


def dense_layers(sequential, x, *, relu_at_end):
    """Return a stack of linear layers and ReLUs in float64."""
    linear = [layer for layer in sequential.layers if isinstance(layer, nnx.Linear)]
    for number, layer in enumerate(linear, 1):
        assert layer.bias is not None
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        if relu_at_end or number < len(linear):
            x = np.maximum(x, 0.0)
    return x


def test_network_is_the_formula():
    rng = np.random.default_rng(0)
    network = randomised(nnx.eval_shape(lambda: dlrm_model.Dlrm(TINY, rngs=nnx.Rngs(0))), rng)
    names = dlrm_model.table_names(26)
    activations = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in reversed(names)}
    dense = rng.normal(size=(5, 13)).astype(np.float32)
    got = nnx.jit(lambda network, *inputs: network(*inputs))(network, dense, activations)

    bottom = dense_layers(network.bottom, dense.astype(np.float64), relu_at_end=True)
    x0 = x = np.concatenate([bottom, *(activations[name] for name in names)], axis=1)
    assert x0.shape == (5, 27 * 4)
    assert len(network.crosses) == 3
    for cross in network.crosses:
        assert cross.down.bias is None
        V, W, b = (
            np.asarray(a[...], np.float64)
            for a in (cross.down.kernel, cross.up.kernel, cross.up.bias)
        )
        assert V.shape == W.T.shape == (27 * 4, 3)
        x = x0 * (x @ V @ W + b) + x
    want = dense_layers(network.top, x, relu_at_end=False)[:, 0]
    # float32 products against float64.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_loss_leaves_padding_out():
    logits, label = jnp.array([2.0, -1.0, 30.0]), jnp.array([1.0, 0.0, -1.0])
    want = (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(-1.0))) / 2
    assert float(dlrm_model.loss(logits, label)) == pytest.approx(want, rel=1e-6)
    assert jax.grad(dlrm_model.loss)(logits, label)[2] == 0
    assert float(dlrm_model.loss(logits, jnp.full(3, -1.0))) == 0


# -- the metric --------------------------------------------------------------------------------


def exact_auc(score, label):
    """Return the area from ranks, equal scores at their mean rank: O(n log n)."""
    _, which, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[which]
    clicks = int((label == 1).sum())
    pairs = clicks * (len(label) - clicks)
    return (rank[label == 1].sum() - clicks * (clicks + 1) / 2) / pairs


def test_exact_auc_counts_pairs():
    rng = np.random.default_rng(1)
    score, label = rng.integers(6, size=50), rng.integers(2, size=50)
    wins = [(a > b) + (a == b) / 2 for a in score[label == 1] for b in score[label == 0]]
    assert exact_auc(score, label) == pytest.approx(np.mean(wins), rel=1e-12)


@pytest.mark.parametrize(("bins", "error"), [(32, 0.1), (1024, 0.005), (2**16, 1e-4)])
def test_auc_over_batches_is_within_its_error(bins, error):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2.0, size=(10, 800)).astype(np.float32)
    logits[0, :4] = [-np.inf, np.inf, -20.0, 20.0]
    label = (rng.random((10, 800)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    traced = []
    add = jax.jit(lambda auc, *batch: traced.append(auc) or auc.add(*batch))
    auc = dlrm_model.Auc.empty(bins)
    for batch in zip(logits, label, strict=True):
        auc = add(auc, *batch)
    value, most = auc.value()
    assert abs(value - exact_auc(logits.ravel(), label.ravel())) <= most + 1e-12
    assert 0 < most < error
    assert int(auc.clicks.sum() + auc.others.sum()) == label.size
    assert len(traced) == 1


def test_auc_of_examples_spread_over_devices():
    rng = np.random.default_rng(0)
    logits, label = rng.normal(size=64), rng.integers(2, size=64)
    label[::5] = -1
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    spread = jax.NamedSharding(mesh, jax.P("x"))
    batch = jax.device_put((logits.astype(np.float32), label.astype(np.float32)), spread)
    value, most = jax.jit(dlrm_model.Auc.add)(dlrm_model.Auc.empty(), *batch).value()
    real = label >= 0
    assert abs(value - exact_auc(logits[real], label[real])) <= most + 1e-12
    assert most < 0.01


def test_auc_counts_a_pair_in_one_bin_half():
    auc = dlrm_model.Auc.empty(4).add(jnp.array([1.0, 1.0, 9.0]), jnp.array([1.0, 0.0, 0.0]))
    assert auc.value() == (0.25, 0.25)  # a pair in one bin, and a pair in the wrong order


def test_auc_counts_exactly_past_float32():
    auc = dlrm_model.Auc.empty(4)
    auc = auc._replace(clicks=auc.clicks.at[2].set(2**31 + 2**25), others=auc.others.at[0].set(1))
    auc = auc.add(jnp.array([1.0]), jnp.array([1.0]))
    assert int(auc.clicks[2]) == 2**31 + 2**25 + 1
    assert auc.value() == (1.0, 0.0)


@pytest.mark.parametrize(
    ("logits", "label", "seen"),
    [
        ([0.0, np.nan], [1.0, 0.0], "1 clicks, 0 others, 1 NaN logits"),
        ([0.0, 1.0], [1.0, 1.0], "2 clicks, 0 others, 0 NaN logits"),
    ],
)
def test_auc_refuses(logits, label, seen):
    auc = dlrm_model.Auc.empty().add(jnp.array(logits), jnp.array(label))
    with pytest.raises(ValueError, match=seen):
        auc.value()


# -- Criteo's files ----------------------------------------------------------------------------

ROWS = CONFIG.scaled(1e-5).rows


def line(label: object = 0, integers=(), numbers=()):
    integers = [*map(str, integers), *[""] * (13 - len(integers))]
    numbers = [*numbers, *[""] * (26 - len(numbers))]
    return "\t".join([str(label), *integers, *numbers])


@pytest.fixture(scope="module")
def lines():
    """Return 100 lines, some fields missing, and what they should become."""
    rng = np.random.default_rng(0)
    label = rng.integers(2, size=100)
    integers = rng.integers(-3, 1000, size=(100, 13))
    numbers = rng.integers(2**32, size=(100, 26))
    no_integer, no_number = rng.random((100, 13)) < 0.2, rng.random((100, 26)) < 0.2
    text = [
        line(
            label[i],
            ["" if no_integer[i, j] else str(integers[i, j]) for j in range(13)],
            ["" if no_number[i, j] else f"{numbers[i, j]:08x}" for j in range(26)],
        )
        for i in range(100)
    ]
    dense = np.log(np.where(no_integer, 0, np.maximum(integers, 0)) + 1.0)
    ids = np.where(no_number, 0, numbers) % np.array(ROWS)
    return text, label, dense, ids


def write(path: Path, text):
    path.write_bytes(("\n".join(text) + "\n").encode())
    return path


@pytest.fixture(scope="module")
def files(lines, tmp_path_factory):
    """Return a plain file of 60 lines and a compressed one of 40."""
    directory = tmp_path_factory.mktemp("criteo")
    packed = gzip.compress("\r\n".join(lines[0][60:]).encode())  # no end of line after the last
    (directory / "day_1.gz").write_bytes(packed)
    return [write(directory / "day_0", lines[0][:60]), directory / "day_1.gz"]


def joined(batches):
    return dlrm_data.Examples(*map(np.concatenate, zip(*batches, strict=True)))


@pytest.mark.parametrize("block", [7, 1000])
def test_criteo_reads_plain_and_compressed(lines, files, block):
    _, label, dense, ids = lines
    batches = [b for path in files for b in criteo.read(path, ROWS, lines=block)]
    assert max(len(batch.label) for batch in batches) == min(block, 60)
    got = joined(batches)
    assert [a.dtype for a in got] == [np.float32, np.float32, np.int32]
    np.testing.assert_array_equal(got.label, label)
    np.testing.assert_allclose(got.dense, dense, rtol=1e-6)  # float32 against float64
    np.testing.assert_array_equal(got.ids, ids)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "expected 40 fields separated by tabs, got 1"),
        (line() + "\t", "expected 40 fields separated by tabs, got 41"),
        (line(label=2), "field 1: expected the label, 0 or 1, got b'2'"),
        (line(label=""), "field 1: expected the label, 0 or 1, got b''"),
        (line(integers=["", "1.5"]), "field 3: expected an integer or nothing, got b'1.5'"),
        (line(integers=["-"]), "field 2: expected an integer or nothing, got b'-'"),
        (line(numbers=["0x1f"]), "field 15: expected hexadecimal digits, 16 at most, or nothing"),
        (line(numbers=["f" * 17]), "field 15: expected hexadecimal digits, 16 at most"),
    ],
)
def test_criteo_names_file_and_line(lines, tmp_path, bad, message):
    path = write(tmp_path / "day", [*lines[0][:12], bad, *lines[0][12:20]])
    with pytest.raises(ValueError, match=re.escape(f"{path}:13: {message}")):
        list(criteo.read(path, ROWS, lines=5))


def test_criteo_takes_numbers_of_64_bits(tmp_path):
    path = write(tmp_path / "day", [line(numbers=["f" * 16, "F"])])
    ids = next(criteo.read(path, ROWS)).ids[0]
    assert ids[:3].tolist() == [(2**64 - 1) % ROWS[0], 15 % ROWS[1], 0]


def test_criteo_names_a_file_cut_short(files, tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(files[1].read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"cut.gz:\d+: expected whole gzip data, got: Compressed"):
        list(criteo.read(path, ROWS))


# -- their binary form -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("binary")
    assert criteo.convert(files, directory, ROWS) == 100
    return directory


@pytest.fixture(scope="module")
def stored(converted):
    return dlrm_data.Stored.open(converted, ROWS)


def test_stored_is_what_was_read(files, stored):
    want = joined([b for path in files for b in criteo.read(path, ROWS)])
    got = stored.at(slice(None))
    assert isinstance(stored.ids, np.memmap)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_stored_refuses_what_is_not_whole(files, converted, tmp_path):
    with pytest.raises(ValueError, match="expected ids mod"):
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
    with pytest.raises(ValueError, match="expected examples to convert, got none"):
        criteo.convert([], tmp_path, ROWS)


@pytest.mark.parametrize("block", [1, 7, 10, 64, 1000])
def test_order_of_blocks_is_a_permutation(block):
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(-(-100 // block))
        rows = dlrm_data._rows(np.arange(100), order, 100, block)
        assert sorted(rows) == list(range(100))
        breaks = np.flatnonzero(np.diff(rows) != 1)
        assert len(breaks) <= len(order) - 1


def rows_of(stored, batches):
    """Return which rows the batches hold: all ids of an example tell it from others."""
    place = {example.tobytes(): row for row, example in enumerate(stored.dense)}
    assert len(place) == len(stored)
    return [place[example.tobytes()] for batch in batches for example in batch.dense]


@pytest.mark.parametrize("block", [1, 8])
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
    with pytest.raises(ValueError, match="expected 101 examples at least, got 100"):
        next(stored.shuffled(101, seed=0, epoch=0))


def test_evaluation_sees_all_and_pads_the_last_batch(stored):
    batches = list(stored.in_order(32))
    assert [len(batch.label) for batch in batches] == [32] * 4
    assert (batches[-1].label[4:] == -1).all()
    assert (batches[-1].ids[4:] == -1).all()
    real = [dlrm_data.Examples(*(a[b.label >= 0] for a in b)) for b in batches]
    assert rows_of(stored, real) == list(range(100))


# -- bags --------------------------------------------------------------------------------------


def test_stored_bags_are_the_reference_matrices(tmp_path, monkeypatch):
    config = CONFIG.scaled(1e-5, most_hot=9)
    monkeypatch.setattr(multi_hot, "DRAWN", 50)  # blocks continue each other
    multi_hot.write_matrices(config, tmp_path)
    generator = np.random.RandomState(0)  # what np.random.seed(0) leaves
    matrices = [
        np.concatenate([np.arange(V)[:, None], generator.randint(0, V, (V, H - 1))], axis=1)
        for V, H in zip(config.rows, config.hots, strict=True)
    ]
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(V, size=40) for V in config.rows], axis=1).astype(np.int32)
    bags = multi_hot.stored_bags(config, tmp_path)(ids)
    assert sorted(bags) == dlrm_model.table_names(26)
    for table, (name, matrix) in enumerate(zip(sorted(bags), matrices, strict=True)):
        assert bags[name].dtype == np.int32
        np.testing.assert_array_equal(bags[name], matrix[ids[:, table]], err_msg=name)


def test_matrices_are_drawn_once_and_for_their_workload(tmp_path):
    config = CONFIG.scaled(1e-6, most_hot=3)
    with pytest.raises(ValueError, match="expected matrices of these tables"):
        multi_hot.stored_bags(config, tmp_path)
    multi_hot.write_matrices(config, tmp_path)
    before = (tmp_path / "t00.npy").stat().st_mtime_ns
    multi_hot.write_matrices(config, tmp_path)
    assert (tmp_path / "t00.npy").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="expected matrices of these tables"):
        multi_hot.stored_bags(CONFIG.scaled(1e-6), tmp_path)


@pytest.mark.parametrize("stored_form", [False, True])
def test_bags_of_padding_are_padding(stored_form, tmp_path):
    multi_hot.write_matrices(TINY, tmp_path)
    expand = multi_hot.stored_bags(TINY, tmp_path) if stored_form else multi_hot.hashed_bags(TINY)
    ids = np.array([[0] * 26, [-1] * 26], np.int32)
    for (_, bag), hot in zip(sorted(expand(ids).items()), TINY.hots, strict=True):
        assert bag.shape == (2, hot)
        assert bag[0, 0] == 0
        assert (bag[0] >= 0).all()
        assert (bag[1] == -1).all()


def test_hashed_bags_are_fixed_and_uniform():
    config = CONFIG.scaled(1e-5)
    ids = np.tile(np.arange(400, dtype=np.int32)[:, None], 26) % np.array(config.rows, np.int32)
    expand = multi_hot.hashed_bags(config)
    bags = expand(ids)
    np.testing.assert_array_equal(bags["t20"][::-1], expand(ids[::-1].copy())["t20"])
    for table, (name, rows) in enumerate(zip(sorted(bags), config.rows, strict=True)):
        assert bags[name].dtype == np.int32
        np.testing.assert_array_equal(bags[name][:, 0], ids[:, table])
        assert 0 <= bags[name].min() <= bags[name].max() < rows
    drawn = bags["t20"][:, 1:].ravel()  # 39,600 of 400 ids
    expected = drawn.size / 400
    chi2 = ((np.bincount(drawn, minlength=400) - expected) ** 2 / expected).sum()
    assert abs(chi2 - 399) < 5 * (2 * 399) ** 0.5
    assert (bags["t19"][:, 1:] != bags["t20"][:, 1:12]).mean() > 0.9


# -- ahead of time -----------------------------------------------------------------------------


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_keeps_the_order():
    assert list(dlrm_data.prefetch(lambda x: x * x, range(50))) == [x * x for x in range(50)]
    assert list(dlrm_data.prefetch(lambda x: x, [None, 0, ()])) == [None, 0, ()]
    assert not threads()


@pytest.mark.parametrize("where", ["make", "source"])
def test_prefetch_raises_here(where):
    def source():
        yield from range(3)
        if where == "source":
            raise OSError("disk gone")
        yield -1

    def make(x):
        if x < 0:
            raise OSError("disk gone")
        return x

    got = []
    with pytest.raises(OSError, match="disk gone"):
        got.extend(dlrm_data.prefetch(make, source(), depth=1))
    assert got == [0, 1, 2]
    assert not threads()


def test_prefetch_is_bounded():
    made = []
    stream = dlrm_data.prefetch(lambda x: made.append(x) or x, itertools.count(), depth=3)
    assert next(stream) == 0
    until = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == list(range(5))  # one taken, three ready, one that waits for room
    stream.close()
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_prefetch_stops_with_its_consumer(depth, wait):
    for size in (2, 3, 4, 1000):
        stream = dlrm_data.prefetch(lambda x: x, range(size), depth=depth)
        next(stream)
        time.sleep(wait)
        del stream
        gc.collect()
        assert not threads()


# -- planted clicks ----------------------------------------------------------------------------

CLICKS = planted.Planted(CONFIG.scaled(1e-4, most_hot=4).rows, CONFIG.scaled(1, most_hot=4).hots)


def test_any_batch_by_index():
    first, again, other = CLICKS.batch(3, 100), CLICKS.batch(3, 100), CLICKS.batch(4, 100)
    assert [a.dtype for a in first] == [np.float32, np.float32, np.int32]
    assert [a.shape for a in first] == [(100,), (100, 13), (100, 26)]
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    another = dataclasses.replace(CLICKS, seed=1)
    assert (another.batch(3, 100).ids != first.ids).any()
    assert (another.logits(first.dense, first.ids) != CLICKS.logits(first.dense, first.ids)).all()


def test_ids_follow_zipf():
    ids, rows, power = CLICKS.batch(0, 20_000).ids[:, 0], CLICKS.rows[0], 1 - planted.EXPONENT
    assert 0 <= ids.min() <= ids.max() < rows
    edges = np.arange(1.0, 12.0) ** power
    share = (edges[1:] - edges[:-1]) / ((rows + 1.0) ** power - 1.0)
    got = np.bincount(ids, minlength=rows)[:10] / ids.size
    assert (np.abs(got - share) < 5 * np.sqrt(share / ids.size)).all()
    assert set(planted.zipf(np.array([0.0, 1.0 - 2**-53]), 40_000_000)) == {0, 39_999_999}


def test_scores_have_unit_variance():
    scores = CLICKS.scores(2, np.arange(100_000))
    assert abs(scores.mean()) < 5 / 100_000**0.5
    assert abs((scores**2).mean() - 1) < 5 * 0.8**0.5 / 100_000**0.5
    assert abs((scores * CLICKS.scores(3, np.arange(100_000))).mean()) < 5 / 100_000**0.5


def test_expected_auc_counts_pairs():
    p = np.random.default_rng(0).integers(1, 9, size=40) / 10
    pairs = [(i, j) for i in range(40) for j in range(40) if i != j]
    top = sum(p[i] * (1 - p[j]) * ((p[i] > p[j]) + (p[i] == p[j]) / 2) for i, j in pairs)
    assert planted.expected_auc(p) == pytest.approx(
        top / sum(p[i] * (1 - p[j]) for i, j in pairs), rel=1e-12
    )


def test_best_auc_is_that_of_the_true_logits():
    best, error = planted.best_auc(CLICKS, batches=8, size=4096)
    assert (best, error) == planted.best_auc(CLICKS, batches=8, size=4096)
    assert 0.65 < best < 0.9
    assert 0 < error < 0.005
    batches = [CLICKS.batch_and_logits(index, 4096) for index in range(8)]
    areas = [exact_auc(logits, examples.label) for examples, logits in batches]
    spread = np.std(areas, ddof=1) / len(areas) ** 0.5
    assert abs(np.mean(areas) - best) < 5 * np.hypot(spread, error)
    examples = joined([examples for examples, _ in batches])
    blurred = np.concatenate([logits for _, logits in batches])
    blurred += np.random.default_rng(0).normal(size=blurred.size)
    assert exact_auc(blurred, examples.label) < best - 0.02


# -- the training ------------------------------------------------------------------------------


def numbers(pattern, text):
    return [float(x) for x in re.findall(pattern, text)]


FEWER = "\nCONFIG = dataclasses.replace(CONFIG, rows=CONFIG.rows[:5], hots=CONFIG.hots[:5])\n"


@pytest.mark.whole
def test_planted_clicks_are_learned(monkeypatch, capsys, tmp_path):
    config, plot = tmp_path / "fewer.py", tmp_path / "curve.png"
    config.write_text((ROOT / "configs" / "dlrm_dcnv2.py").read_text() + FEWER)  # compiled sooner
    sizes = "--dim 4 --most-hot 2 --network 0.02 --steps 60 --batch-size 256 --test-batches 8"
    where = ["--config", str(config), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["dlrm.py", *sizes.split(), *where])
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(ROOT / "examples" / "dlrm.py"), run_name="__main__")
    assert plot.stat().st_size > 1000
    assert not threads()
    out = capsys.readouterr().out
    assert "8 device(s), 5 tables of 4016 rows" in out
    assert numbers(r"(\d+) examples  ", out) == [1536 * k for k in range(1, 11)]
    areas, (best,) = numbers(r"AUC (0\.\d+), bins", out), numbers(r"probabilities (\S+),", out)
    assert areas[0] < 0.62 < 0.7 < areas[-1] < best


def test_sources_of_converted_clicks(tmp_path, files):
    config = CONFIG.scaled(1e-5, most_hot=3)
    for part, path in zip(("train", "test"), files, strict=True):
        criteo.convert([path], tmp_path / part, config.rows)
    train, test = planted.sources(config, tmp_path, 16, tests=2)
    stored = dlrm_data.Stored.open(tmp_path / "train", config.rows)
    batches = list(itertools.islice(train, 6))  # 60 examples: three batches an epoch
    for epoch in (0, 1):
        want = stored.shuffled(16, seed=config.seed, epoch=epoch)
        np.testing.assert_array_equal(joined(want).dense, joined(batches[3 * epoch :][:3]).dense)
    held_out = list(test)
    assert [len(examples.label) for examples in held_out] == [16, 16]
    first = next(criteo.read(files[1], config.rows))
    np.testing.assert_array_equal(joined(held_out).ids, first.ids[:32])
    features = multi_hot.bags(config, tmp_path / "bags")(held_out[0].ids)
    want = multi_hot.stored_bags(config, tmp_path / "bags")(held_out[0].ids)
    np.testing.assert_array_equal(features["t20"], want["t20"])


def test_sources_of_planted_clicks():
    config = CONFIG.scaled(1e-5, most_hot=3)
    clicks = planted.Planted(config.rows, config.hots, config.seed)
    train, test = planted.sources(config, None, 16, tests=2)
    np.testing.assert_array_equal(next(train).ids, clicks.batch(0, 16).ids)
    np.testing.assert_array_equal(next(train).ids, clicks.batch(1, 16).ids)
    np.testing.assert_array_equal(joined(test).ids[:16], clicks.batch(2**30, 16).ids)
