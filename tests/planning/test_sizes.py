"""Bytes on a TPU, as libtpu's compiler reported them for arguments of these shapes."""

import ml_dtypes
import numpy as np
import pytest

from tpu_embed.planning import Topology
from tpu_embed.planning.costs import readable, tiled_bytes, untiled_bytes

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

# Argument bytes that libtpu 0.0.42 gave for v5p, less 512 for the ids beside them.
REPORTED = {
    ((1000, 16), F32): 65_536,
    ((1000, 16), BF16): 32_768,
    ((1000, 128), BF16): 256_000,
    ((1000, 100), F32): 425_984,
    ((1000,), F32): 4_096,
    ((4001, 130), F32): 2_228_224,
    ((4001, 128), F32): 2_052_096,
}


@pytest.mark.parametrize(("shape", "dtype"), REPORTED, ids=str)
def test_tiled(shape, dtype):
    assert tiled_bytes(shape, dtype) == REPORTED[shape, dtype]


def test_untiled():
    assert untiled_bytes((1000, 16), BF16) == 32_000


def test_readable():
    assert [readable(n) for n in (0, 1023, 1024, 2**20 - 1, 1.5 * 2**40, 2**60)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 TiB", "1048576.0 TiB",
    ]  # fmt: skip


# Devices that libtpu 0.0.42 describes.
DEVICES = {"v2:2x2": 8, "v3:2x2": 8, "v4:2x2x1": 4, "v5e:2x2": 4, "v5p:2x2x1": 4, "v6e:2x2": 4,
           "tpu7x:2x2x1": 8}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_topologies(name):
    assert Topology(name).devices == DEVICES[name]


@pytest.mark.parametrize(("largest", "larger"), [("v5e:16x16", "v5e:32x16"),
                                                ("v5p:16x20x28", "v5p:16x24x28")])  # fmt: skip
def test_no_slice_is_larger_than_a_pod(largest, larger):
    Topology(largest)
    with pytest.raises(ValueError, match=r"topology: expected at most .* chips, a pod of v5"):
        Topology(larger)
