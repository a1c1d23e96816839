"""Jagged features make no padded arrays, and are refused where they do not fit.

`tests/whole/test_jagged_property.py` has their numbers.
"""

import math
import re

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.optimizers import SGD


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_no_padded_array_in_a_program(devices):
    # 16 examples of up to 128 ids, all but one of them short.
    lengths = np.full(16, 2)
    lengths[3] = 128
    ids = RaggedIds(np.arange(lengths.sum()) % 99, np.concatenate([[0], np.cumsum(lengths)]))
    largest = []
    for jagged in (False, True):
        feature = FeatureConfig(TableConfig(99, 7, name="t"), 128, jagged=jagged)
        engine = EmbeddingEngine(feature, SGD(0.1), mesh=mesh(devices))
        state, batch = engine.init(jax.random.key(0)), engine.place(ids)
        step = jax.jit(lambda s, b, e=engine: e.update(s, b, e.lookup(s, b)), donate_argnums=0)
        text = step.lower(state, batch).compile().as_text()
        shapes = [shape.split(",") for shape in re.findall(r"f32\[(\d[\d,]*)\]", text)]
        largest.append(max(math.prod(map(int, shape)) for shape in shapes))
    assert largest[0] == 16 // devices * 128 * 7
    assert largest[1] < max(2 * lengths.sum(), 99 + devices) * 7


def test_what_is_refused(refused):
    table = TableConfig(10, 4, name="t")
    says = r"output_shape: expected None for a sequence, got \(8, 3\) with jagged=True; .* is a Jag"
    refused(says, FeatureConfig, table, output_shape=(8, 3), jagged=True)
    engine = EmbeddingEngine({"user": [FeatureConfig(table, jagged=True)]}, SGD(0.1))
    rank = r"feature 'user/0': expected .*\[B, H\], got rank 1; give each example one row"
    refused(rank, engine.place, {"user": [np.zeros(8, np.int32)]})
    state = engine.init(jax.random.key(0))
    size = r"'user/0': batch size: expected a positive multiple of 8.*got 3; use .*pad_batch"
    refused(size, engine.place, {"user": [RaggedIds([0, 0, 0], [0, 1, 2, 3])]})
    refused(size, jax.jit(engine.lookup), state, {"user": [np.zeros((3, 2), np.int32)]})


def test_gradients_of_another_batch_are_refused_and_change_nothing(refused):
    feature = FeatureConfig(TableConfig(10, 4, name="t"), jagged=True)
    engine = EmbeddingEngine({"x": feature}, SGD(1))
    state = engine.init(jax.random.key(0))
    few, many = (engine.place({"x": RaggedIds.from_lists([[1] * n] * 8)}) for n in (2, 50))
    others = engine.lookup(state, many)["x"]
    assert others.values.shape != engine.lookup(state, few)["x"].values.shape
    before = np.array(engine.tables(state)["t"])
    wanted = r"gradient of feature 'x': expected shape \(8, 8, 4\), got .*values that the lookup"
    for gradient in (others, others.values, others.to_padded(2)[0], others.sums()):
        for update in (engine.update, engine.update_in_place):
            refused(wanted, update, state, few, {"x": gradient})
    np.testing.assert_array_equal(engine.tables(state)["t"], before)
