"""Every error of `tpu_embed.nn.gradients`."""

import numpy as np
import pytest
from flax import nnx
from nn_models import D, bag_of, ids_of

from tpu_embed import nn
from tpu_embed import optimizers as o

A = ids_of(1, (8,), lowest=0)
"""A derivative that is no step of training: that the table keeps its rows is what is meant."""


# -- errors ----------------------------------------------------------------------------------------


def test_layers_of_one_path_are_refused():
    model = nnx.Dict({"a/b": bag_of(o.SGD(0.1)), "a": nnx.Dict(b=bag_of(o.SGD(0.1)))})
    with pytest.raises(ValueError, match="layers: expected a different path for every layer"):
        nn.fused_value_and_grad(lambda m: m["a/b"](A).sum() + m["a"].b(A).sum())(model)


@pytest.mark.filterwarnings("ignore:table 'films' .* is looked up under differentiation")
def test_a_step_is_not_differentiated():
    model = nnx.Dict(a=bag_of(o.SGD(0.1)), b=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))

    def step(model):
        _, gradients = nn.fused_value_and_grad(lambda m: m.b(m.a(A)).sum())(model)
        return (gradients["b"]["kernel"][...] ** 2).sum()

    with pytest.raises(TypeError, match="update of a layer's table: expected a step that is not"):
        nnx.grad(step)(model)


def test_gradients_of_another_kind():
    bag = bag_of(o.SGD(0.1))
    with pytest.raises(TypeError, match="gradients: expected TableGradients, got dict"):
        nn.apply_table_gradients(bag, {})
    nn.apply_table_gradients(bag, nn.TableGradients({"": ()}))
    assert int(bag.step[...]) == 0


def test_errors_of_arguments():
    bag = bag_of(o.SGD(0.1))
    places = [({"argnums": n}, "argnums: expected different places") for n in (1, (0, 0), "0")]
    for options, words in (
        *places,
        ({"argnums": (0, 1)}, "argument 1: expected an nnx module, got ndarray"),
        ({"has_aux": True}, "has_aux=True: the function: expected a pair"),
    ):
        given = (bag, A) if options.get("argnums") == (0, 1) else (bag,)
        with pytest.raises((TypeError, ValueError), match=words):
            nn.sparse_value_and_grad(lambda bag, other=None: bag(A).sum(), **options)(*given)
    with pytest.raises(TypeError, match="scalar"):
        nn.sparse_value_and_grad(lambda bag: bag(A))(bag)


def test_no_table_changes_when_one_cannot():
    model, other = nnx.Dict(a=bag_of(o.SGD(0.1)), b=bag_of(None)), bag_of(None)
    before = np.array(model.a.embedding)
    words = r"optimizer for every trainable table, got none for .'films'"
    with pytest.raises(ValueError, match=words):
        nn.fused_value_and_grad(lambda m: m.a(A).sum() + m.b(A).sum())(model)
    with pytest.raises(ValueError, match=words):
        nn.fused_value_and_grad(lambda m, o: (m.a(A) * o(A)).sum(), argnums=(0, 1))(model, other)
    np.testing.assert_array_equal(model.a.embedding, before)
    _, (_, gradients) = nn.sparse_value_and_grad(lambda m: m.a(A).sum())(model)
    with pytest.raises(ValueError, match=r"gradients: expected layers among \[''\], got 'a'"):
        nn.apply_table_gradients(model.a, gradients)


def test_a_placed_batch_stands_alone():
    bag = bag_of(o.SGD(0.1), devices=2)
    batch = bag.place(ids_of(1))
    with pytest.raises(ValueError, match="'films': expected a placed batch as the only lookup"):
        nn.fused_value_and_grad(lambda bag: bag(batch).sum() + bag(A).sum())(bag)
