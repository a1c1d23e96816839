"""Steps update in place even if their gradients do not depend on the activations.

    python benchmarks/in_place.py

In the documented step the gradients depend on the activations, so XLA knows that the lookup comes
before the update. In the other steps only the library tells XLA so; if it did not, XLA would copy
the table. Prints the milliseconds of each step, and the ratio to the documented one. For
comparison, one step is made to copy: its state is not donated.
"""

from __future__ import annotations

import argparse
import functools

import common


def main() -> None:
    """Print one line per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hot", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax
    import jax.numpy as jnp
    import numpy as np

    import tpu_embed

    table = tpu_embed.TableConfig(args.rows, args.dim, combiner="sum")
    feature = {"x": tpu_embed.FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(feature, tpu_embed.optimizers.Adagrad(0.1))
    rng = np.random.default_rng(0)
    batch, other = (
        engine.place({"x": rng.integers(0, args.rows, (args.batch, args.hot))}) for _ in range(2)
    )

    def squared(state, batch):
        activations = engine.lookup(state, batch)
        loss, gradients = jax.value_and_grad(lambda a: jnp.mean(a["x"] ** 2))(activations)
        return engine.update(state, batch, gradients), loss

    def linear(state, batch):
        activations = engine.lookup(state, batch)
        loss, gradients = jax.value_and_grad(lambda a: jnp.mean(a["x"]))(activations)
        return engine.update(state, batch, gradients), loss

    def metric(state, batch):
        number = jnp.mean(engine.lookup(state, other)["x"] ** 2)
        state, loss = squared(state, batch)
        return state, (loss, number)

    class Run:
        """One step with its own state."""

        def __init__(self, step, donate: bool = True) -> None:
            self.step = jax.jit(step, donate_argnums=0 if donate else ())
            self.state = engine.init(jax.random.key(0))
            if donate:
                engine.check_in_place(self.step, self.state, batch)

        def __call__(self) -> None:
            self.state, number = self.step(self.state, batch)
            jax.block_until_ready((self.state, number))

    runs = {
        "documented step": Run(squared),
        "linear loss": Run(linear),
        "second lookup for a metric": Run(metric),
        "state not donated": Run(functools.partial(squared), donate=False),
    }
    print(common.machine())
    print(f"Adagrad step, V {args.rows}, D {args.dim}, B {args.batch}, {args.hot} ids a sample")
    spent = common.interleaved(runs, args.rounds)
    for name, milliseconds in spent.items():
        ratio = milliseconds / spent["documented step"]
        print(f"  {name:27s} {milliseconds:8.2f} ms, {ratio:6.2f} times the documented step")


if __name__ == "__main__":
    main()
