"""A model with our layer against one with `nnx.Embed`, and the memory of its step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nn_models import OurModel, TheirModel, bag_of, dense_optimizer, ids_of, mesh_of, train

from tpu_embed import nn
from tpu_embed import optimizers as o

CASES = {
    "sgd": (o.SGD(0.1), optax.sgd(0.1)),
    "adagrad": (o.Adagrad(0.1, epsilon=1e-7), optax.adagrad(0.1, 0.1, eps=1e-14)),
}


@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.quick(1)
def test_a_model_equals_the_same_with_nnx_embed(rule, devices):
    """Step by step; sums of rows and optax's eps, inside the root, round differently."""
    ours, theirs = CASES[rule]
    bag = bag_of(ours, devices=devices, combiner="sum")
    mine, other = OurModel(bag, nnx.Rngs(1)), TheirModel(np.array(bag.embedding), nnx.Rngs(1))
    own = nnx.state(mine, lambda path, _: path[0] != "bag")
    nnx.update(other, jax.tree.map(jnp.copy, own))
    losses = train(mine, optax.sgd(0.1), nn.fused_value_and_grad, 6)
    expected = train(other, dense_optimizer(theirs, optax.sgd(0.1)), nnx.value_and_grad, 6)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(mine.bag.embedding, other.embed.embedding[...], atol=2e-6)
    np.testing.assert_allclose(mine.norm.var[...], other.norm.var[...], rtol=1e-5)
    assert int(mine.bag.step[...]) == 6


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, ids: (model(ids) ** 2).sum(),
        lambda model, ids: model(ids).sum(),  # does not say that the lookup comes first
        lambda model, ids: ((model(ids) ** 2).sum(), model(ids + 1).mean()),
    ],
    ids=["squared", "linear", "aux"],
)
@pytest.mark.quick(1)
def test_no_temporary_is_as_large_as_a_table(loss):
    rows = 1_000_000
    embed = nn.Embed(rows, 16, optimizer=o.Adagrad(0.1), mesh=mesh_of(1), rngs=nnx.Rngs(0))

    def step(graphdef, state, ids):
        model = nnx.merge(graphdef, state)
        has_aux = isinstance(jax.eval_shape(loss, model, ids), tuple)
        value, _ = nn.fused_value_and_grad(loss, has_aux=has_aux)(model, ids)
        return value, nnx.state(model)

    graphdef, state = nnx.split(embed)
    lowered = jax.jit(step, static_argnums=0, donate_argnums=1).lower(graphdef, state, ids_of(0))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < rows
    assert memory.alias_size_in_bytes > 2 * rows * 16 * 4  # table and slot, in place
