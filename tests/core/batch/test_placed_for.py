"""A placed batch is refused by every engine that would read its numbers in another way."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, RaggedIds, TableConfig
from tpu_embed import optimizers as o

FREE = {"initializer", "quantization_config", "rounding", "on_bad_gradient", "lookahead"}
"""What is about values of rows, about gradients or about maps, of which a batch has none."""
B = 24
TABLE = {"vocabulary_size": 30, "dim": 3, "name": "t", "combiner": "mean", "dtype": "bfloat16"}
TABLE["optimizer"] = o.SGD(0.5)
FEATURE = {"max_sequence_length": 0}
SEQUENCE = {"max_sequence_length": 3}
TABLE_CHANGES = {
    "vocabulary_size": 31,
    "dim": 4,
    "name": "u",
    "dtype": "float32",
    "placement": "div",
    "shard_axes": "d",  # the same as None, on one axis
    "combiner": "sqrtn",
    "vocabulary": tpu_embed.DynamicVocabulary(),
    "storage": HostStorage(device_rows=30),
    "optimizer": o.SGD(0.5, use_gradient_accumulation=False),
    "trainable": False,
    "initializer": jax.nn.initializers.ones,
    "quantization_config": tpu_embed.QuantizationConfig(8, -1.0, 1.0),
    "rounding": "stochastic",
}
FEATURE_CHANGES = {
    "max_sequence_length": 3,
    "output_shape": (B,),
    "on_bad_id": "drop",
    "name": "other",
    "jagged": True,
}
SEQUENCE_CHANGES = {"max_sequence_length": 2, "jagged": True, "keep": "last", "on_bad_id": "clip"}
OPTIONS = {
    "sum_blocks": 16,
    "stack_tables": False,
    "exchange_dtype": "bfloat16",
    "on_bad_gradient": "skip",
    "optimizer": o.Adagrad(0.1),
    "lookahead": 2,
}
CASES = [
    *(("table", FEATURE, {name: value}) for name, value in TABLE_CHANGES.items()),
    *(("feature", FEATURE, {name: value}) for name, value in FEATURE_CHANGES.items()),
    *(("feature", SEQUENCE, {name: value}) for name, value in SEQUENCE_CHANGES.items()),
    *(("engine", FEATURE, {name: value}) for name, value in OPTIONS.items()),
]
NAMES = [f"{kind}-{''.join(change)}" for kind, _, change in CASES]
SAME_BYTES = {"shard_axes", "stack_tables"}
"""Changes that leave everything as it is here."""


def engine(devices, table=None, feature=FEATURE, **options):
    config = TableConfig(**{**TABLE, **(table or {})})
    features = {"a": FeatureConfig(config, **feature), "b": FeatureConfig(config)}
    return EmbeddingEngine(features, mesh=mesh(devices), **options)


def ids():
    rng = np.random.default_rng(0)
    bags = RaggedIds.from_lists([rng.integers(0, 30, n).tolist() for n in rng.integers(0, 6, B)])
    return {"a": bags, "b": rng.integers(0, 30, (B, 2))}


def test_every_field_is_changed_here():
    fields = {f.name for f in dataclasses.fields(FeatureConfig)}
    assert fields == {"table", *FEATURE_CHANGES, *SEQUENCE_CHANGES}
    assert {f.name for f in dataclasses.fields(TableConfig)} == set(TABLE_CHANGES)
    # Features, meshes and axes are changed in tests of their own; maps have histories.
    elsewhere = {"feature_config", "mesh", "batch_axes", "vocabularies"}
    assert set(inspect.signature(EmbeddingEngine).parameters) == {*OPTIONS, *elsewhere}


@pytest.mark.parametrize("devices", [1, 8, pytest.param(2, marks=pytest.mark.whole)])
@pytest.mark.parametrize(("kind", "feature", "change"), CASES, ids=NAMES)
@pytest.mark.quick(7)
def test_whatever_place_reads_is_bound(kind, feature, change, devices, refused):
    one = engine(devices, feature=feature)
    changes = {"table": {"table": change}, "feature": {"feature": feature | change}}
    other = engine(devices, **{"feature": feature} | changes.get(kind, change))
    batch = one.place(ids())
    state = other.init(jax.random.key(0))
    if {*change} <= FREE | SAME_BYTES or (kind == "engine" and "optimizer" in change):
        found, own = (other.lookup(state, one) for one in (batch, other.place(ids())))
        jax.tree.map(np.testing.assert_array_equal, found, own)
        return
    for call in (other.lookup, jax.jit(other.lookup)):
        refused(r"batch: .*one placed for .*, not .*place it with", call, state, batch)


def test_meshes_of_one_size_are_told_apart(refused):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)

    def on(shard_axes, batch_axes=None):
        config = TableConfig(**{**TABLE, "shard_axes": shard_axes})
        features = {"a": FeatureConfig(config), "b": FeatureConfig(config)}
        axes = Mesh(devices, ("p", "q"))
        return EmbeddingEngine(features, mesh=axes, batch_axes=batch_axes)

    batch, made = on("p").place(ids()), [on("q"), on("p", "q")]
    for other, says in zip(made, ("shard_axes", "batch_axes"), strict=True):
        refused(says, other.lookup, other.init(jax.random.key(0)), batch)


def test_a_batch_that_is_only_looked_up_needs_no_optimizer():
    """An evaluation engine has none, and takes the batches of one that trains."""
    one = engine(8)
    other = engine(8, {"optimizer": None}, sum_blocks=16)
    batch = one.place(ids(), training=False)
    state = other.init(jax.random.key(0))
    expected = other.lookup(state, other.place(ids(), training=False))
    jax.tree.map(np.testing.assert_array_equal, other.lookup(state, batch), expected)


def test_the_stateful_api_refuses_them_too(refused):
    config = TableConfig(**TABLE)
    one, other = (
        tpu_embed.TPUEmbedding(FeatureConfig(config, on_bad_id=policy), None, mesh=mesh(1))
        for policy in ("error", "drop")
    )
    refused(r"on_bad_id 'error', not 'drop'", other.enqueue, one.engine.place(ids()["a"]))
