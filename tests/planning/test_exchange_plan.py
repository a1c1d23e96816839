"""Plans of an exchange in bfloat16: the bytes that each device sends."""

import runpy
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed import FeatureConfig, TableConfig, planning
from tpu_embed import optimizers as o

ROOT = Path(__file__).resolve().parents[2]


def test_an_exchange_in_bfloat16_sends_half():
    workload = runpy.run_path(str(ROOT / "configs/dlrm_dcnv2.py"))["workload"]()
    features, optimizer, ids = workload
    plans = [
        planning.plan(features, optimizer, "v5p:4x4x4", ids, exchange_dtype=dtype)
        for dtype in (None, "float32", "bfloat16")
    ]
    assert plans[0].sent == plans[1].sent
    exact, rounded = plans[0].sent, plans[2].sent
    assert rounded["ids"] == exact["ids"]
    assert rounded["rows"] * 2 == exact["rows"]
    # Row numbers, and the psums of replicated tables, have the same bytes as before.
    assert sum(rounded.values()) < 0.53 * sum(exact.values())
    moved = [sum(one.moved.values()) for one in plans]
    assert moved[2] < moved[0]


def test_copies_of_a_shard_get_rounded_sums():
    """Of a single shard too, whose sums would be added by a psum if they were exact."""
    features = {"x": FeatureConfig(TableConfig(500, 32, name="x", shard_axes=("b",)))}
    ids = {"x": jax.ShapeDtypeStruct((64, 4), np.int32)}
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("a", "b"))
    sent = [
        planning.plan(features, o.Adagrad(), mesh, ids, exchange_dtype=dtype).sent["gradients"]
        for dtype in (None, "bfloat16")
    ]
    partials = planning.plan(features, o.Adagrad(), mesh, ids).spec.stacks[0].partials
    assert sent[1] == 8 * partials * (32 * 2 + 4)
    assert sent[1] < sent[0]
