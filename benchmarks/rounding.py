"""What rounding at random costs: steps of a bfloat16 table, beside the same rounded to nearest.

    python benchmarks/rounding.py               a lookup and an update
    python benchmarks/rounding.py --update      the update alone

Prints, for each rule and dim, the least and the median time both ways, in turns, and the ratio of
the least times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common

RULES = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")


def main() -> None:
    """Print a line per rule and dim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--ids", type=int, default=20_480)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--update", action="store_true", help="of the update alone")
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import numpy as np

    import tpu_embed

    def learner(rule: Any, dim: int, rounding: Any) -> dict[str, Any]:
        table = tpu_embed.TableConfig(
            args.rows, dim, name="t", dtype="bfloat16", rounding=rounding, combiner="sum"
        )
        engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table), rule(0.01))
        ids = np.random.default_rng(0).integers(0, args.rows, args.ids)
        batch = engine.place(ids)
        gradients = jax.block_until_ready(jax.random.normal(jax.random.key(1), (args.ids, dim)))
        state = engine.init(jax.random.key(0))

        def train(state: Any, batch: Any, gradients: Any) -> Any:
            if not args.update:
                gradients = gradients * engine.lookup(state, batch)
            return engine.update(state, batch, gradients)

        step = jax.jit(train, donate_argnums=0)
        return {"step": step, "state": state, "batch": batch, "gradients": gradients}

    def seconds(one: dict[str, Any]) -> float:
        begin = time.perf_counter()
        new = one["step"](one["state"], one["batch"], one["gradients"])
        one["state"] = jax.block_until_ready(new)
        return time.perf_counter() - begin

    print(common.machine())
    what = "an update" if args.update else "a step"
    print(f"{args.ids} ids of {args.rows} rows; ms of {what}, least (median)")
    for name in RULES:
        for dim in args.dims:
            rule = getattr(tpu_embed.optimizers, name)
            pair = {kind: learner(rule, dim, kind) for kind in ("nearest", "stochastic")}
            spent = {kind: [] for kind in pair}
            for _ in range(args.rounds):
                for kind, one in pair.items():
                    spent[kind].append(1e3 * seconds(one))
            parts = [
                f"{kind} {min(some[3:]):.2f} ({statistics.median(some[3:]):.2f})"
                for kind, some in spent.items()
            ]
            ratio = min(spent["stochastic"][3:]) / min(spent["nearest"][3:])
            print(f"  {name} D {dim}: {', '.join(parts)}, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
