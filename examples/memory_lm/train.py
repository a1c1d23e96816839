"""Train a small language model without and with a memory of n-grams, larger than the devices.

Each place of the text looks up rows by the hashes of the two and three characters that end there.
The rows are at home on the host, and the devices hold a twentieth of them. Everything is trained by
`fit`: started again with the same --checkpoints, a run goes on where it was stopped.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import beside  # noqa: F401

# isort: split
import jax
import numpy as np
import optax
import settings
from flax import nnx
from jax.sharding import AxisType, Mesh
from network import Network
from text import Text

from tpu_embed import (
    EmbeddingEngine,
    FeatureConfig,
    HostStorage,
    TableConfig,
    fit,
    optimizers,
)

KINDS = ("without", "resident", "host")  # no memory; its rows on the devices; at home on the host


def make_mesh(config) -> Mesh:
    """Return all devices; a batch of 12 blocks is split over at most 4, rows over all of them."""
    replicas = math.gcd(jax.device_count(), config.sum_blocks)
    return jax.make_mesh(
        (replicas, jax.device_count() // replicas), ("batch", "rows"), (AxisType.Auto,) * 2
    )


def make_engine(config, characters: int, kind: str) -> EmbeddingEngine:
    """Return the engine of the tables: characters, and the memory unless there is none."""
    normal = jax.nn.initializers.normal(0.02)
    table = TableConfig(
        characters,
        config.width,
        initializer=normal,
        optimizer=optimizers.Adam(rates(config), beta_2=config.beta_2),
        name="characters",
    )
    features = {"character": FeatureConfig(table, max_sequence_length=config.block)}
    if kind != "without":
        memory = TableConfig(
            config.memory_rows,
            config.memory_dim,
            initializer=normal,
            optimizer=optimizers.RowWiseAdagrad(
                config.memory_rate, initial_accumulator_value=config.initial_accumulator
            ),
            name="memory",
            storage=HostStorage(device_rows=config.device_rows) if kind == "host" else None,
        )
        features["memory"] = FeatureConfig(memory)
    return EmbeddingEngine(
        features,
        optimizers.SGD(1.0),
        mesh=make_mesh(config),
        batch_axes="batch",
        sum_blocks=config.sum_blocks,
    )


def rates(config) -> optax.Schedule:
    """Return the learning rate by step: up along a line, down along a cosine."""
    return optax.warmup_cosine_decay_schedule(
        0, config.learning_rate, config.warm_up, config.steps, config.last_learning_rate
    )


def dense_optimizer(config) -> optax.GradientTransformation:
    """Return AdamW, which draws matrices towards zero, after a clip of the gradients."""
    adam = optax.adamw(
        rates(config),
        b2=config.beta_2,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda one: one.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adam)


def loss_fn(network, activations, labels):
    """Return the mean -log likelihood of the characters that follow."""
    logits = network(activations)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(config, text: Text, kind: str, directory: Path | None = None, **options):
    """Train one model to its end, or go on with it; return its last report and its engine."""
    engine = make_engine(config, len(text.characters), kind)
    options |= {"directory": directory and directory / f"{kind}-{config.seed}"}
    rngs, with_memory = nnx.Rngs(config.seed), kind != "without"
    network = Network(config, len(text.characters), with_memory=with_memory, rngs=rngs)
    report = fit(
        engine,
        loss_fn,
        text.batches(),
        model=network,
        optimizer=dense_optimizer(config),
        seed=config.seed,
        evaluation=text.evaluation,
        evaluate_every=config.evaluate_every,
        micro_batches=config.micro_batches,
        **options,
    )
    return report, engine


def main() -> None:
    options = settings.parser(__doc__, "memory_lm.py")
    options.add_argument("--text", type=Path, required=True, help="a file of UTF-8")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=["without", "host"])
    options.add_argument("--seeds", type=int, default=1, help="runs of each kind")
    options.add_argument("--steps", type=int, help="instead of the config's")
    options.add_argument("--checkpoints", type=Path, help="directory")
    args, config = settings.read(options)
    losses = {kind: [] for kind in args.kinds}
    for seed in range(config.seed, config.seed + args.seeds):
        run = SimpleNamespace(**vars(config) | {"seed": seed})
        for kind in args.kinds:
            text = Text.read(args.text, run, with_memory=kind != "without")
            speeds: list[float] = []

            def note(report, speeds=speeds) -> None:
                speeds.append(report.steps_per_second)

            report, engine = train(run, text, kind, args.checkpoints, callback=note)
            assert report.evaluation is not None, "it is evaluated at its end"
            losses[kind].append(report.evaluation["loss"])
            line = f"{kind}  seed {seed}  held-out loss {losses[kind][-1]:.4f}"
            if any(speeds):  # a report of an evaluation has none
                line += f"  {1000 / np.median([one for one in speeds if one]):.1f} ms a step"
            if engine.storage is not None:
                engine.storage.flush()
                line += f"  {engine.storage.counters['memory']}"
            print(line, flush=True)
    for kind, found in losses.items():
        print(f"{kind}: mean {np.mean(found):.4f}, standard deviation {np.std(found):.4f}")


if __name__ == "__main__":
    main()
