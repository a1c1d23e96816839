"""Lookups and training steps on a GPU, in turns with torch's EmbeddingBag.

    python benchmarks/gpu.py [--rounds N] [--small]

Both sum bags of 20 ids from one table, with uniform and with Zipf ids. Torch has sparse gradients
and its own Adagrad. Torch must be installed; where it has no GPU, or JAX has none, both run on the
CPU, which only shows that the program works.
"""

import argparse
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpu_embed

SHAPES = [(1_000_000, 64, 4096), (1_000_000, 128, 16_384), (10_000_000, 128, 65_536)]
"""Rows, dim and batch size."""
HOT = 20


def draw(rows, batch, kind):
    """Return ids `[batch, HOT]`."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return rng.integers(0, rows, (batch, HOT)).astype(np.int32)
    return np.minimum(rng.zipf(1.2, (batch, HOT)) - 1, rows - 1).astype(np.int32)


def ours(rows, dim, ids):
    """Return calls of a lookup and of a step, each done when it returns."""
    table = tpu_embed.TableConfig(rows, dim, combiner="sum")
    optimizer = tpu_embed.optimizers.Adagrad(0.1)
    engine = tpu_embed.EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)}, optimizer)
    batch, held = engine.place({"x": ids}), [engine.init(jax.random.key(0))]
    look = jax.jit(lambda state, batch: engine.lookup(state, batch)["x"])

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, batch):
        activations = engine.lookup(state, batch)
        loss, gradients = jax.value_and_grad(lambda found: jnp.mean(found["x"] ** 2))(activations)
        return engine.update(state, batch, gradients), loss

    def step():
        held[0], loss = update(held[0], batch)
        jax.block_until_ready(loss)

    engine.check_in_place(update, held[0], batch)
    return {"lookup": lambda: jax.block_until_ready(look(held[0], batch)), "step": step}


def theirs(rows, dim, ids, device):
    """Return the same calls of torch."""
    bag = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, device=device)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1, initial_accumulator_value=0.1)
    ids = torch.as_tensor(ids, device=device)

    def lookup():
        with torch.no_grad():
            bag(ids)
        finish(device)

    def step():
        optimizer.zero_grad()
        (bag(ids) ** 2).mean().backward()
        optimizer.step()
        finish(device)

    return {"lookup": lookup, "step": step}


def finish(device):
    """Wait until torch's GPU has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    """Print a line per shape and kind of ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a hundredth of rows and batch")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and jax.default_backend() == "gpu"
    device = "cuda" if on_gpu else "cpu"
    name = torch.cuda.get_device_name() if on_gpu else "no GPU"
    print(f"{common.machine()}; torch {torch.__version__}; {name}")
    print("| V | D | B | ids | | tpu_embed ms | torch ms | torch ÷ tpu_embed |")
    print("|---|---|---|---|---|---|---|---|")
    for rows, dim, batch in SHAPES:
        scale = 100 if args.small else 1
        for kind in ("uniform", "zipf"):
            ids = draw(rows // scale, batch // scale, kind)
            mine, other = ours(rows // scale, dim, ids), theirs(rows // scale, dim, ids, device)
            for what in ("lookup", "step"):
                cases = {"tpu_embed": mine[what], "torch": other[what]}
                ms = common.interleaved(cases, args.rounds)
                cells = [f"{one:.3f}" for one in ms.values()]
                cells.append(f"{ms['torch'] / ms['tpu_embed']:.2f}")
                shape = f"{rows // scale:,} | {dim} | {batch // scale:,} | {kind} | {what}"
                print(f"| {shape} | {' | '.join(cells)} |", flush=True)
            del mine, other
            if on_gpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
