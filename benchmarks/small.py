"""The cost of Python and dispatch: 32 samples of 26 features, D 16, so kernels have little work.

    python benchmarks/small.py

Prints the median of a step by each API, and of its parts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import common


def median_ms(call: Callable[[], object], count: int = 300) -> float:
    """Return the median milliseconds of a call."""
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent[count // 10 :])


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tables", type=int, default=26)
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import numpy as np

    import tpu_embed

    names = [f"t{t:02d}" for t in range(args.tables)]
    features = {n: tpu_embed.FeatureConfig(tpu_embed.TableConfig(1000, 16, name=n)) for n in names}
    rng = np.random.default_rng(0)
    ids = {n: rng.integers(0, 1000, args.batch).astype(np.int32) for n in names}
    embedding = tpu_embed.TPUEmbedding(features, tpu_embed.optimizers.Adagrad(0.1))

    def by_queue() -> None:
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        embedding.apply_gradients(activations)
        jax.block_until_ready(embedding.state.tables)

    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adagrad(0.1))
    held: dict[str, Any] = {"state": engine.init(jax.random.key(0))}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        return engine.update(state, batch, engine.lookup(state, batch))

    def in_jit() -> None:
        held["state"] = jax.block_until_ready(step(held["state"], engine.place(ids)))

    print(common.machine())
    print(f"B {args.batch}, {args.tables} tables, D 16, Adagrad")
    print(f"  enqueue, dequeue, apply_gradients: {median_ms(by_queue):.2f} ms")
    print(f"  of which enqueue's place: {median_ms(lambda: engine.place(ids)):.2f} ms")
    print(f"  place and one jitted step: {median_ms(in_jit):.2f} ms")


if __name__ == "__main__":
    main()
