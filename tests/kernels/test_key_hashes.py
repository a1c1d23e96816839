"""The hashes of keys: nobody outside of the process can choose keys that share one place."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from tpu_embed.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.load().path is None, reason="the compiled kernels are not here")

MASK = 2**64 - 1
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashes(keys):
    found = np.empty(keys.size, np.uint64)
    library = ctypes.CDLL(str(cpu.load().path))
    given = ctypes.c_void_p(keys.ctypes.data), ctypes.c_int64(keys.size)
    library.tpu_embed_host_hashes(*given, ctypes.c_void_p(found.ctypes.data))
    return found


def unshifted(x, bits):
    """Return the number whose exclusive or with itself, shifted to the right, is x."""
    found = x
    for _ in range(64 // bits + 1):
        found = x ^ (found >> np.uint64(bits))
    return found


def crafted(count):
    """Return keys whose hash by a well-known mix, without a secret, has the upper half 1."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(1 << 32)
    x = unshifted(x, 31) * np.uint64(pow(MULTIPLIERS[1], -1, MASK + 1))
    x = unshifted(x, 27) * np.uint64(pow(MULTIPLIERS[0], -1, MASK + 1))
    return unshifted(x, 30)


KEYS = {
    "crafted": crafted(80_000),
    "one after another": np.arange(80_000, dtype=np.uint64),
    "upper bits": np.arange(80_000, dtype=np.uint64) << np.uint64(44),
    "multiples": np.arange(80_000, dtype=np.uint64) * np.uint64(2**61 + 3),
}


@pytest.mark.parametrize("name", KEYS)
def test_hashes_are_spread_as_random_numbers_are(name):
    """The upper half of a hash is the key's place, the lower half tells keys of one place apart."""
    found = hashes(KEYS[name])
    for half in (found >> np.uint64(32), found & np.uint64(2**32 - 1)):
        # Of n random places among 2 n, 1 - (1 - 1 / 2 n) ^ n of 2 n are taken: 0.787 n.
        places = half * np.uint64(2 * found.size) >> np.uint64(32)
        taken = np.unique(places).size / found.size
        assert 0.75 < taken < 0.9  # more than 0.787 for keys that a multiplication keeps apart
        assert np.bincount(places.astype(np.int64)).max() < 20


def test_each_process_has_hashes_of_its_own():
    program = "from test_key_hashes import *; print(hashes(KEYS['multiples'])[:4].tolist())"
    run = [sys.executable, "-c", program]
    folder = __file__.rsplit("/", 1)[0]
    found = subprocess.run(run, capture_output=True, text=True, check=True, cwd=folder).stdout
    assert found.strip() != str(hashes(KEYS["multiples"])[:4].tolist())
