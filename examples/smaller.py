"""Train tables of half the memory: where rounding to nearest stalls, and at random does not.

Three tables learn the same rows from gradients with noise, by steps of SGD that are small beside
the gaps between two numbers of bfloat16. One is in float32; one in bfloat16, rounded to nearest;
one in bfloat16, rounded at random. The picture shows how far each of them is from what it is to
find.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers

DIM, NOISE, SPREAD = 16, 0.5, 1.5
"""D; the standard deviations of a gradient's noise, and of the numbers that are to be found."""

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "nearest": {"dtype": "bfloat16"},
    "stochastic": {"dtype": "bfloat16", "rounding": "stochastic"},
}


def make_engine(rows: int, learning_rate: float) -> EmbeddingEngine:
    """Return an engine with a table of each kind; all of them start at zero."""
    zeros = jax.nn.initializers.zeros
    features = {
        kind: FeatureConfig(TableConfig(rows, DIM, zeros, name=kind, **options))
        for kind, options in KINDS.items()
    }
    return EmbeddingEngine(features, optimizers.SGD(learning_rate))


def distances(tables: dict[str, jax.Array], wanted: jax.Array) -> dict[str, jax.Array]:
    """Return the root mean square of what each table lacks."""
    errors = {kind: table.astype(jnp.float32) - wanted for kind, table in tables.items()}
    return {kind: jnp.sqrt((error**2).mean()) for kind, error in errors.items()}


def train(rows: int, steps: int, window: int, learning_rate: float) -> dict[str, np.ndarray]:
    """Return the distance of each table after every window of steps."""
    engine = make_engine(rows, learning_rate)
    wanted = SPREAD * jax.random.normal(jax.random.key(1), (rows, DIM))
    batch = engine.place({kind: np.arange(rows) for kind in KINDS})  # every row, in each step

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, batch, wanted):
        def step(state, number):
            key = jax.random.fold_in(jax.random.key(2), number)
            noise = NOISE * jax.random.normal(key, wanted.shape)
            found = engine.lookup(state, batch)
            gradients = {kind: found[kind] - wanted + noise for kind in KINDS}
            return engine.update(state, batch, gradients), None

        def one_window(state, numbers):
            state, _ = jax.lax.scan(step, state, numbers)
            return state, distances(engine.tables(state), wanted)

        numbers = jnp.arange(steps - steps % window).reshape(-1, window)
        return jax.lax.scan(one_window, state, numbers)[1]

    found = run(engine.init(jax.random.key(0)), batch, wanted)
    return {kind: np.asarray(some) for kind, some in found.items()}


def draw(curves: dict[str, np.ndarray], window: int, path: Path) -> None:
    """Draw the distances, on a logarithmic axis."""
    labels = {
        "float32": "float32",
        "nearest": "bfloat16, rounded to nearest",
        "stochastic": "bfloat16, rounded at random",
    }
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for kind, curve in curves.items():
        steps = window * np.arange(1, curve.size + 1)
        axes.semilogy(steps, curve, label=f"{labels[kind]}: {curve[-1]:.3f}")
    axes.set(xlabel="steps", ylabel="distance", title="Small steps in tables of half the memory")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices")
    parser.add_argument("--rows", type=int, default=2_000, help="rows of each table")
    parser.add_argument("--steps", type=int, default=4_000, help="updates")
    parser.add_argument("--window", type=int, default=50, help="steps from point to point")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of SGD")
    parser.add_argument("--plot", type=Path, default="build/smaller.png", help="drawn at the end")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)

    curves = train(args.rows, args.steps, args.window, args.learning_rate)
    for kind, curve in curves.items():
        size = args.rows * DIM * jnp.dtype(KINDS[kind]["dtype"]).itemsize / 1000
        print(f"{kind}: {size:.0f} kB, distance {curve[-1]:.3f} after {args.steps} steps")
    draw(curves, args.window, args.plot)
    print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()
