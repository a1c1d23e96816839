"""`python -m tpu_embed plan`: what it prints, and how it refuses."""

import json
import sys

import pytest

from tpu_embed import __main__ as command

CONFIG = """
import jax
import numpy as np

import tpu_embed

def workload():
    table = tpu_embed.TableConfig(40_000_000, 128, name="films")
    batch = {"seen": jax.ShapeDtypeStruct((1024, 2), np.int32)}
    return {"seen": tpu_embed.FeatureConfig(table)}, tpu_embed.optimizers.Adagrad(0.1), batch
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "plan", str(config), *args])
        command.main()

    return run


def test_a_plan_is_explained(run, capsys):
    run("--topology", "v5p:2x2x1")
    assert "v5p:2x2x1: 4 device(s), global batch 1,024, 1 table(s)" in capsys.readouterr().out


def test_devices_are_a_target_too(run, capsys):
    run("--topology", "8", "--json")
    assert json.loads(capsys.readouterr().out)["devices"] == 8


def test_what_does_not_fit_is_shown_and_refused(run, capsys):
    with pytest.raises(SystemExit, match=r"error: plan for v5e:1x1: expected at most 16\.0 GiB"):
        run("--topology", "v5e:1x1")
    assert "does NOT fit" in capsys.readouterr().out


def test_errors(run, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="error: topology: expected a chip among"):
        run("--topology", "v99:2x2")
    for content in (None, "x = 1"):
        path = tmp_path / "other.py"
        if content:
            path.write_text(content)
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "plan", str(path), "--topology", "8"])
        with pytest.raises(SystemExit, match="error: config: expected a Python file that defines"):
            command.main()
