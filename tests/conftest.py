"""Configure JAX before it starts: 8 emulated CPU devices, strict dtype promotion.

Random numbers are made with a hash that compiles quickly (`quick_random.py`).

Many tests make similar engines, so programs that take at least a tenth of a second to compile are
cached in build/xla, one directory per worker. `JAX_ENABLE_COMPILATION_CACHE=false` turns this off.
"""

import collections
import gc
import os
import signal
import zlib
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
import quick_random  # noqa: E402
import quick_rows  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
quick_random.install()

# Tracing makes many objects that stay, so full collections in between would take a twentieth of
# the time and free little; `collector_skips_what_stays` makes one after each module.
gc.set_threshold(50_000, 50, 100)

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


RESOLVE = "tpu_embed.core.layout.layout.initializer_of"


@pytest.fixture(scope="module", autouse=True)
def quick_first_values(request):
    """Tables without an initializer get rows that are quick to compile (`quick_rows.py`)."""
    with pytest.MonkeyPatch.context() as patched:
        if request.node.get_closest_marker("default_rows") is None:
            patched.setattr(RESOLVE, quick_rows.initializer_of)
        yield


@pytest.fixture(autouse=True)
def default_first_values(request, monkeypatch):
    """Tests marked `default_rows` have the default initializer."""
    if request.node.get_closest_marker("default_rows") is not None:
        monkeypatch.setattr(RESOLVE, quick_rows.default_initializer_of)


def pytest_addoption(parser):
    """Add `--shard K/N`: run the K-th of N parts of the tests that are chosen otherwise."""
    parser.addoption("--shard", default="0/1", help="K/N: run tests whose name falls into part K")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keep the tests of the chosen shard; a test stays in its shard as long as it has its name."""
    _mark_what_is_not_quick(items)
    chosen, count = map(int, config.getoption("shard").split("/"))
    parts = [zlib.crc32(item.nodeid.encode()) % count for item in items]
    left_out = [item for item, part in zip(items, parts, strict=True) if part != chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, part in zip(items, parts, strict=True) if part == chosen]


def _mark_what_is_not_quick(items):
    """Of the cases of a test marked `quick(n)`, mark all but n `whole`; the n are evenly spaced."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("whole"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        count, number = len(of_test), of_test[0].get_closest_marker("quick").args[0]
        # Of 8 cases, 3 are 1, 4 and 7: of [1 device, 8 devices] the second.
        kept = {place * count // number - 1 for place in range(1, number + 1)}
        for place, item in enumerate(of_test):
            if place not in kept:
                item.add_marker(pytest.mark.whole)
