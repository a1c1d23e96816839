"""A search of tables over the devices of two processes; see `process_cases.py`."""

import jax
import numpy as np
from process_cases import mesh, told
from search_cases import integers

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, TableConfig, retrieval

DEVICES, ITEMS, DIM, K = 8, 37, 3, 6
ROWS, QUERIES = integers(0, ITEMS, DIM), integers(1, 5, DIM)
EXCLUDE = np.random.default_rng(2).integers(-1, ITEMS, (5, 12))
KEYS = np.arange(7, dtype=np.uint64) * 3 + 2**60


def search():
    """Return what is found in a table and, by key, in a living one; and the errors of bad calls."""
    tables = [
        TableConfig(ITEMS, DIM, name="item"),
        TableConfig(12, DIM, name="word", vocabulary=DynamicVocabulary()),
    ]
    features = {table.name: FeatureConfig(table) for table in tables}
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(DEVICES))
    state = engine.load_arrays(engine.init(jax.random.key(0)), {"item": ROWS})
    state = engine.set_rows(state, "word", keys=KEYS, values=ROWS[: len(KEYS)])
    found = retrieval.top_k(engine, state, "item", QUERIES, K, exclude=EXCLUDE)
    words = retrieval.top_k(engine, state, "word", QUERIES, K)
    keys = retrieval.keys_of(engine, state, "word", words.ids)
    here = jax.process_index()
    elsewhere = jax.device_put(QUERIES, jax.local_devices()[0])
    bad = QUERIES + here, elsewhere, QUERIES[:, : DIM - here]
    errors = [told(retrieval.top_k, engine, state, "item", queries, K) for queries in bad]
    return jax.tree.map(np.asarray, found), np.asarray(words.scores), keys, errors
