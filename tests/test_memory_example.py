"""The example of a memory for a language model: at home and resident, the bits are the same."""

import jax
import numpy as np
import pytest
from example_cases import ROOT, config_of, load_from

CONFIG = (ROOT / "configs" / "memory_lm.py").read_text()
SMALL = """
layers, heads, width, block, steps, warm_up, evaluate_every = 2, 2, 16, 8, 6, 2, 6
memory_heads, memory_rows, memory_dim, device_rows = 2, 2_000, 4, 400
"""


@pytest.mark.whole
def test_rows_at_home_are_trained_as_those_on_the_devices(monkeypatch):
    train = load_from("memory_lm", "train", monkeypatch)
    config = config_of(CONFIG + SMALL)
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
