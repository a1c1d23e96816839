"""The example of a memory for a language model: at home and resident, the bits are the same."""

import runpy
import types

import jax
import numpy as np
from example_cases import ROOT, load_from

SMALL = {
    "layers": 2,
    "heads": 2,
    "width": 16,
    "block": 8,
    "steps": 6,
    "warm_up": 2,
    "memory_heads": 2,
    "memory_rows": 2_000,
    "memory_dim": 4,
    "device_rows": 400,
    "evaluate_every": 6,
}


def test_rows_at_home_are_trained_as_those_on_the_devices(monkeypatch):
    train = load_from("memory_lm", "train", monkeypatch)
    config = types.SimpleNamespace(**runpy.run_path(str(ROOT / "configs/memory_lm.py")) | SMALL)
    words = np.random.default_rng(0).choice(["so ", "it ", "goes ", "on\n"], 300)
    found = {}
    for kind in train.KINDS:
        text = train.Text("".join(words), config, with_memory=kind != "without")
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps as integers
            report, engine = train.train(config, text, kind, progress=False)
        found[kind] = report.evaluation["loss"]
        if kind != "without":
            ids = np.unique(next(text.batches())[0]["memory"])
            rows = engine.rows(report.state, "memory", ids[ids >= 0])
            found[kind] = (found[kind], rows.tobytes())
    assert found["host"] == found["resident"]
    assert found["without"] != found["host"][0]
