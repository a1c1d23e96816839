"""DLRMv4: features of its tables, the loss of a batch, and the training step.

The network works on the requests of one replica. `jax.shard_map` runs it on every replica's part,
each with loops of its own length.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from dlrm_v4_model import DlrmV4, Samples
from flax import nnx

import tpu_embed
from tpu_embed import Jagged
from tpu_embed.nn import on_each_replica

WORKLOAD = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "dlrm_v4.py"))
feature_config, table_optimizer = WORKLOAD["feature_config"], WORKLOAD["optimizer"]


def network_optimizer(config) -> optax.GradientTransformation:
    """Return Adam, warmed up, with clipped gradients."""
    schedule = optax.linear_schedule(0.0, config.dense_learning_rate, config.warm_up)
    adam = optax.adam(schedule, b1=0.95, b2=0.999)
    return optax.chain(optax.clip_by_global_norm(config.clip), adam)


def side_by_side(jagged: list[Jagged]) -> Jagged:
    """Return one `Jagged` with the vectors of several tables next to each other."""
    return jagged[0].with_values(jnp.concatenate([one.values for one in jagged], axis=-1))


def requests_of(config, acts: dict, known: dict) -> Samples:
    """Return the requests of all replicas.

    Args:
      config: the numbers of the workload.
      acts: activations by feature.
      known: what else is known: `Jagged` `actions` and `times` of events, and `asked` int32
        [S, R] of requests.
    """
    replicas = len(known["asked"])
    contexts = jnp.stack([acts[name] for name in config.contexts], axis=1)  # [B, n, D]
    return Samples(
        contexts.reshape(replicas, -1, *contexts.shape[1:]),
        side_by_side([acts[f"{name}_history"] for name in config.histories]),
        side_by_side([acts[name] for name in config.histories]),
        known["actions"].values,
        known["times"].values,
        known["asked"],
    )


def cross_entropy(graph, params, requests, labels) -> tuple[jax.Array, jax.Array]:
    """Return a replica's sum of -log likelihoods of its candidates' labels, and their number."""
    losses = optax.sigmoid_binary_cross_entropy(nnx.merge(graph, params)(requests), labels)
    count = requests.candidates.valid.astype(jnp.float32).sum()
    return jnp.where(requests.candidates.valid, losses, 0).sum(), count


def make_step(config, engine, dense, graph):
    """Return the training step; its first argument is updated in place."""
    losses_of = on_each_replica(engine, functools.partial(cross_entropy, graph))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(trained, batch, known):
        state, params, opt_state = trained
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))

        def loss_fn(params, values):
            requests = requests_of(config, rebuild(values), known)
            losses, counts = losses_of(params, requests, known["labels"].values)
            return losses.sum() / counts.sum()

        loss, (grads, value_grads) = jax.value_and_grad(loss_fn, (0, 1))(params, values)
        updates, opt_state = dense.update(grads, opt_state, params)
        state = engine.update(state, batch, value_grads)
        return (state, optax.apply_updates(params, updates), opt_state), loss

    return step


def make_score(config, engine, graph):
    """Return a function that gives logits, float32 `[S, K]`, in the places of the candidates."""

    def logits(params, requests):
        return nnx.merge(graph, params)(requests)

    @jax.jit
    def score(state, params, batch, known):
        requests = requests_of(config, engine.lookup(state, batch), known)
        return on_each_replica(engine, logits)(params, requests)

    return score


def new_network(config) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the network's structure and its initial parameters."""
    graph, params = nnx.split(DlrmV4(config, nnx.Rngs(config.seed)), nnx.Param)
    return graph, params
