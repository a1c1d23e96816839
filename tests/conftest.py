"""Configure JAX before it starts: 8 emulated CPU devices, strict dtype promotion.

Many tests make similar engines, so programs that take at least a tenth of a second to compile are
cached in build/xla, one directory per worker. `JAX_ENABLE_COMPILATION_CACHE=false` turns this off.
"""

import gc
import os
import signal
from pathlib import Path

# A shell ignores SIGINT in what it runs in the background; the tests of interrupts, and what they
# start, are to behave as in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
CACHE = Path(__file__).resolve().parents[1] / "build" / "xla"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
if os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)).startswith(str(CACHE)):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / WORKER)  # workers inherit "main"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compiling on a busy machine takes seconds, so no deadline; in CI the same examples every time.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="module", autouse=True)
def collector_skips_what_stays():
    """Keep the garbage collector from scanning what earlier modules left in JAX's caches.

    A worker ends with millions of such objects, and each full collection would visit all of them.
    """
    yield
    gc.collect()
    gc.freeze()
