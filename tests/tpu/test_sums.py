"""Sums of rows compiled by libtpu: one SparseCore kernel, and no rows added on a TensorCore."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_cases import sums_of
from programs import SMALL

from tpu_embed.kernels import dispatch
from tpu_embed.planning.chips import Topology
from tpu_embed.planning.compiled import describe_topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)
ENTRIES, SUMS, ROWS = 4096, 512, 1000


def compiled_sums(chip, dim, dtype, weighted):
    """Return the text of a compiled program that sums rows on every device."""
    mesh = Mesh(np.array(describe_topology(Topology(SMALL[chip]))), ("d",))
    by_device = PartitionSpec("d")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False
    )
    def sums(source, index, segments, weights):
        weights = weights if weighted else None
        options = {"weights": weights, "bags": (1,), "periods": SUMS}
        return sums_of(dispatch.gather_sum, source, index, segments, **options)[0]

    def array(shape, dtype):
        shape = (mesh.size * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, by_device))

    source, numbers = array((ROWS, dim), dtype), array((ENTRIES,), jnp.int32)
    lowered = sums.lower(source, numbers, numbers, array((ENTRIES,), jnp.float32))
    text = lowered.compile().as_text()
    assert text is not None
    return text


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
