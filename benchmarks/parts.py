"""The memory of a step of `fit` whose batches pass the network in k parts.

    python benchmarks/parts.py

Prints, for each k, the memory that the compiled step takes beside its arguments and results.
"""

from __future__ import annotations

import argparse
import itertools

import common


def main() -> None:
    """Print one line per k."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import numpy as np
    import optax
    from flax import nnx

    import tpu_embed
    from tpu_embed.loop.step import Parts, make_train_step, split_model

    sizes, rngs = [args.dim, args.hidden, args.hidden, 1], nnx.Rngs(0)
    layers = [nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(sizes)]
    model = nnx.Sequential(layers[0], nnx.gelu, layers[1], nnx.gelu, layers[2])
    table = tpu_embed.TableConfig(100_000, args.dim)
    engine = tpu_embed.EmbeddingEngine(
        {"item": tpu_embed.FeatureConfig(table)}, tpu_embed.optimizers.Adagrad(0.1)
    )
    ids = np.random.default_rng(0).integers(0, 100_000, args.batch)
    batch, wanted = engine.place({"item": ids}), np.zeros(args.batch, np.float32)

    def loss(model, activations, wanted):
        return ((model(activations["item"])[:, 0] - wanted) ** 2).mean()

    objective, network = split_model(loss, model)
    sgd = optax.sgd(0.01)

    carry = engine.init(jax.random.key(0)), network, sgd.init(network.trained)
    print(common.machine())
    print(f"B {args.batch}, D {args.dim}, hidden layers of {args.hidden}")
    for k in (1, 2, 4, 8):
        step = make_train_step(objective, sgd, Parts(engine, k, ()), 0)(batch, (wanted,), 0)
        compiled = step.func.lower(carry, batch, rates=(), **step.keywords).compile()
        print(f"k {k}  {compiled.memory_analysis().temp_size_in_bytes / 2**20:6.0f} MiB")


if __name__ == "__main__":
    main()
