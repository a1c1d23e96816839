"""A table that nothing trains is named in an error, once per layer."""

import jax
import numpy as np
import pytest
from flax import nnx
from nn_models import bag_of

from tpu_embed import nn
from tpu_embed import optimizers as o

IDS = np.array([1, 2])


def model_of(**options):
    embed = nn.Embed(10, 2, name="films", rngs=nnx.Rngs(0), **options)
    return nnx.Dict(films=embed, score=nnx.Linear(2, 1, rngs=nnx.Rngs(1)))


def loss(model):
    return model["score"](model["films"](IDS)).sum()


WAYS = {
    "value_and_grad": lambda model: nnx.value_and_grad(loss)(model),
    "in a jit": lambda model: nnx.jit(lambda model: nnx.grad(loss)(model))(model),
    "around vmap": lambda model: nnx.grad(
        lambda model: jax.vmap(lambda i: model["films"](i[None]))(IDS).sum() + loss(model)
    )(model),
    "jvp": lambda model: jax.jvp(lambda x: model["films"](IDS) * x, (1.0,), (1.0,)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick(1)
def test_a_lookup_under_differentiation_is_named_once(way):
    model = model_of(optimizer=o.SGD(0.1))
    with pytest.warns(UserWarning, match=r"'films' \[10, 2\].*fused_value_and_grad") as caught:
        [WAYS[way](model) for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_table_without_optimizer_is_named_once():
    model = model_of()
    step = nnx.jit(lambda model: nn.fused_value_and_grad(loss)(model)[0])
    with pytest.warns(UserWarning, match=r"'films' \[10, 2\].* an optimizer, or trainable=False"):
        step(model)
    nn.fused_value_and_grad(loss)(model)  # another warning would be an error


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.quick(1)
def test_no_word_where_nothing_is_wrong(trainable):
    """Warnings are errors in these tests."""
    model = model_of(optimizer=o.SGD(0.1), trainable=trainable)
    before = np.array(model["films"].embedding)
    loss(model)
    nnx.jit(loss)(model)
    jax.vmap(lambda i: model["films"](i[None]))(IDS)
    nn.fused_value_and_grad(loss)(model)
    nnx.jit(lambda model: nn.sparse_value_and_grad(loss)(model)[0])(model)
    assert (np.array(model["films"].embedding) != before).any() == trainable


@pytest.mark.whole
def test_a_frozen_table_may_be_looked_up_anywhere():
    for layer in (model_of(trainable=False)["films"], bag_of(None, trainable=False)):
        jax.grad(lambda x, layer=layer: (x * layer(IDS[:, None])).sum())(1.0)


def test_each_layer_is_named():
    bags = [bag_of(o.SGD(0.1), seed=seed) for seed in range(2)]
    with pytest.warns(UserWarning, match="under differentiation") as caught:
        jax.grad(lambda x: sum((x * bag(IDS[:, None])).sum() for bag in bags))(1.0)
    assert len(caught) == 2
