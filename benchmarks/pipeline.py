"""What of the time of `place` a step still shows when a `Prefetcher` places ahead of it.

    python benchmarks/pipeline.py --batch 2048

26 features with 214 ids per sample (the sizes of DLRM-DCNv2). Three loops take the same batches:
placed before they begin, placed in turn with the steps, and placed ahead by a `Prefetcher`. The
share that is visible is (ahead - placed before) / (in turn - placed before). Each step is longer
than a call of `place`, and is of one of two kinds:

    elsewhere   the loop waits without using a core, as for an accelerator
    here        products of matrices on the cores that `place` needs too
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import common


def main() -> None:
    """Print a table of milliseconds per step, and of shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longer", type=float, default=1.5, help="the step, relative to place")
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax

    engine, items = make_data(args.batch)
    for item in items:
        jax.block_until_ready(engine.place(item).packed)
    place = common.interleaved(
        {"place": lambda: jax.block_until_ready(engine.place(items[0]).packed)}, 20
    )["place"]
    print(common.machine())
    print(f"place {place:.1f} ms; steps of {args.longer:g} times that; depth {args.depth}")
    print(f"{'step':10s} {'before':>8s} {'in turn':>8s} {'ahead':>8s} {'visible':>9s}   of rounds")
    for name, step in make_steps(1e-3 * args.longer * place).items():
        rounds = [measure(engine, items, step, args) for _ in range(args.rounds + 1)][1:]
        before, in_turn, ahead = (statistics.median(times) for times in zip(*rounds, strict=True))
        shares = sorted((a - b) / (t - b) for b, t, a in rounds)
        print(
            f"{name:10s} {before:8.1f} {in_turn:8.1f} {ahead:8.1f} "
            f"{statistics.median(shares):9.1%}   {shares[0]:.1%} to {shares[-1]:.1%}"
        )


def make_data(size: int) -> tuple[Any, list[dict]]:
    """Return an engine and four batches of features; the tables are never made."""
    import numpy as np

    import tpu_embed

    rng = np.random.default_rng(0)
    features = {
        f"f{i:02d}": tpu_embed.FeatureConfig(tpu_embed.TableConfig(rows, 128, name=f"t{i:02d}"))
        for i, rows in enumerate(common.DLRM_ROWS)
    }
    engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adagrad(0.005))

    def draw(rows: int, hot: int) -> np.ndarray:
        drawn = rng.zipf(1.2, (size, hot)) - 1
        return np.minimum(drawn, rows - 1).astype(np.int32)

    sizes = list(zip(features, common.DLRM_ROWS, common.DLRM_HOTS, strict=True))
    return engine, [{name: draw(rows, hot) for name, rows, hot in sizes} for _ in range(4)]


def make_steps(seconds: float) -> dict[str, Callable[[Any], None]]:
    """Return the two kinds of steps, each of about this many seconds."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.eye(512)

    @jax.jit
    def multiply(packed: jax.Array, times: int) -> jax.Array:
        start = matrix + packed[:, 0].sum()  # it waits for the batch
        return jax.lax.fori_loop(0, times, lambda _, product: product @ matrix, start)

    def timed(times: int) -> float:
        begin = time.perf_counter()
        multiply(jnp.zeros((1, 1), jnp.int32), times).block_until_ready()
        return time.perf_counter() - begin

    timed(1)
    times = max(1, round(seconds / min(timed(100) / 100 for _ in range(5))))

    def elsewhere(batch: Any) -> None:
        jax.block_until_ready(batch.packed)
        time.sleep(seconds)

    return {
        "elsewhere": elsewhere,
        "here": lambda batch: jax.block_until_ready(multiply(batch.packed, times)),
    }


def measure(
    engine: Any, items: list[dict], step: Callable[[Any], None], args: argparse.Namespace
) -> tuple[float, float, float]:
    """Return milliseconds per step: placed before, in turn, ahead."""
    from tpu_embed.data import Prefetcher

    def loop(batches: Iterable[Any]) -> float:
        begin = time.perf_counter()
        for batch in itertools.islice(batches, args.steps):
            step(batch)
        return 1e3 * (time.perf_counter() - begin) / args.steps

    before = loop(itertools.cycle([engine.place(item) for item in items]))
    in_turn = loop(map(engine.place, itertools.cycle(items)))
    with Prefetcher(engine, itertools.cycle(items), args.depth) as batches:
        step(next(batches))  # the first batch cannot be hidden behind another step
        ahead = loop(batches)
    return before, in_turn, ahead


if __name__ == "__main__":
    main()
