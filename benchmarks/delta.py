"""Time and bytes of a delta against those of a full export, and the time to apply a delta.

    python benchmarks/delta.py --rows 1000000 --dim 64 --touched 100000

Files go to a temporary directory. The full export is of one table, with a model that returns its
activations.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import common


def main() -> None:
    """Print a table of milliseconds and megabytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--touched", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax
    import numpy as np

    import tpu_embed
    from tpu_embed import io

    features = {"x": tpu_embed.FeatureConfig(tpu_embed.TableConfig(args.rows, args.dim, name="x"))}
    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.SGD(0.1))
    state, touched = engine.init(jax.random.key(0)), io.TouchedRows(engine)
    version = touched.version(state)
    ids = np.random.default_rng(0).permutation(args.rows)[: args.touched].astype(np.int32)
    touched.record_rows("x", ids, step=0)
    batch = engine.place({"x": ids})

    with tempfile.TemporaryDirectory() as root:
        numbers = itertools.count()

        def full() -> Path:
            path, one = Path(root, f"full-{next(numbers)}"), {"x": ids[:8]}
            tables = {"x": np.asarray(engine.tables(state)["x"])}
            io.export_model(path, lambda acts: acts, tables, features, one, version=version)
            return path

        def delta() -> Path:
            path = Path(root, f"delta-{next(numbers)}")
            io.export_delta(path, engine, state, touched, since=0)
            return path

        served = [io.load_model(full())]
        change = delta()

        def in_place() -> None:
            served[0] = served[0].apply_in_place(change)

        def load(*, check: bool) -> None:
            io.load_model(Path(root, "full-0"), check=check)

        in_place()  # the first call copies the tables
        cases = {
            "export_model": full,
            "export_delta": delta,
            "load_model": lambda: load(check=True),
            "load_model, check=False": lambda: load(check=False),
            "apply": lambda: served[0].apply(change),
            "apply_in_place": in_place,
            "record a placed batch": lambda: touched.record(batch, 1),
        }
        print(common.machine())
        print(f"{args.rows} rows of {args.dim}, {args.touched} touched, median ms:")
        for name, spent in common.interleaved(cases, args.rounds).items():
            print(f"  {name:26s} {spent:8.1f}")
        for path in (Path(root, "full-0"), change):
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            print(f"  {path.name:26s} {size / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
