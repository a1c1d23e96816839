"""Bags made from single ids: MLPerf's matrices, and hashed bags."""

import numpy as np
import pytest
from dlrm_cases import CONFIG, TINY, dlrm_model, multi_hot


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
    with pytest.raises(ValueError, match="expected matrices of these tables"):
        multi_hot.stored_bags(CONFIG.scaled(1e-6), tmp_path)
    before = (tmp_path / "t00.npy").stat().st_mtime_ns
    multi_hot.write_matrices(config, tmp_path)
    assert (tmp_path / "t00.npy").stat().st_mtime_ns == before  # they are drawn once


def test_bags_of_padding_are_padding(tmp_path):
    multi_hot.write_matrices(TINY, tmp_path)
    ids = np.array([[0] * 26, [-1] * 26], np.int32)
    for expand in (multi_hot.stored_bags(TINY, tmp_path), multi_hot.hashed_bags(TINY)):
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
