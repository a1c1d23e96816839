"""Rows copied between whatever holds them, drawn at random, beside a dictionary of rows.

Devices (any number of shards, placement, stack, packing and dtype), rows at home on the host, files
of a checkpoint and plain arrays: each pair of them, with rows in any order. Other seeds:

    RANDOM_SEEDS=1000:2000 python -m pytest tests/core/rows/test_copy_rows.py -k many
"""

import itertools
import os

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.layout import resolve
from tpu_embed.core.rows import DeviceRows, blocks_of, copy_rows, devices
from tpu_embed.core.state import TableState
from tpu_embed.io.checkpoint import row_files
from tpu_embed.io.checkpoint.row_files import RowReader
from tpu_embed.io.checkpoint.tables import LocalShards, row_array, write_rows
from tpu_embed.storage import VALUES, HostRows, RowField, slot_field

MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:1000").split(":")))
RULES = (o.SGD(0.1), o.Adagrad(0.1), o.RowWiseAdagrad(0.1))


class Devices:
    """A table of a random layout, whose arrays hold zeros at first."""

    def __init__(self, rng, patch, table, rule):
        size, dim, dtype = table
        packing = rng.choice(["none", "lanes", "words"])
        patch.setattr(resolve, "packing_of", lambda device: packing)
        placement = str(rng.choice(["mod", "div", "replicated"]))
        sizes = [size, *(rng.integers(1, 40, rng.integers(0, 2)).tolist())]
        tables = [
            TableConfig(n, dim, dtype=dtype, name=f"{i}", placement=placement)
            for i, n in enumerate(sizes)
        ]
        order = rng.permutation(len(tables))
        self.engine = EmbeddingEngine(
            [FeatureConfig(tables[i]) for i in order], rule, mesh=mesh(int(rng.integers(1, 9)))
        )
        shapes = jax.eval_shape(self.engine.init, jax.random.key(0))
        zeros = lambda one: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding)  # noqa: E731
        state = jax.tree.map(zeros, shapes)
        assert isinstance(state, TableState)
        self.rows = DeviceRows(state, self.engine.layout, "0")
        self.read, self.write = self.rows.read, self.rows.write
        lines = list(self.rows.lines(size))
        assert np.array_equal(np.sort(np.concatenate([*map(np.asarray, lines)])), np.arange(size))


class Home:
    """Rows at home on the host."""

    def __init__(self, fields):
        self.rows = HostRows(fields)

    def write(self, ids, rows):
        self.rows.write(np.asarray(ids, np.int64).view(np.uint64), rows)

    def read(self, ids):
        found, here = self.rows.read(np.asarray(ids, np.int64).view(np.uint64))
        assert here.all()
        return found


class Arrays:
    """Plain arrays `[V, …]` by part."""

    def __init__(self, fields, size):
        self.arrays = {
            part: np.zeros((size, *one.shape), one.dtype) for part, one in fields.items()
        }

    def write(self, ids, rows):
        for part, array in self.arrays.items():
            array[ids] = rows[part]

    def read(self, ids):
        return {part: array[ids] for part, array in self.arrays.items()}


class Files:
    """What a checkpoint writes of a table, read in ascending order."""

    def __init__(self, path, rng, source, copied):
        state, layout = source.rows.state, source.engine.layout
        self.readers = {}
        for i, (part, f) in enumerate(source.rows.fields.items()):
            array = row_array(path / f"{i}", f)
            shards = LocalShards(state, layout, f, copied=copied)
            self.readers[part] = RowReader(array, write_rows(array, shards))

    def read(self, ids):
        order = np.argsort(ids)
        ascending = ids if isinstance(ids, range) else ids[order]
        found = {}
        for part, reader in self.readers.items():
            rows = reader.read(ascending)
            rows = rows.view(np.uint16) if rows.dtype.name == "bfloat16" else rows
            found[part] = np.empty_like(rows)
            found[part][order] = rows
        return found


def blocks(rng, size):
    """Return all ids in blocks: a range, steps of it, or any order; and where they go."""
    kind, most = rng.integers(3), int(rng.integers(1, size + 1))
    if kind == 0:
        return list(blocks_of(range(size), most))
    if kind == 1:
        step = int(rng.integers(1, 9))
        return [some for first in range(step) for some in blocks_of(range(first, size, step), most)]
    return list(blocks_of(rng.permutation(size), most))


def one_case(seed, path, monkeypatch):
    rng = np.random.default_rng(seed)
    size, dim = int(rng.integers(1, 60)), int(rng.integers(1, 40))
    dtype = str(rng.choice(["float32", "bfloat16"]))
    rule = RULES[rng.integers(len(RULES))]
    made = [Devices(rng, monkeypatch, (size, dim, dtype), rule) for _ in range(2)]
    fields = {
        part: RowField(rows.shape[1:], rows.dtype) for part, rows in made[0].rows.empty(0).items()
    }
    assert VALUES in fields
    assert len(fields) == 1 + (rule != RULES[0])
    assert (slot_field("accumulators") in fields) == (rule != RULES[0])
    small = int(rng.integers(1, 200))
    monkeypatch.setattr(devices, "BLOCK", small)
    monkeypatch.setattr(row_files, "BLOCK", small)
    wanted = {
        part: rng.integers(0, 256, (size, *one.shape, one.dtype.itemsize), np.uint8)
        .view(one.dtype)
        .reshape(size, *one.shape)
        for part, one in fields.items()
    }
    holders = [Arrays(fields, size), made[0], Home(fields), made[1]]
    for array, given in zip(holders[0].arrays.values(), wanted.values(), strict=True):
        array[...] = given
    for source, sink in itertools.pairwise(holders):
        copy_rows(source.read, sink.write, blocks(rng, size))
    files = Files(path, rng, made[1], copied=bool(rng.integers(2)))
    again = Devices(rng, monkeypatch, (size, dim, dtype), rule)
    by_lines = rng.integers(2)
    copy_rows(files.read, again.write, again.rows.lines(size) if by_lines else blocks(rng, size))
    for holder in (*holders, files, again):
        found = holder.read(range(size))
        for part, rows in wanted.items():
            assert found[part].tobytes() == rows.tobytes(), (type(holder), part)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.whole) for n in range(2, 6))]
)
def test_rows_are_the_same_everywhere(seed, tmp_path, monkeypatch):
    for each in range(5 * seed, 5 * seed + 5):
        one_case(each, tmp_path / f"{each}", monkeypatch)


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed, tmp_path, monkeypatch):
    one_case(seed, tmp_path, monkeypatch)
