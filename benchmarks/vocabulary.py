"""The cost follows the batch: time the same step on a small and on a large vocabulary, in turns.

    python benchmarks/vocabulary.py --devices 1

Prints for float32 and bfloat16 tables the milliseconds of both steps, the temporary memory of both
compiled programs, and the ratio of the times. Each vocabulary gets ids from its own range, and then
from the small range only, to separate the effect of the caches.
"""

from __future__ import annotations

import argparse
import functools

import common


def main() -> None:
    """Print one line per dtype and range of ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hot", type=int, default=20)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs=2, default=[100_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax
    import numpy as np

    import tpu_embed

    class Run:
        """An engine with its state, and batches to cycle through."""

        def __init__(self, rows: int, highest: int, dtype: str) -> None:
            table = tpu_embed.TableConfig(rows, args.dim, combiner="sum", dtype=dtype)
            feature = {"x": tpu_embed.FeatureConfig(table)}
            engine = tpu_embed.EmbeddingEngine(feature, tpu_embed.optimizers.Adagrad(0.1))
            rng = np.random.default_rng(0)
            shape = (args.batch, args.hot)
            given = [rng.integers(0, highest, shape).astype(np.int32) for _ in range(4)]
            spec = tpu_embed.BatchSpec.union(*(engine.place({"x": ids}).spec for ids in given))
            self.batches = [engine.place({"x": ids}, spec=spec) for ids in given]
            self.state = engine.init(jax.random.key(0))

            @functools.partial(jax.jit, donate_argnums=0)
            def step(state, batch):
                return engine.update(state, batch, engine.lookup(state, batch))

            self.step = step.lower(self.state, self.batches[0]).compile()
            self.temporaries = self.step.memory_analysis().temp_size_in_bytes
            self.done = 0

        def __call__(self) -> None:
            batch = self.batches[self.done % len(self.batches)]
            self.state = jax.block_until_ready(self.step(self.state, batch))
            self.done += 1

    print(common.machine())
    print(f"Adagrad step, B {args.batch}, {args.hot} ids a sample, D {args.dim}; V = {args.rows}")
    small, large = args.rows
    for dtype in ("float32", "bfloat16"):
        for words, highest in (("own range", large), (f"ids below {small}", small)):
            runs = {str(v): Run(v, min(v, highest), dtype) for v in (small, large)}
            spent = common.interleaved(runs, args.rounds)
            first, second = (spent[str(v)] for v in (small, large))
            temporaries = " and ".join(f"{run.temporaries / 1e6:.2f}" for run in runs.values())
            print(
                f"  {dtype:9s} {words:17s} {first:7.2f} and {second:7.2f} ms, ratio"
                f" {second / first:.2f}; temporaries {temporaries} MB"
            )


if __name__ == "__main__":
    main()
