"""Train DLRM-DCNv2, MLPerf's workload, at a scale that fits this machine, and print its AUC.

The clicks are made up, so that the best possible AUC is known; or they are Criteo's, converted by
`criteo.py` into `train` and `test` of --criteo. Adagrad trains tables and network.
"""

from __future__ import annotations

import argparse
import itertools
import runpy
import time
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path

import dlrm_model as model
import jax
import matplotlib.pyplot as plt
import multi_hot
import optax
from criteo import CONFIG
from flax import nnx
from planted import Planted, best_auc, sources
from tqdm import tqdm

import tpu_embed
from tpu_embed.data import Prefetcher


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=CONFIG, help="the workload, before it is scaled")
    parser.add_argument("--devices", type=int, help="emulate this many CPU devices")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=2048, help="the workload's: 65536")
    parser.add_argument("--scale", type=float, default=1e-4, help="factor of the tables' rows")
    parser.add_argument("--dim", type=int, default=16, help="the workload's: 128")
    parser.add_argument("--most-hot", type=int, default=10, help="the workload's: 100")
    parser.add_argument("--network", type=float, default=0.0625, help="factor of the hidden layers")
    parser.add_argument("--criteo", type=Path, help="directory; without it clicks are planted")
    parser.add_argument("--matrices", type=Path, help="where MLPerf's bags are; without it hashed")
    parser.add_argument("--test-batches", type=int, default=16, help="kept on the devices")
    parser.add_argument("--seed", type=int, help="of first values and planted clicks")
    parser.add_argument("--exchange-dtype", choices=("float32", "bfloat16"), help="of the engine")
    parser.add_argument("--plot", type=Path, default="build/dlrm.png", help="drawn at the end")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected 1 at least, got {value}")
    if args.matrices and not args.criteo:
        parser.error("--matrices goes with --criteo: planted clicks are of hashed bags")
    return args


def make_steps(engine, dense, graph):
    """Return the jitted training step, and the jitted step that adds a batch to the metric."""

    def loss_fn(params, activations, numbers, label):
        return model.loss(nnx.merge(graph, params)(numbers, activations), label)

    @partial(jax.jit, donate_argnums=0)
    def train(trained, batch, numbers, label):
        state, params, opt_state = trained
        activations = engine.lookup(state, batch)
        value_and_grad = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, activation_grads) = value_and_grad(params, activations, numbers, label)
        updates, opt_state = dense.update(grads, opt_state, params)
        state = engine.update(state, batch, activation_grads)
        return (state, optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def score(auc, state, params, batch, numbers, label):
        return auc.add(nnx.merge(graph, params)(numbers, engine.lookup(state, batch)), label)

    return train, score


def fit(args, config, engine, dense, source, test) -> Iterator[tuple[int, float, str]]:
    """Train; yield about ten times: the examples seen, the AUC on the test, and a line to print."""
    state = engine.init(jax.random.key(config.seed))
    graph, params = nnx.split(model.Dlrm(config, rngs=nnx.Rngs(config.seed)))
    start = params, jax.jit(dense.init)(params), model.Auc.empty()
    *network, empty = jax.device_put(start, state.step.sharding)  # as a step returns them
    trained, (train, score) = (state, *network), make_steps(engine, dense, graph)
    expand = multi_hot.bags(config, args.matrices)
    spread = jax.NamedSharding(engine.layout.axes.mesh, jax.P(engine.layout.axes.mesh.axis_names))

    def prepare(examples):
        """Return the features, which are still to be placed, and the rest on the devices."""
        return expand(examples.ids), *jax.device_put((examples.dense, examples.label), spread)

    held_out = list(Prefetcher(engine, map(prepare, test)))  # shows the engine the shapes to come
    engine.check_in_place(train, trained, *held_out[0])
    every, before, begin = max(1, args.steps // 10), 0, time.perf_counter()
    with Prefetcher(engine, map(prepare, itertools.islice(source, args.steps))) as batches:
        for step, batch in enumerate(tqdm(batches, total=args.steps, unit="step"), 1):
            trained, loss = train(trained, *batch)
            if step % every and step < args.steps:
                continue
            text = f"loss {loss:.4f}"  # waits for the device
            speed = (step - before) * args.batch_size / (time.perf_counter() - begin)
            area, error = reduce(lambda m, b: score(m, *trained[:2], *b), held_out, empty).value()
            text = f"{text}  AUC {area:.4f}, bins within {error:.0e}  {speed:.0f} examples/s"
            yield step * args.batch_size, area, text
            before, begin = step, time.perf_counter()


def draw(curve: list[tuple[int, float]], best: float | None, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(*zip(*curve, strict=True), marker="o", label=f"tpu_embed: {curve[-1][1]:.4f}")
    if best:
        axes.axhline(best, color="gray", linestyle="--", label=f"true probabilities: {best:.4f}")
    axes.set(xlabel="examples", ylabel="area under the curve, test", title="DLRM-DCNv2, scaled")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments()
    if args.devices:  # before anything asks JAX for its devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if (size := args.batch_size) % (count := jax.device_count()):
        raise SystemExit(f"--batch-size: expected a multiple of {count} devices, got {size}")
    sizes = {"dim": args.dim, "most_hot": args.most_hot, "network": args.network}
    config = runpy.run_path(str(args.config))["CONFIG"].scaled(args.scale, seed=args.seed, **sizes)
    streams = sources(config, args.criteo, args.batch_size, tests=args.test_batches)
    start = {"accumulators": config.initial_accumulator}
    rule = {"epsilon": config.epsilon, "slot_initializers": start}
    adagrad = tpu_embed.optimizers.Adagrad(config.learning_rate, **rule)
    options = {"exchange_dtype": args.exchange_dtype}
    engine = tpu_embed.EmbeddingEngine(model.feature_config(config), adagrad, **options)
    curve, best = [(0, 0.5)], None
    print(f"{count} device(s), {len(config.rows)} tables of {sum(config.rows)} rows")
    draw(curve, best, args.plot)  # finds out before the training whether it can be written
    for seen, area, text in fit(args, config, engine, adagrad.as_optax(), *streams):
        tqdm.write(f"{seen} examples  {text}")
        curve.append((seen, area))
    if args.criteo is None:
        best, error = best_auc(Planted(config.rows, config.hots, config.seed))
        print(f"AUC of the true probabilities {best:.4f}, standard error {error:.0e}")
        print(f"reached {(curve[-1][1] - 0.5) / (best - 0.5):.2%} of what they have above 0.5")
    draw(curve[1:], best, args.plot)
    print(f"the curve is in {args.plot}")


if __name__ == "__main__":
    main()
