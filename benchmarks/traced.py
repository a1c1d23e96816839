"""Ids traced inside a jit beside the same ids in a placed batch: what it costs not to place them.

    python benchmarks/traced.py [--devices 8] [--ids 20480]

A table of 10⁶ × 64 with Adagrad, bags of 20 ids (uniform and Zipf) and of one, so many ids a
device. Prints milliseconds of a lookup and of a step, without `place`, in turns.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import common

CASES = {"bags of 20": (20, False), "bags of 20, Zipf": (20, True), "bags of one": (1, False)}
ROWS, DIM = 1_000_000, 64


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="emulated")
    parser.add_argument("--ids", type=int, default=20_480, help="of each device")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    common.emulate(args.devices)
    print(common.machine())
    for name, (width, zipf) in CASES.items():
        spent = common.interleaved(calls(args, width, zipf=zipf), args.rounds)
        ratio = spent["traced, step"] / spent["placed, step"]
        times = (f"{way} {time:.1f} ms" for way, time in spent.items())
        print(f"  {name}: {'; '.join(times)}; traced ÷ placed step: {ratio:.2f}")


def calls(args, width, *, zipf):
    """Return a lookup and a step in place of either kind."""
    import jax
    import numpy as np

    from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers

    table = TableConfig(ROWS, DIM, combiner="sum", name="t")
    mesh = jax.make_mesh((args.devices,), ("d",))
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, optimizers.Adagrad(0.1), mesh=mesh)
    rng, count = np.random.default_rng(0), args.devices * args.ids
    drawn = rng.zipf(1.2, count) % ROWS if zipf else rng.integers(0, ROWS, count)
    ids = {"x": drawn.astype(np.int32).reshape(-1, width)}
    split = jax.NamedSharding(mesh, jax.P("d"))
    sources = {"placed": engine.place(ids), "traced": jax.device_put(ids, split)}
    now, found = SimpleNamespace(state=engine.init(jax.random.key(0))), {}

    def train(state, source):
        return engine.update(state, source, engine.lookup(state, source))

    lookup, step = jax.jit(engine.lookup), jax.jit(train, donate_argnums=0)

    def run_step(source):
        now.state = jax.block_until_ready(step(now.state, source))

    for way, source in sources.items():
        found[f"{way}, lookup"] = lambda s=source: jax.block_until_ready(lookup(now.state, s))
        found[f"{way}, step"] = lambda s=source: run_step(s)
    return found


if __name__ == "__main__":
    main()
