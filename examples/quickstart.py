"""Two tables, three features, and both APIs: functions in your own jit, or enqueue and dequeue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, TPUEmbedding
from tpu_embed.optimizers import Adagrad

users, films = TableConfig(1_000, 16, name="users"), TableConfig(5_000, 16, name="films")
features = jax.tree.map(FeatureConfig, {"user": users, "seen": films, "film": films})
seen = RaggedIds.from_lists([[7], [8, 9], [], [1, 2, 3]] * 2)  # bags, combined by their mean
inputs = {"user": np.arange(8), "seen": seen, "film": np.arange(8) + 31}
likes = np.array([1.0, 0.0] * 4, np.float32)


def loss_fn(acts):  # acts["user"] and the others are [8, 16]
    score = ((acts["user"] + acts["seen"]) * acts["film"]).sum(-1)
    return jnp.mean(jnp.logaddexp(0.0, score) - likes * score)


@functools.partial(jax.jit, donate_argnums=0)  # the functional API
def step(state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(engine.lookup(state, batch))
    return engine.update(state, batch, gradients), loss


adagrad = Adagrad(0.1, initial_accumulator_value=1e-6)  # the gradients of a mean are small
engine = EmbeddingEngine(features, adagrad)
state, batch = engine.init(jax.random.key(0)), engine.place(inputs)
engine.check_in_place(step, state, batch)  # raises an error if the step would copy a table
embedding = TPUEmbedding(features, adagrad)  # the stateful API
for _ in range(5):
    state, loss = step(state, batch)
    embedding.enqueue(inputs)
    same_loss, gradients = jax.value_and_grad(loss_fn)(embedding.dequeue())
    embedding.apply_gradients(gradients)
    print(f"loss {loss:.4f} by functions, {same_loss:.4f} by enqueue and dequeue")
