"""Searches with blocks as large as they are in use: rounding of floats, and temporary memory."""

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, retrieval
from tpu_embed.retrieval import search


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_scores_of_floats_are_near_those_in_float64(devices):
    """A sum of D products in float32 is off by at most D eps Σ |q x|."""
    table = TableConfig(3000, 20, jax.nn.initializers.normal(1.0), name="t")
    engine = EmbeddingEngine(FeatureConfig(table), mesh=mesh(devices))
    rng = np.random.default_rng(3)
    queries = rng.normal(size=(7, 20)).astype(np.float32)
    state = engine.init(jax.random.key(0))
    rows = np.asarray(engine.tables(state)["t"], np.float64)
    products = queries.astype(np.float64) @ rows.T
    bound = 20 * np.finfo(np.float32).eps * (np.abs(queries) @ np.abs(rows).T)
    found = retrieval.top_k(engine, state, "t", queries, 50)
    ids, scores = np.asarray(found.ids), np.asarray(found.scores)
    of_ids = np.take_along_axis(products, ids, axis=1)
    assert (np.abs(scores - of_ids) <= np.take_along_axis(bound, ids, axis=1)).all()
    # Whatever is left out is below the last one found, but for rounding.
    np.put_along_axis(products, ids, -np.inf, axis=1)
    assert (products - 2 * bound <= scores[:, -1:]).all()
    assert (np.diff(scores) <= 0).all()


def temporaries(size, queries, exclude=0):
    """Return the bytes that a search for 10 rows takes beside a table of 8 columns."""
    engine = EmbeddingEngine(FeatureConfig(TableConfig(size, 8, name="t")), mesh=mesh(1))
    state = jax.eval_shape(engine.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((queries, exclude), np.int32) if exclude else None
    search = jax.jit(lambda s, q, e: retrieval.top_k(engine, s, "t", q, 10, exclude=e))
    lowered = search.lower(state, jax.ShapeDtypeStruct((queries, 8), np.float32), ids)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("exclude", [0, 4])
@pytest.mark.quick(1)
def test_temporaries_do_not_grow_with_the_table(exclude):
    few, many = (temporaries(size, 64, exclude) for size in (200_000, 3_200_000))
    # The blocks are not of quite the same size: their number is rounded up.
    assert many < 1.2 * few
    assert many < 5 * 4 * search.PRODUCT_NUMBERS < 4 * 64 * 200_000


def test_temporaries_do_not_grow_with_the_square_of_what_is_excluded():
    """A comparison of k + E ids with E ids would be 540 MB here."""
    used = temporaries(4096, 128, 2048)
    assert used < 4 * (2 * 128 * 4096 + 8 * 128 * 2048)  # products, and of the ids
