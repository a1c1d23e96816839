"""A table with keys in plain dictionaries, and the exports and deltas of it, without an engine."""

import jax.numpy as jnp
import numpy as np

from tpu_embed import DynamicVocabulary, FixedVocabulary, TableConfig, io
from tpu_embed.io import Version, directory
from tpu_embed.io.delta import delta_files


def version(step, run="run"):
    return Version(run, step, 0, step)


class Keyed:
    """The rows of the keys of a table.

    Args:
      config: its declaration.
      keys: those that it has at first.
      seed: of the values.
    """

    def __init__(self, config: TableConfig, keys=(), seed=0):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.rows = {int(key): self.row() for key in keys}
        self.shared = self.row()

    def row(self):
        return self.rng.normal(size=self.config.dim).astype(jnp.dtype(self.config.dtype))

    @property
    def unseen(self):
        return self.config.vocabulary.unseen

    def trained(self):
        """Return a table as training has it, with rows in any order, and its vocabulary."""
        size = self.config.vocabulary_size
        places = self.rng.permutation(size - (self.unseen == "shared"))[: len(self.rows)]
        table = self.rng.normal(size=(size, self.config.dim)).astype(self.config.dtype)
        for place, row in zip(places, self.rows.values(), strict=True):
            table[place] = row
        if self.unseen == "shared":
            table[-1] = self.shared
        return table, FixedVocabulary(np.array([*self.rows], np.uint64), places)

    def change(self, changed=(), lost=(), shared=False):
        """Give keys other rows, take those of others, and return what a delta says of it."""
        for key in lost:
            self.rows.pop(int(key), None)
        self.rows |= {int(key): self.row() for key in changed}
        self.shared = self.row() if shared else self.shared
        keys = np.array(sorted(map(int, changed)), np.uint64)
        arrays = {
            "keys": keys,
            "values": self._stored([self.rows[int(key)] for key in keys]),
            "lost": np.array(sorted(map(int, lost)), np.uint64),
            "shared": self._stored([self.shared] if shared else []),
        }
        config = self.config
        kind = config.vocabulary_size, config.dim, config.dtype, self.unseen
        return directory.Table(*kind, arrays)

    def _stored(self, rows):
        dtype = jnp.dtype(self.config.dtype)
        values = np.array(rows, dtype).reshape(len(rows), self.config.dim)
        return values.view(np.uint16) if dtype == jnp.bfloat16 else values


def table(name, size=40, dim=3, unseen="zero", **options):
    """Return the declaration of a table with keys."""
    return TableConfig(size, dim, name=name, vocabulary=DynamicVocabulary(unseen=unseen), **options)


def changed_rows(ids, values):
    """Return what a delta says of rows of a table of 6, whose ids are row numbers."""
    arrays = {"ids": np.array(ids, np.int32), "values": np.array(values, np.float32)}
    return directory.Table(6, arrays["values"].shape[1], "float32", None, arrays)


def write_delta(path, first, last, tables, ancestors=()):
    """Write a delta of these changes, by table."""
    path.mkdir(parents=True)
    delta_files.write(path, delta_files.Delta(first, last, ancestors, tables))
    return path


def as_trained(tables):
    """Return tables and vocabularies by name."""
    trained = {one.config.name: one.trained() for one in tables}
    return ({name: pair[i] for name, pair in trained.items()} for i in range(2))


def export_arrays(path, arrays, features, examples, **options):
    """Export the activations of arrays; return the model."""
    options = {"platforms": "cpu"} | options
    io.export_model(path, lambda a: a, arrays, features, examples, **options)
    return io.load_model(path)


def export(path, tables, features, examples, *, arrays=(), **options):
    """Export the activations of tables with keys, and of other arrays; return the model."""
    mine, maps = as_trained(tables)
    options = {"version": version(0), "vocabularies": maps} | options
    return export_arrays(path, {**mine, **dict(arrays)}, features, examples, **options)


def looked_up(tables, features, given, weights=None):
    """Return what `serving_lookup` finds in the tables as training has them."""
    arrays, maps = as_trained(tables)
    return io.serving_lookup(arrays, given, features, weights, vocabularies=maps)
