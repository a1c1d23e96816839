"""A flax model of eight tables: one `Embeddings`, eight `Embed`s, and `nnx.Embed` with dense optax.

    python benchmarks/flax_tables.py

There are B examples with one id of each table, Adagrad on the tables and SGD on a linear layer. The
first call of each step, which compiles it, is timed by itself; then the steps are timed in turns.
The time of a placed batch has `place` in it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from typing import Any

import common


def main() -> None:
    """Print the medians, the time of the first calls, and ratios, one line per form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import tpu_embed.nn
    from tpu_embed import FeatureConfig, TableConfig

    names = [f"t{n}" for n in range(args.tables)]
    rule = tpu_embed.optimizers.Adagrad(0.1, epsilon=1e-7)

    class Joined(nnx.Module):
        """The rows of an example side by side, then a linear layer."""

        def __init__(self, look_up: Any) -> None:
            self.look_up = look_up
            self.linear = nnx.Linear(args.dim * args.tables, 1, rngs=nnx.Rngs(1))

        def __call__(self, batch: Any) -> Any:
            found = self.look_up(batch)
            return self.linear(jnp.concatenate([found[name] for name in names], axis=1))[:, 0]

    class Each(nnx.Module):
        """A layer of its own for each table."""

        def __init__(self, make: Any) -> None:
            self.layers = nnx.Dict({name: make(nnx.Rngs(n)) for n, name in enumerate(names)})

        def __call__(self, batch: Any) -> Any:
            return {name: self.layers[name](batch[name]) for name in names}

    def embeddings() -> Any:
        tables = {name: TableConfig(args.rows, args.dim, name=name) for name in names}
        features = {name: FeatureConfig(table) for name, table in tables.items()}
        return Joined(tpu_embed.nn.Embeddings(features, rule, rngs=nnx.Rngs(0)))

    def trainer(model: Any, tx: Any, value_and_grad: Any, place: Any = None) -> Any:
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit(donate_argnums=(0, 1))
        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            loss, gradients = value_and_grad(lambda m: ((m(batch) - 1) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return loss

        def call(ids: Any) -> None:
            batch = ids if place is None else place(ids)
            jax.block_until_ready((step(model, optimizer, batch), nnx.state(model)))

        return call

    def label(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[0].key, params)

    def embed(rngs: Any) -> Any:
        return tpu_embed.nn.Embed(args.rows, args.dim, optimizer=rule, rngs=rngs)

    fused, sgd = tpu_embed.nn.fused_value_and_grad, optax.sgd(0.1)
    dense = optax.multi_transform({"look_up": optax.adagrad(0.1), "linear": sgd}, label)
    placed, plain = (
        embeddings(),
        Joined(Each(lambda rngs: nnx.Embed(args.rows, args.dim, rngs=rngs))),
    )
    steps = {
        "Embeddings, placed": trainer(placed, sgd, fused, placed.look_up.place),
        "Embeddings, ids in the jit": trainer(embeddings(), sgd, fused),
        "one Embed per table": trainer(Joined(Each(embed)), sgd, fused),
        "nnx.Embed, dense optax": trainer(plain, dense, nnx.value_and_grad),
    }
    rng = np.random.default_rng(0)
    shape = args.batch
    given = [
        {name: rng.integers(0, args.rows, shape).astype(np.int32) for name in names}
        for _ in range(8)
    ]
    print(common.machine())
    print(f"{args.tables} tables of {args.rows:,} x {args.dim}, B {args.batch}, Adagrad")
    first = {}
    for name, step in steps.items():
        begun = time.perf_counter()
        step(given[0])
        first[name] = time.perf_counter() - begun
    calls = {
        name: functools.partial(lambda step, batches: step(next(batches)), step, batches)
        for (name, step), batches in zip(
            steps.items(), [itertools.cycle(given) for _ in steps], strict=True
        )
    }
    spent = common.interleaved(calls, args.rounds)
    for name in steps:
        print(f"{name:28} {spent[name]:8.2f} ms a step, first call {first[name]:6.2f} s")


if __name__ == "__main__":
    main()
