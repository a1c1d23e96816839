"""The DLRM-DCNv2 example as a whole: its sources of examples, and what it learns."""

import itertools
import re
import runpy
import sys

import numpy as np
import pytest
from dlrm_cases import CONFIG, ROOT, criteo, dlrm_data, joined, multi_hot, planted


def numbers(pattern, text):
    return [float(x) for x in re.findall(pattern, text)]


FEWER = "\nCONFIG = dataclasses.replace(CONFIG, rows=CONFIG.rows[:5], hots=CONFIG.hots[:5])\n"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dlrm.py", *map(str, arguments)])
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(ROOT / "examples" / "dlrm.py"), run_name="__main__")


REFUSED = {
    "--devices 0": "--devices: expected 1 at least, got 0",
    "--batch-size 0": "--batch-size: expected 1 at least, got 0",
    "--matrices bags": "--matrices goes with --criteo: planted clicks are of hashed bags",
    "--batch-size 12": "--batch-size: expected a multiple of 8 devices, got 12",
    "--scale 0": "scale: expected 0 < scale <= 1, got 0.0",
    "--criteo nowhere": "nowhere/train: expected meta.json: convert with",
    "--plot nowhere.xyz --steps 1": "Format 'xyz' is not supported",
}


@pytest.mark.parametrize("arguments", REFUSED)
@pytest.mark.quick(6)
def test_example_refuses_before_it_trains(monkeypatch, capsys, arguments):
    with pytest.raises((SystemExit, ValueError)) as error:
        run(monkeypatch, *arguments.split())
    printed = capsys.readouterr()
    assert REFUSED[arguments] in f"{error.value} {printed.err}"
    assert "AUC" not in printed.out


@pytest.mark.whole
def test_planted_clicks_are_learned(monkeypatch, capsys, tmp_path):
    config, plot = tmp_path / "fewer.py", tmp_path / "curve.png"
    config.write_text((ROOT / "configs" / "dlrm_dcnv2.py").read_text() + FEWER)  # compiled sooner
    sizes = "--dim 4 --most-hot 2 --network 0.02 --steps 60 --batch-size 256 --test-batches 8"
    where = ["--config", str(config), "--plot", str(plot)]
    run(monkeypatch, *sizes.split(), *where)
    assert plot.stat().st_size > 1000
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
