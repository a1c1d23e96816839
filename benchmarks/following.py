"""Answers of a served model while deltas are applied to it: milliseconds with and without deltas.

    python benchmarks/following.py --rows 1000000 --dim 64 --touched 10000

Four threads ask a `FollowingModel` all the time, each for 10 bags of 10 keys of a dynamic
vocabulary that is full. First they are alone; then a delta is applied every 100 ms, in which one
row of ten belongs to a key that came since the delta before.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time

import common


def main() -> None:
    """Print the median and the 99th percentile of answers, and the time of a delta."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--touched", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--deltas", type=int, default=30)
    args = parser.parse_args()
    common.emulate(1)

    import numpy as np

    from tpu_embed import io

    with tempfile.TemporaryDirectory() as root:
        deltas = publish(args, root)
        model = io.FollowingModel(io.load_model(f"{root}/model"))
        asked: list[tuple[bool, float]] = []
        state = {"with deltas": False, "done": False}

        def ask(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not state["done"]:
                keys, begin = rng.integers(0, args.rows, (10, 10)), time.perf_counter()
                model({"x": keys})["x"].block_until_ready()
                asked.append((state["with deltas"], time.perf_counter() - begin))

        def applied(path: str) -> float:
            begin = time.perf_counter()
            model.apply(path)
            return time.perf_counter() - begin

        alone = [applied(path) for path in deltas[: args.deltas // 3]][2:]
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(args.threads)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        state["with deltas"], spent = True, []
        for path in deltas[args.deltas // 3 :]:
            spent.append(applied(path))
            time.sleep(0.1)
        state["done"] = True
        for thread in threads:
            thread.join()

    print(common.machine())
    print(
        f"{args.rows} rows of {args.dim}, {args.touched} touched; ms, median and 99th percentile:"
    )
    kinds = {
        "apply, nobody asks": alone,
        "apply, all ask": spent,
        "answer without deltas": [one for busy, one in asked[100:] if not busy],
        "answer with deltas": [one for busy, one in asked if busy],
    }
    for name, seconds in kinds.items():
        median, high = np.percentile(seconds, [50, 99]) * 1e3
        print(f"  {name:24s} {median:8.2f} {high:8.2f}")


def publish(args: argparse.Namespace, root: str) -> list[str]:
    """Export a model, and deltas after steps that train on it; return the paths of the deltas."""
    import jax
    import numpy as np

    import tpu_embed
    from tpu_embed import io

    rules = tpu_embed.DynamicVocabulary()
    table = tpu_embed.TableConfig(args.rows, args.dim, name="x", combiner="sum", vocabulary=rules)
    features = {"x": tpu_embed.FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.SGD(0.1))
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    for keys in np.array_split(rng.permutation(args.rows), 10):
        state, _ = engine.admit(state, engine.place({"x": keys}))
    touched = io.TouchedRows(engine)
    version, paths = touched.version(state), []
    tables, one = {"x": np.asarray(engine.tables(state)["x"])}, {"x": np.zeros((2, 10), np.int64)}
    kept = {"version": version, "vocabularies": engine.vocabularies}
    io.export_model(f"{root}/model", lambda acts: acts, tables, features, one, **kept)
    for step in range(1, args.deltas + 1):
        keys = rng.integers(0, args.rows, args.touched)
        keys[: args.touched // 10] += args.rows * step
        state, batch = engine.admit(state, engine.place({"x": keys}))
        touched.record(batch, step)
        state = engine.update_in_place(state, batch, engine.lookup(state, batch))
        paths.append(f"{root}/delta-{step}")
        version = io.export_delta(paths[-1], engine, state, touched, version)
    return paths


if __name__ == "__main__":
    main()
