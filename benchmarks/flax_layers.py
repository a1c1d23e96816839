"""A step of a flax model with our layer, against the same model with `nnx.Embed` and dense optax.

    python benchmarks/flax_layers.py

There are B examples of 20 ids, Adagrad on the table and SGD on a linear layer. Both steps are
jitted by nnx with donation. For each vocabulary size they are timed in turns, and their tables are
compared after the first step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import common


def main() -> None:
    """Print the medians and their ratio, one line per vocabulary size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hot", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import numpy as np
    import optax
    from flax import nnx

    import tpu_embed.nn

    class Model(nnx.Module):
        """The sum of the rows of an example, then a linear layer."""

        def __init__(self, embed: Any) -> None:
            self.embed = embed
            self.linear = nnx.Linear(args.dim, 1, rngs=nnx.Rngs(1))

        def __call__(self, ids: Any) -> Any:
            return self.linear(self.embed(ids).sum(1))[:, 0]

    def label(params: Any) -> Any:
        """Return, for each parameter, the name of the part of the model that has it."""
        return jax.tree.map_with_path(lambda path, _: path[0].key, params)

    def trainer(model: Model, tx: Any, value_and_grad: Any) -> Any:
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit(donate_argnums=(0, 1))
        def step(model: Any, optimizer: Any, ids: Any) -> Any:
            loss, gradients = value_and_grad(lambda m: ((m(ids) - 1) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return loss

        def call(ids: Any) -> None:
            jax.block_until_ready((step(model, optimizer, ids), nnx.state(model)))

        return call

    rule = tpu_embed.optimizers.Adagrad(0.1, epsilon=1e-7)
    dense = optax.adagrad(0.1, 0.1, eps=1e-14)  # inside the root: the square of ours
    print(common.machine())
    print(f"B {args.batch}, {args.hot} ids an example, D {args.dim}, Adagrad; ms a step")
    print("         V   tpu_embed.nn   nnx.Embed   ratio")
    for rows in args.rows:
        ours = Model(tpu_embed.nn.Embed(rows, args.dim, optimizer=rule, rngs=nnx.Rngs(0)))
        theirs = Model(nnx.Embed(rows, args.dim, rngs=nnx.Rngs(0)))
        theirs.embed.embedding[...] = ours.embed.embedding
        both = optax.multi_transform({"embed": dense, "linear": optax.sgd(0.1)}, label)
        steps = {
            "ours": trainer(ours, optax.sgd(0.1), tpu_embed.nn.fused_value_and_grad),
            "theirs": trainer(theirs, both, nnx.value_and_grad),
        }
        rng, shape = np.random.default_rng(0), (args.batch, args.hot)
        given = [rng.integers(0, rows, shape).astype(np.int32) for _ in range(8)]
        for step in steps.values():
            step(given[0])
        # The two sum the gradients of a row in different orders, so roundings differ.
        np.testing.assert_allclose(
            ours.embed.embedding, theirs.embed.embedding[...], rtol=1e-4, atol=1e-5
        )
        calls = {
            name: functools.partial(lambda step, batches: step(next(batches)), step, batches)
            for (name, step), batches in zip(
                steps.items(), [itertools.cycle(given) for _ in steps], strict=True
            )
        }
        spent = common.interleaved(calls, args.rounds)
        ratio = spent["theirs"] / spent["ours"]
        print(f"{rows:10,} {spent['ours']:14.2f} {spent['theirs']:11.2f} {ratio:7.1f}")


if __name__ == "__main__":
    main()
