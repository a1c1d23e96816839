"""A model of the next item of a history: HSTU layers, or those of `sequences_model.py`.

Each event is told when the next one is asked for, which is known when a request comes. The softmax
is over all items.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import sequences_model
from flax import nnx
from layers import Sequences, Stack
from places import in_places

import tpu_embed
from tpu_embed import RaggedIds
from tpu_embed.nn import on_each_replica


class Hstu(nnx.Module):
    """Map each event of a replica's histories to the vector of what comes next, `[C, D]`."""

    def __init__(self, config, rngs: nnx.Rngs, buckets: int):
        self.scale, self.timed = 1 / config.init_scale, buckets > 0
        options = {name: getattr(config, name) for name in ("longest", "block", "norm_first")}
        options["buckets"] = buckets
        self.stack = Stack(config.layers, config.dim, config.heads, rngs=rngs, **options)

    def __call__(self, history, times: jax.Array, asked: jax.Array) -> jax.Array:
        known = (times, asked) if self.timed else ()
        return self.stack(history.values * self.scale, Sequences(history.row_splits, *known))


class Windowed(nnx.Module):
    """The network of `sequences.py`, which knows positions but no times."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.network = sequences_model.Network(config, rngs)

    def __call__(self, history, times: jax.Array, asked: jax.Array) -> jax.Array:
        return self.network(history)


def _is_bias(params):
    """Return the tree of whether each parameter is a table of biases by position or time."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any("position_bias" in str(key) or "time_bias" in str(key) for key in path),
        params,
    )


class Learner:
    """A network and its item table, which are trained with Adam, batch after batch.

    Args:
      config: numbers such as those of `configs/hstu.py`.
      items: how many.
      network: a module that is called with the history, the times, and the times asked for.
      steps: after so many the learning rate is 0.
      mesh: the devices. None: all.
    """

    def __init__(self, config, items: int, network: nnx.Module, steps: int, mesh=None):
        schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
        adam = tpu_embed.optimizers.Adam(schedule, beta_2=config.beta_2)
        faster = optax.masked(optax.scale(config.bias_rate), _is_bias)
        self.items = items
        self.dense = optax.chain(optax.adam(schedule, b2=config.beta_2), faster)
        features = sequences_model.feature_config(config, items)
        self.engine = tpu_embed.EmbeddingEngine(features, adam, mesh=mesh)
        self.state = self.engine.init(jax.random.key(config.seed))
        self.graph, params = nnx.split(network)
        device = self.state.step.sharding
        self.params, self.opt_state = jax.device_put((params, self.dense.init(params)), device)
        self.step = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self.scores = jax.jit(self._scores)

    def features(self, histories) -> dict:
        """Return the features of histories; the batch is padded to what the devices can share."""
        batch = {"history": RaggedIds.from_lists(histories), "item": np.arange(self.items)}
        return tpu_embed.pad_batch(batch, self.engine.layout.axes.replicas)

    def learn(self, batch, times, asked) -> float:
        """Train on a placed batch of histories with their times; return the loss."""
        known = [in_places(self.engine, batch, "history", rows) for rows in (times, asked)]
        self.state, self.params, self.opt_state, loss = self.step(
            self.state, self.params, self.opt_state, batch, *known
        )
        return float(loss)  # many unfinished steps on emulated devices can stop for good

    def predict(self, histories, times, asked) -> np.ndarray:
        """Return the score of every item as the next one, float32 [B, items]."""
        batch = self.engine.place(self.features(histories), training=False)
        known = [in_places(self.engine, batch, "history", rows) for rows in (times, asked)]
        found = self.scores(self.state, self.params, batch, *known)
        return np.asarray(found)[: len(histories), : self.items]

    def _step(self, state, params, opt_state, batch, times, asked):
        values, rebuild = tpu_embed.split_activations(self.engine.lookup(state, batch))

        def of_replica(shared, history, times, asked):
            network = functools.partial(nnx.merge(self.graph, shared[0]), times=times, asked=asked)
            return sequences_model.next_item_losses(network, history, shared[1])

        def loss_fn(params, values):
            activations = rebuild(values)
            shared = params, activations["item"][: self.items]
            each = on_each_replica(self.engine, of_replica)
            losses, counts = each(shared, activations["history"], times, asked)
            return losses.sum() / counts.sum().astype(losses.dtype)

        loss, (grads, value_grads) = jax.value_and_grad(loss_fn, (0, 1))(params, values)
        updates, opt_state = self.dense.update(grads, opt_state, params)
        state = self.engine.update(state, batch, value_grads)
        return state, optax.apply_updates(params, updates), opt_state, loss

    def _scores(self, state, params, batch, times, asked):
        activations = self.engine.lookup(state, batch)

        def of_replica(params, history, times, asked):
            network = functools.partial(nnx.merge(self.graph, params), times=times, asked=asked)
            return sequences_model.last_vectors(network, history)

        each = on_each_replica(self.engine, of_replica)
        vectors = each(params, activations["history"], times, asked)
        return vectors.reshape(-1, vectors.shape[-1]) @ activations["item"].T
