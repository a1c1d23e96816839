"""Rows that no gradient reaches are not updated, whichever layer looked them up."""

import functools

import jax
import numpy as np
import pytest
from facade_cases import assert_same
from flax import nnx
from jax import lax
from nn_models import bag_of
from reach_cases import CUT, FORMS, KEPT, loss_of

from tpu_embed import nn
from tpu_embed import optimizers as o

ADAM = o.Adam(0.1, weight_decay_factor=0.1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(2)
def test_a_lookup_that_is_cut_is_left_out(form):
    """Of the lookups that a step would train by."""
    graphdef, state = nnx.split(bag_of(ADAM))

    @jax.jit
    def looked_up(state):
        step = nn.sparse_value_and_grad(loss_of(form), has_aux=True)
        _, (_, tables) = step(nnx.merge(graphdef, state))
        return [one.ids for lookups in tables.lookups.values() for one in lookups]

    (ids,) = looked_up(state)
    assert sorted(np.asarray(ids).reshape(-1).tolist()) == sorted(KEPT)


# -- steps -----------------------------------------------------------------------------------------


@functools.cache
def stepped(loss):
    """Return what is in a layer after a step by a loss `(bag) -> (value, aux)`.

    A step before it gave momenta to all the rows that tests look up.
    """
    bag = bag_of(ADAM)
    nn.fused_value_and_grad(lambda bag: (bag(np.arange(6)) ** 2).sum())(bag)
    nnx.jit(lambda bag: nn.fused_value_and_grad(loss, has_aux=True)(bag)[0][0])(bag)
    return [np.array(bag.embedding), bag.logical_slots, bag.step[...], bag.bad_ids[...]]


def kept(bag):
    return (bag(KEPT) ** 2).sum(), None


@pytest.mark.parametrize(
    "loss",
    [
        lambda bag: (kept(bag)[0] + lax.stop_gradient(bag(CUT)).sum(), None),
        lambda bag: (kept(bag)[0], bag(np.append(CUT, 99))),  # 99 is no row
        lambda bag: (kept(bag)[0], (bag.embedding**2).sum()),
    ],
    ids=["stopped", "aux", "read by aux"],
)
@pytest.mark.quick(1)
def test_a_step_is_that_of_the_lookups_that_reach_the_value(loss):
    """Bit for bit: rows, slots and counters, without a warning."""
    assert_same(stepped(loss), stepped(kept))


@pytest.mark.whole
def test_a_layer_that_no_gradient_reaches_takes_no_step():
    used, cut = bag_of(ADAM), bag_of(ADAM)
    model = nnx.Dict(used=used, cut=cut, linear=nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    before = jax.tree.map(np.array, nnx.state(cut))

    def loss(model):
        stopped = lax.stop_gradient(model.cut(KEPT))
        return (model.linear(model.used(KEPT) * stopped) ** 2).sum()

    _, gradients = nn.fused_value_and_grad(loss)(model)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(cut))
    assert int(used.step[...]) == 1
    assert np.asarray(gradients["linear"]["kernel"][...]).any()
    alone = nn.sparse_value_and_grad(lambda bag: lax.stop_gradient(bag(CUT)).sum())
    value, (_, tables) = alone(cut)
    np.testing.assert_allclose(value, np.array(cut.embedding)[CUT].sum(), rtol=1e-6)
    assert tables.lookups == {}


def test_a_layer_without_an_optimizer_is_looked_up_behind_stop_gradient():
    model = nnx.Dict(a=bag_of(ADAM), teacher=bag_of(None))
    before = np.array(model.teacher.embedding)

    def loss(model):
        return ((model.a(KEPT) - lax.stop_gradient(model.teacher(KEPT))) ** 2).sum()

    nn.fused_value_and_grad(loss)(model)
    np.testing.assert_array_equal(model.teacher.embedding, before)
    with pytest.raises(ValueError, match="expected an optimizer for every trainable table"):
        nn.fused_value_and_grad(lambda m: ((m.a(KEPT) - m.teacher(KEPT)) ** 2).sum())(model)


def test_a_placed_batch_stands_beside_a_lookup_that_is_cut():
    bag = bag_of(o.SGD(0.5), devices=2)
    before = np.array(bag.embedding)
    batch = bag.place(np.array([4, 1]))
    nn.fused_value_and_grad(lambda b: b(batch).sum() + lax.stop_gradient(b(CUT)).sum())(bag)
    before[[4, 1]] -= 0.5
    np.testing.assert_array_equal(bag.embedding, before)


def test_a_table_read_by_what_is_cut_is_no_warning():
    nn.sparse_value_and_grad(lambda b: b(KEPT).sum() + lax.stop_gradient((b.embedding**2).sum()))(
        bag_of(ADAM)
    )
