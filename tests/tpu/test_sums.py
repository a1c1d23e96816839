"""Sums of rows compiled by libtpu: one SparseCore kernel, and no rows added on a TensorCore.

So are rows that are read and sums that are made to be sent in bfloat16: no rounding outside.
"""

import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from kernel_cases import sums_of
from programs import SMALL

from tpu_embed.kernels import dispatch, rounded
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import RowsToSum, SumLayout
from tpu_embed.planning import Topology
from tpu_embed.planning.compiled import describe_topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)
ENTRIES, SUMS, ROWS = 4096, 512, 1000


def compiled(chip, run, *operands):
    """Return the text of a compiled program that runs a function on every device of a chip."""
    mesh = Mesh(np.array(describe_topology(Topology(SMALL[chip]))), ("d",))
    specs = {"in_specs": jax.P("d"), "out_specs": jax.P("d")}

    def array(shape, dtype):
        sharding = jax.NamedSharding(mesh, jax.P("d"))
        return jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=sharding)

    everywhere = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))
    return everywhere.lower(*itertools.starmap(array, operands)).compile().as_text()


NUMBERS = ((ENTRIES,), jnp.int32)


def compiled_sums(chip, dim, dtype, weighted):
    """Return the text of a compiled program that sums rows on every device."""

    def sums(source, index, segments, weights):
        weights = weights if weighted else None
        options = {"weights": weights, "bags": (SUMS,)}
        return sums_of(dispatch.gather_sum, source, index, segments, **options)[0]

    return compiled(chip, sums, ((ROWS, dim), dtype), NUMBERS, NUMBERS, ((ENTRIES,), jnp.float32))


@pytest.mark.parametrize(
    ("chip", "dim", "dtype", "weighted"),
    [
        ("v5p", 128, "float32", True),
        ("v5p", 20, "uint16", False),  # bfloat16; columns are padded
        ("v6e", 16, "float32", False),
        ("v6e", 1024, "uint16", True),  # all that a subcore's memory holds
        ("tpu7x", 128, "uint16", True),
        pytest.param("tpu7x", 1536, "float32", False, marks=pytest.mark.whole),  # in two pieces
    ],
)
def test_sums_are_one_kernel(chip, dim, dtype, weighted):
    text = compiled_sums(chip, dim, dtype, weighted)
    kernels = re.findall(r"%gather_sum\S* = .*tpu_custom_call", text)
    assert len(kernels) == (2 if dim > 1024 else 1)
    assert 'async_execution_thread="sparsecore"' in text
    assert not re.search(r" (scatter|gather)\(.*\bf32\[", text)
    rows = rf"f32\[{ENTRIES},\d+\]"
    assert not re.search(rows, text), "rows of entries must not be in memory"


@pytest.mark.parametrize(
    ("chip", "dim"),
    [
        ("v5p", 128),
        *(pytest.param(*one, marks=pytest.mark.whole) for one in [("v6e", 1024), ("tpu7x", 20)]),
    ],
)
def test_rows_and_sums_are_rounded_in_their_kernels(chip, dim):
    held, sent = (RowFormat((dim,), jnp.dtype(t), "words") for t in ("float32", "bfloat16"))

    def run(table, index, segments):
        # A table as it lies there: a parameter that is no array of lines would be copied first.
        rows = rounded.read_rows(table, index, held, sent)
        given = RowsToSum(held.unpack(held.by_row(table)), index, segments)
        return rows, rounded.gather_sum(given, SumLayout((1,), SUMS, filled=False), sent)

    text = compiled(chip, run, (held.array(ROWS).shape, jnp.float32), NUMBERS, NUMBERS)
    for name in ("gather_rounded_rows", "gather_sum"):
        assert len(re.findall(rf"%{name}\S* = u32.*tpu_custom_call", text)) == 1
    assert not re.search(rf"= f32\[{ENTRIES},\d+\]", text), "no row is stored before it is rounded"
    assert not re.search(rf"= f32\[{SUMS},\d+\]", text), "nor is a sum"
    assert "reduce-precision" not in text
