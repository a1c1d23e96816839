"""Models for tests of `tpu_embed.nn`: the same model with our layer and with `nnx.Embed`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from facade_cases import mesh as mesh_of
from flax import nnx

import tpu_embed
from tpu_embed import nn

V, D, B, H = 23, 4, 16, 3


def bag_of(optimizer, *, devices: int = 1, seed: int = 0, layer=None, **options) -> nn.EmbeddingBag:
    """Return a layer of one table `[V, D]`; `layer` has its options, the others are the table's."""
    table = tpu_embed.TableConfig(V, D, name="films", optimizer=optimizer, **options)
    return nn.EmbeddingBag(table, mesh=mesh_of(devices), rngs=nnx.Rngs(seed), **layer or {})


def ids_of(step: int, shape=(B, H), size: int = V, lowest: int = -1) -> np.ndarray:
    return np.random.default_rng(step).integers(lowest, size, shape).astype(np.int32)


class OurModel(nnx.Module):
    """The activation of a bag, normalised, then a linear layer."""

    def __init__(self, bag: nn.EmbeddingBag, rngs: nnx.Rngs):
        self.bag = bag
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.linear = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.norm(self.bag(ids)))[..., 0]


class TheirModel(nnx.Module):
    """The same with `nnx.Embed`, summing rows by hand."""

    def __init__(self, rows, rngs: nnx.Rngs):
        self.embed = nnx.Embed(*rows.shape, rngs=rngs)
        self.embed.embedding[...] = rows
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.linear = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids):
        rows = jnp.where((ids >= 0)[..., None], self.embed(ids.clip(0)), 0)
        return self.linear(self.norm(rows.sum(1)))[..., 0]


def dense_optimizer(table, rest):
    """Return an optax transform that has another optimizer for the table of `TheirModel`."""

    def label(path, _):
        return "table" if "embed" in jax.tree_util.keystr(path) else "rest"

    labels = functools.partial(jax.tree.map_with_path, label)
    return optax.multi_transform({"table": table, "rest": rest}, labels)


def train(model, tx, value_and_grad, steps: int):
    """Train a few steps with the optimizer `tx`; return the losses."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, ids, labels):
        def loss(model):
            return ((model(ids) - labels) ** 2).mean()

        value, gradients = value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    labels = np.random.default_rng(9).normal(size=B).astype(np.float32)
    return [float(step(model, optimizer, ids_of(i), labels)) for i in range(steps)]


# -- layers of keys: models are dictionaries of layers, batches have the same names ---------------


def loss_of(activations):
    """Return Σ (a² + a): its gradient 2a + 1 has the same bits in every program."""
    return sum((one**2 + one).sum() for one in activations.values())


def activations_of(model, batches):
    """Return the activations of the layers that have a batch."""
    return {name: model[name](batch) for name, batch in batches.items()}


@nnx.jit(donate_argnums=0)
def train_step(model, batches):
    """Train the layers on placed batches; return the loss."""
    return nn.fused_value_and_grad(lambda m: loss_of(activations_of(m, batches)))(model)[0]
