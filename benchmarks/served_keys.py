"""A served table with keys beside the same table by row number: time to load it, and to answer.

    python benchmarks/served_keys.py --rows 10000000 --dim 8

Each request has 10 bags of 10 ids. Files go to a temporary directory, and stay in the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import common


def main() -> None:
    """Print milliseconds of loading, and microseconds of answers and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    common.emulate(1)

    import numpy as np

    import tpu_embed
    from tpu_embed import io

    rng = np.random.default_rng(0)
    # An odd factor: all keys differ, and they are spread over 64 bits.
    numbers = np.arange(args.rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys, values = rng.permutation(numbers), np.zeros((args.rows, args.dim), np.float32)
    values[:, 0] = np.arange(args.rows)
    known = {"x": tpu_embed.FixedVocabulary(keys, np.arange(args.rows))}
    kinds: dict[str, dict[str, Any]] = {
        "row numbers": {},
        "keys": {"vocabulary": tpu_embed.DynamicVocabulary()},
    }
    print(common.machine())
    print(f"{args.rows} rows of {args.dim}")
    with tempfile.TemporaryDirectory() as root:
        models = {}
        for kind, options in kinds.items():
            form = args.rows, args.dim
            table = tpu_embed.TableConfig(*form, combiner="sum", name="x", **options)
            features, one = (
                {"x": tpu_embed.FeatureConfig(table)},
                {"x": np.zeros((2, 10), np.int64)},
            )
            kept = {"vocabularies": known if options else None}
            io.export_model(
                f"{root}/{kind}", lambda acts: acts, {"x": values}, features, one, **kept
            )
            for check in (True, False):
                begin = time.perf_counter()
                models[kind] = io.load_model(f"{root}/{kind}", check=check)
                spent = 1e3 * (time.perf_counter() - begin)
                print(f"  load_model, {kind}, check={check}: {spent:.1f} ms")
        spent = {kind: [] for kind in kinds}
        for _ in range(args.requests):
            rows = rng.integers(0, args.rows, (10, 10))
            asked = {"row numbers": rows, "keys": keys[rows].view(np.int64)}
            for kind, model in models.items():
                begin = time.perf_counter()
                model({"x": asked[kind]})["x"].block_until_ready()
                spent[kind].append(time.perf_counter() - begin)
    median = {kind: 1e6 * np.median(times[100:]) for kind, times in spent.items()}
    for kind, one in median.items():
        print(f"  answer, {kind}: {one:.0f} µs, {one / median['row numbers']:.2f} ×")


if __name__ == "__main__":
    main()
