"""Top-k over a table by blocks, beside the whole product and `jax.lax.top_k`.

    python benchmarks/retrieval.py
    python benchmarks/retrieval.py --rows 100000 --dtype bfloat16 --queries 32 --k 10 100 1000

Prints, for each k, the least and the median time of both, in turns, the ratios of these times, the
temporary memory of both programs, and checks that the ids are the same. With --devices, the table
of `top_k` is split over so many emulated CPU devices; the whole product stays on one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exclude", type=int, default=0, help="ids that each query leaves out")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Print four lines per k."""
    args = arguments()
    common.emulate(args.devices)
    searches = make_searches(args)
    print(common.machine())
    print(f"V {args.rows}, D {args.dim}, B {args.queries}, {args.dtype}, E {args.exclude}; ms")
    for k in args.k:
        compare(k, searches, args.rounds)


def make_searches(args: argparse.Namespace) -> dict[str, tuple[Any, tuple[Any, Any]]]:
    """Return two functions of operands and k, which give scores and ids, with their operands."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import tpu_embed
    from tpu_embed import retrieval

    table = tpu_embed.TableConfig(
        args.rows, args.dim, jax.nn.initializers.normal(1.0), name="t", dtype=args.dtype
    )
    engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table))
    state = engine.init(jax.random.key(0))
    whole = jax.device_put(np.asarray(engine.tables(state)["t"]), jax.devices()[0])
    queries = jax.random.normal(jax.random.key(1), (args.queries, args.dim))
    rng = np.random.default_rng(0)
    hidden = rng.integers(0, args.rows, (args.queries, args.exclude)) if args.exclude else None

    def by_product(whole, queries, k):
        rows = whole.astype(jnp.float32)
        scores = jnp.matmul(queries, rows.T, precision=jax.lax.Precision.HIGHEST)
        if hidden is not None:
            scores = scores.at[np.arange(args.queries)[:, None], hidden].set(-jnp.inf)
        return jax.lax.top_k(scores, k)

    def by_blocks(state, queries, k):
        return retrieval.top_k(engine, state, "t", queries, k, exclude=hidden)

    return {"product": (by_product, (whole, queries)), "top_k": (by_blocks, (state, queries))}


def compare(k: int, searches: dict[str, tuple[Any, tuple[Any, Any]]], rounds: int) -> None:
    """Run both searches in turns, and print their times, memory, and how many ids are the same."""
    import jax
    import numpy as np

    programs = {
        name: jax.jit(search, static_argnums=2).lower(*operands, k).compile()
        for name, (search, operands) in searches.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in programs}
    found = {}
    for number in range(rounds + 1):  # the first one warms up
        for name, program in programs.items():
            begin = time.perf_counter()
            found[name] = jax.block_until_ready(program(*searches[name][1]))
            if number:
                spent[name].append(1e3 * (time.perf_counter() - begin))
    ratios = [each(spent["product"]) / each(spent["top_k"]) for each in (min, statistics.median)]
    print(f"k {k}: top_k has {ratios[0]:.2f} of the product's speed (median {ratios[1]:.2f})")
    for name, times in spent.items():
        memory = programs[name].memory_analysis().temp_size_in_bytes / 2**20
        line = f"least {min(times):.0f}, median {statistics.median(times):.0f}"
        print(f"  {name}: {line}, temporaries {memory:.1f} MiB", flush=True)
    same = np.mean(np.asarray(found["product"][1]) == np.asarray(found["top_k"][1]))
    print(f"  ids that are the same: {same:.4f}", flush=True)


if __name__ == "__main__":
    main()
