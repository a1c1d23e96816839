"""`placement="auto"`: what is replicated and why, and that nothing else changes."""

import jax
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, planning
from tpu_embed import optimizers as o


def _auto(rows, dim=4, **options):
    return TableConfig(rows, dim, placement="auto", **options)


EACH = o.SGD(use_gradient_accumulation=False)
CASES = {
    "tiny": (_auto(4096), 8, "replicated", "tiny, 64.0 KiB"),
    "large": (_auto(4097), 8, "mod", "64.0 KiB, over 64.0 KiB"),
    "narrow": (_auto(8192, dtype="bfloat16"), 8, "replicated", "tiny, 64.0 KiB"),
    "alone": (_auto(10), 1, "mod", "one device"),
    "axes": (_auto(10, shard_axes=("d",)), 8, "mod", "shard_axes given"),
    "each": (_auto(10, optimizer=EACH), 8, "mod", "its optimizer does not accumulate gradients"),
    "fixed": (_auto(10, optimizer=EACH, trainable=False), 8, "replicated", "tiny, 160 B"),
    "vast": (_auto(2**30), 8, "mod", "16.0 GiB, over 64.0 KiB"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case(case):
    table, devices, placement, why = CASES[case]
    batch = {"x": jax.ShapeDtypeStruct((8,), np.int32)}
    (found,) = planning.plan({"x": FeatureConfig(table)}, o.SGD(), mesh(devices), batch).tables
    assert (found.placement, found.why) == (placement, why)


def test_not_too_many_are_replicated():
    features = [FeatureConfig(_auto(4096, name=f"t{i:04d}")) for i in range(1025)]
    chosen = [feature.table.placement for feature in planning.resolve(features, mesh=mesh(2))]
    assert (chosen.count("replicated"), chosen.count("mod")) == (1024, 1)


def test_what_is_not_auto_is_the_same_object():
    shared, other = _auto(10), TableConfig(10, 4)
    features = {"a": FeatureConfig(shared), "b": [FeatureConfig(other), FeatureConfig(shared)]}
    resolved = planning.resolve(features, mesh=mesh(2))
    assert resolved["a"].table is resolved["b"][1].table
    assert resolved["a"].table.placement == "replicated"
    assert resolved["b"][0].table is other
    assert shared.placement == "auto"
    assert planning.resolve(resolved, mesh=mesh(2)) is resolved
    plain = {"b": FeatureConfig(other)}
    assert planning.resolve(plain, mesh=mesh(2)) is plain


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.quick(1)
def test_the_facade_resolves(devices):
    """Tables are keyed by what was declared, and have the bits of the placement chosen."""
    tiny, large = _auto(10, name="tiny"), _auto(5000, name="large")
    features = {"tiny": FeatureConfig(tiny), "large": FeatureConfig(large)}
    embedding = tpu_embed.TPUEmbedding(features, o.SGD(0.5), mesh=mesh(devices))
    embedding.enqueue({name: np.arange(4) for name in features})
    embedding.apply_gradients(jax.tree.map(np.ones_like, embedding.dequeue()))
    resolved = planning.resolve(features, o.SGD(0.5), mesh=mesh(devices))
    engine = tpu_embed.EmbeddingEngine(resolved, o.SGD(0.5), mesh=mesh(devices))
    before = engine.tables(engine.init(jax.random.key(0)))
    for table in (tiny, large):
        expected = np.array(before[table.name])
        expected[:4] -= 0.5
        np.testing.assert_array_equal(embedding.embedding_tables[table], expected)
    placed = embedding.describe()["tables"]
    assert placed["tiny"]["placement"] == ("replicated" if devices > 1 else "mod")
    assert placed["large"]["placement"] == "mod"
