"""Time and bytes of a delta against those of a full export, and the time to apply a delta.

    python benchmarks/delta.py --rows 1000000 --dim 64 --touched 100000
    python benchmarks/delta.py --rows 1000000 --dim 64 --touched 10000 --living

With `--living`, ids are keys of a dynamic vocabulary that is full, and one touched row of ten
belongs to a key that came since. Files go to a temporary directory. The full export is of one
table, with a model that returns its activations.
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
    parser.add_argument("--living", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax
    import numpy as np

    import tpu_embed
    from tpu_embed import io

    rules = tpu_embed.DynamicVocabulary() if args.living else None
    table = tpu_embed.TableConfig(args.rows, args.dim, name="x", vocabulary=rules)
    features = {"x": tpu_embed.FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.SGD(0.1))
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    if args.living:
        for keys in np.array_split(rng.permutation(args.rows), 10):
            state, _ = engine.admit(state, engine.place({"x": keys}))
    touched = io.TouchedRows(engine)
    version = touched.version(state)
    ids = rng.permutation(args.rows)[: args.touched].astype(np.int32)
    if args.living:
        ids[: args.touched // 10] += args.rows
    batch = engine.place({"x": ids})
    state, batch = engine.admit(state, batch)
    whose = {"rows": None, "keys": ids} if args.living else {"rows": ids}
    touched.record_rows("x", **whose, step=0)

    with tempfile.TemporaryDirectory() as root:
        numbers = itertools.count()

        def full() -> Path:
            path, one = Path(root, f"full-{next(numbers)}"), {"x": ids[:8]}
            tables, kept = {"x": np.asarray(engine.tables(state)["x"])}, {}
            if args.living:
                kept = {"vocabularies": engine.vocabularies}
            io.export_model(path, lambda acts: acts, tables, features, one, version=version, **kept)
            return path

        def delta(since: io.Version = version) -> tuple[Path, io.Version]:
            path = Path(root, f"delta-{next(numbers)}")
            return path, io.export_delta(path, engine, state, touched, since)

        served, chain, newest = [io.load_model(full())], [], version
        for _ in range(args.rounds + 2):
            path, newest = delta(newest)
            chain.append(path)
            touched.record_rows("x", **whose, step=0)
        change, follow = chain[0], iter(chain)

        def in_place() -> None:
            served.append(served.pop().apply_in_place(next(follow)))

        def load(*, check: bool) -> None:
            io.load_model(Path(root, "full-0"), check=check)

        first = served[0]
        in_place()  # the first call copies the tables
        cases = {
            "export_model": full,
            "export_delta": delta,
            "load_model": lambda: load(check=True),
            "load_model, check=False": lambda: load(check=False),
            "apply": lambda: first.apply(change),
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
