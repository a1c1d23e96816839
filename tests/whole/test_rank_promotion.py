"""No array is broadcast to another rank implicitly, which a user may forbid (`raise`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from flax import nnx

import tpu_embed
from tpu_embed import nn, optimizers

FEATURES = {
    "item": tpu_embed.FeatureConfig(tpu_embed.TableConfig(11, 4, name="item"), on_bad_id="drop"),
    "user": tpu_embed.FeatureConfig(tpu_embed.TableConfig(5, 4, name="user"), on_bad_id="clip"),
}
IDS = {"item": np.arange(24).reshape(8, 3) % 11, "user": np.arange(16).reshape(8, 2) % 5}


def test_a_step_of_the_engine():
    with jax.numpy_rank_promotion("raise"):
        engine = tpu_embed.EmbeddingEngine(FEATURES, optimizers.Adam(0.1), mesh=mesh(2))
        state = engine.init(jax.random.key(0))

        @jax.jit
        def step(state, batch):
            return engine.update(state, batch, engine.lookup(state, batch))

        placed = step(state, engine.place(IDS))
        traced = step(state, jax.tree.map(jnp.asarray, IDS))
        assert int(placed.step) == int(traced.step) == 1
        engine.set_rows(state, "item", [3], np.ones((1, 4), np.float32))


@pytest.mark.whole
def test_layers_and_plain_tables():
    def loss(table, ids, weights):
        return tpu_embed.embedding_lookup(table, ids, weights, combiner="mean").sum()

    with jax.numpy_rank_promotion("raise"):
        embed = nn.Embed(11, 4, optimizer=optimizers.SGD(0.1), mesh=mesh(2), rngs=nnx.Rngs(0))
        nn.fused_value_and_grad(lambda embed: embed(IDS["item"]).sum())(embed)
        weights = jnp.ones(IDS["item"].shape)
        tpu_embed.sparse_value_and_grad(loss)(jnp.ones((11, 4)), IDS["item"], weights)
