"""A sparse step on a table that is a plain array, against jax.grad and dense optax.

    python benchmarks/sparse_grad.py

Both steps look up B ids, take half the mean squared activation as loss, and apply Adagrad. They
start from the same table, are compared after the first step, and are timed in turns.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import common


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    common.emulate(1)

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import tpu_embed
    from tpu_embed import training

    ids = np.random.default_rng(0).integers(0, args.rows, args.batch).astype(np.int32)
    start = {"table": jax.random.normal(jax.random.key(0), (args.rows, args.dim))}

    def loss(params: Any, rows_of: Any, ids: Any) -> Any:
        return 0.5 * (rows_of(params["table"], ids) ** 2).sum() / args.batch

    rule = tpu_embed.optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-7)
    sparse = training.Optimizer(rule, "adagrad")
    dense = optax.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-14)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def sparse_step(params: Any, state: Any, ids: Any) -> Any:
        rows_of = tpu_embed.embedding_lookup
        return sparse.minimize(lambda p: loss(p, rows_of, ids), params, state)[:2]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def dense_step(params: Any, state: Any, ids: Any) -> Any:
        gradients = jax.grad(loss)(params, lambda table, ids: table[ids], ids)
        updates, state = dense.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    copies = [jax.tree.map(jnp.copy, start) for _ in range(2)]
    held = {
        "sparse": (copies[0], sparse.init(copies[0])),
        "dense": (copies[1], dense.init(copies[1])),
    }
    steps = {"sparse": sparse_step, "dense": dense_step}

    def call(name: str) -> None:
        held[name] = jax.block_until_ready(steps[name](*held[name], ids))

    for name in steps:
        call(name)
    np.testing.assert_allclose(
        held["sparse"][0]["table"], held["dense"][0]["table"], rtol=1e-4, atol=1e-5
    )
    spent = common.interleaved({n: functools.partial(call, n) for n in steps}, args.rounds)
    print(common.machine())
    print(f"V {args.rows:,}, D {args.dim}, B {args.batch}, Adagrad; ms a step")
    print(f"  sparse_value_and_grad, rows only  {spent['sparse']:9.2f}")
    print(f"  jax.grad, dense optax             {spent['dense']:9.2f}")
    print(f"  ratio                             {spent['dense'] / spent['sparse']:9.1f}")


if __name__ == "__main__":
    main()
