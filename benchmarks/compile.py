"""Seconds that libtpu takes to compile a training step: 260 tables of three widths against 26.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/compile.py

No TPU is needed. 26 tables are compiled twice: with as many ids in all as 260 tables have, and with
as many ids per example and table.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import common


def main() -> None:
    """Print the seconds of every program, measured in turns, and their ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()

    import jax
    import numpy as np

    from tpu_embed import FeatureConfig, TableConfig
    from tpu_embed.optimizers import Adagrad
    from tpu_embed.planning.compiled import compile_for

    def programs(tables: int, hot: int) -> tuple[dict[str, Any], dict[str, Any]]:
        widths = (16, 32, 128)
        made = [TableConfig(1000 + i, widths[i % 3], name=f"t{i:03d}") for i in range(tables)]
        shape = jax.ShapeDtypeStruct((args.batch, hot), np.int32)
        features = {table.name: FeatureConfig(table) for table in made}
        return features, dict.fromkeys(features, shape)

    kinds = {
        "26 tables, 10 ids": (26, 10),
        "260 tables, 1 id": (260, 1),
        "26 tables, 1 id": (26, 1),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, (tables, hot) in kinds.items():
            features, batch = programs(tables, hot)
            step = compile_for(args.topology, features, Adagrad(0.1), batch)
            seconds[kind].append(step.seconds)
    print(common.machine())
    medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
    first = next(iter(medians.values()))
    for kind, median in medians.items():
        print(f"{kind:<20} {median:6.1f} s   {median / first:.2f}")


if __name__ == "__main__":
    main()
