"""A trainer of one table that is exported and followed."""

import jax
import numpy as np
from facade_cases import mesh

from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig, io
from tpu_embed import optimizers as o

IDS = np.arange(12)


class Trainer:
    """An engine of one table, which may have keys; its state, and the record of it."""

    def __init__(self, *, keys=False):
        living = {"vocabulary": DynamicVocabulary(admit_after=1)} if keys else {}
        self.config = {"x": FeatureConfig(TableConfig(40, 3, name="t", **living))}
        self.engine = EmbeddingEngine(self.config, o.SGD(0.5), mesh=mesh(2))
        self.state, self.exports = self.engine.init(jax.random.key(0)), 0
        self.touched = io.TouchedRows(self.engine)

    def train(self, ids):
        self.state, batch = self.engine.admit(self.state, self.engine.place({"x": ids}))
        self.touched.record(batch, int(self.state.step) + 1)
        ones = jax.tree.map(np.ones_like, self.engine.lookup(self.state, batch))
        self.state = self.engine.update(self.state, batch, ones)

    def tables(self):
        return self.engine.tables(self.state)

    def export(self, path, version):
        self.exports += 1
        options = {"version": version, "vocabularies": self.engine.vocabularies}
        options["platforms"] = "cpu"
        example = {"x": IDS}
        io.export_model(path, lambda a: a["x"], self.tables(), self.config, example, **options)

    def check(self, served):
        """Check that a model has the rows of now."""
        assert served.version == self.touched.version(self.state)
        ids, maps = {"x": np.arange(13)}, self.engine.vocabularies
        wanted = io.serving_lookup(self.tables(), ids, self.config, vocabularies=maps)
        np.testing.assert_array_equal(served(ids), wanted["x"])
