"""One batch of 50 times the ids: what a usual step takes before it and after it.

`python benchmarks/outlier.py`; the table has 10⁶ rows of 16, usual batches have 8,000 ids in 1,024
bags, and the outlier has 400,000. Beside it, the same step if all batches had one spec.
"""

from __future__ import annotations

import functools
import statistics
import time

import common
import jax
import numpy as np

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig, optimizers

ROWS, DIM, BATCH, USUAL, OUTLIER, STEPS = 1_000_000, 16, 1024, 8_000, 400_000, 300


def main() -> None:
    table = TableConfig(ROWS, DIM, name="table", combiner="sum")
    engine = tpu_embed.EmbeddingEngine(FeatureConfig(table), optimizers.Adagrad(0.1))
    rng, state = np.random.default_rng(0), engine.init(jax.random.key(0))

    def draw(ids: int) -> RaggedIds:
        splits = np.linspace(0, ids, BATCH + 1).astype(np.int64)
        return RaggedIds(rng.integers(0, ROWS, ids), splits)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        loss, gradients = jax.value_and_grad(lambda a: (a * a).mean())(engine.lookup(state, batch))
        return engine.update(state, batch, gradients), loss

    def run(steps: int, ids: int, spec: tpu_embed.BatchSpec | None = None) -> float:
        """Return the median time of a step, without `place`, in ms."""
        nonlocal state
        times = []
        for _ in range(steps):
            batch = jax.block_until_ready(engine.place(draw(ids), spec=spec))
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            times.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(times)

    run(20, USUAL)
    before = run(STEPS, USUAL)
    run(1, OUTLIER)
    after = run(STEPS, USUAL)
    programs = engine.compilations["update"]
    one_spec = run(STEPS, USUAL, engine.place(draw(OUTLIER)).spec)
    print(f"{common.machine()}")
    print(f"usual step: {before:.2f} ms before the outlier, {after:.2f} ms after it")
    print(f"{after / before:.2f} times as long; {programs} programs compiled")
    print(f"with one spec for all batches {one_spec:.2f} ms, {one_spec / before:.2f} times as long")


if __name__ == "__main__":
    main()
