"""What a placed batch carries does not depend on the host's kernels, to the byte."""

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh
from route_cases import way_of

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import view_stacks
from tpu_embed.kernels import cpu, dispatch, host_native

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)

B = 120
IDS = {"user": 2, "seen": 5, "item": 4, "history": 4, "kind": 3, "long": 30}
"""The most ids of each feature in one example."""
ROWS = {"user": 9000, "seen": 9000, "item": 700, "history": 700, "kind": 3, "long": 4000}

MESHES = {str(n): mesh(n) for n in (1, 2, 3, 4, 8)}
MESHES["2x4"] = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
"""On 2x4 devices, "a" alone splits the batch: four devices hold the same ids."""


def make_engine(where, dtype):
    """Return an engine with tables of every placement and combiner."""
    user = TableConfig(9000, 4, name="user", combiner="mean", dtype=dtype)
    item = TableConfig(700, 8, name="item", placement="div", combiner="sqrtn", dtype=dtype)
    features = {
        "user": FeatureConfig(user),
        "seen": FeatureConfig(user),
        "item": FeatureConfig(item),
        "history": FeatureConfig(item, max_sequence_length=3),
        "kind": FeatureConfig(TableConfig(3, 16, placement="replicated", dtype=dtype)),
        "long": FeatureConfig(TableConfig(4000, 12, dtype=dtype)),
    }
    axes = {"batch_axes": ("a",)} if where == "2x4" else {}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=MESHES[where], **axes)


def draw(rng, *, ragged, weighted):
    """Return ids, skewed and partly absent, and weights or None."""
    ids, weights = {}, {}
    for name, most in IDS.items():
        drawn = np.minimum(rng.zipf(1.2, (B, most)), ROWS[name]) - 1
        if name == "long":  # many different rows: the gradients of bags are fewer than sums of rows
            drawn = rng.integers(0, ROWS[name], drawn.shape)
        present = rng.random(drawn.shape) < 0.8
        scale = rng.random(drawn.shape).astype(np.float32)
        ids[name], weights[name] = np.where(present, drawn, -1).astype(np.int32), scale
        if ragged and name != "seen":  # packed flat, beside ragged ones
            splits = np.append(0, np.cumsum(present.sum(axis=1)))
            ids[name] = RaggedIds(drawn[present], splits)
            weights[name] = scale[present]
    return ids, weights if weighted else None


def place_all(where, dtype, kernels, monkeypatch):
    """Return the packed arrays and the ways of a stream of batches that a new engine places."""
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    engine, rng = make_engine(where, dtype), np.random.default_rng(3)
    packed, ways = [], set()
    for ragged, weighted in [(False, False), (True, False), (False, True), (True, True)] * 2:
        batch = engine.place(*draw(rng, ragged=ragged, weighted=weighted))
        packed.append(np.asarray(batch.packed))
        ways |= {way_of(view) for view in view_stacks(batch.spec, engine.layout)}
    return packed, ways


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.quick(3)
def test_the_bytes_of_a_placed_batch(where, dtype, monkeypatch):
    # A batch of this size uses threads, too.
    monkeypatch.setattr(host_native, "IDS_PER_THREAD", 10)
    monkeypatch.setattr(host_native, "cores", lambda: 3)
    with jax.enable_x64(dtype == "float64"):
        native, ways = place_all(where, dtype, "native", monkeypatch)
        numpy, _ = place_all(where, dtype, "reference", monkeypatch)
    for one, two in zip(native, numpy, strict=True):
        assert one.shape == two.shape
        assert one.tobytes() == two.tobytes()
    if where == "8":
        assert ways == {"exchange", "psum"}
