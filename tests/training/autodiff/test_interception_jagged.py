"""Interception of jagged sequences: a `Jagged` counts as its values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jagged_cases import SOME, C, D, S, make

from tpu_embed import FeatureConfig, Jagged, TableConfig, split_activations
from tpu_embed.training import (
    Optimizer,
    create_dummy_table_variables,
    get_gradients_through_compute_gradients,
    get_gradients_through_dummy_table_variables,
    hook,
)

ITEM, USER = TableConfig(9, D, name="item"), TableConfig(7, 3, name="user")
FEATURES = {
    "seen": [FeatureConfig(ITEM, jagged=True), FeatureConfig(ITEM)],
    "user": FeatureConfig(USER, jagged=True),
}


def activations():
    seen, user = (make(SOME, shape=(dim,)) for dim in (D, 3))
    bag = jnp.arange(12.0).reshape(6, D)
    return {"seen": [seen, bag], "user": user.with_values(jnp.nan_to_num(user.values))}


def loss_of(found, factor=1.0):
    seen, bag = found["seen"]
    return factor * ((seen.means() * bag).sum() + (found["user"].values ** 3).sum())


def expected(factor=1.0):
    values, rebuild = split_activations(activations())
    return jax.grad(lambda values: loss_of(rebuild(values), factor))(values)


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


through_dummies = functools.partial(
    get_gradients_through_dummy_table_variables, feature_config=FEATURES
)
through_compute_gradients = functools.partial(
    get_gradients_through_compute_gradients, Optimizer(optax.sgd(0.1), "sgd")
)


def test_dummies_are_zeros_like_the_values_and_the_hook_gives_a_jagged():
    given = activations()
    dummies = create_dummy_table_variables(given, FEATURES)
    assert jax.tree.map(jnp.shape, dummies) == {
        "item": {"seen/0": (S, C, D), "seen/1": (6, D)},
        "user": {"user": (S, C, 3)},
    }
    hooked = hook(given, dummies)
    assert isinstance(hooked["user"], Jagged)
    jax.tree.map(np.testing.assert_array_equal, hooked, given)
    by_dummy = jax.grad(lambda dummies: loss_of(hook(given, dummies)))(dummies)
    np.testing.assert_array_equal(by_dummy["item"]["seen/0"], expected()["seen"][0])
    np.testing.assert_array_equal(by_dummy["user"]["user"], expected()["user"])
    with pytest.raises(ValueError, match=r"hook: activations: user: expected float32 of shape"):
        hook({**given, "user": given["seen"][0]}, dummies)


@pytest.mark.parametrize("make", [lambda f: f, jax.jit])
@pytest.mark.quick(1)
def test_gradients_are_those_by_the_values(make):
    """They are what `update` takes, in both ways; the loss gets a `Jagged`."""

    @make
    def intercepted(given, factor):
        first = through_dummies(loss_of, given, factor)
        return first, through_compute_gradients(lambda x: loss_of(x, factor), given)

    (value, first), second = intercepted(activations(), 2.0)
    np.testing.assert_allclose(value, loss_of(activations(), 2.0), rtol=1e-6)
    assert_equal(first, expected(2.0))
    assert_equal(second, expected(2.0))


def test_a_jagged_that_the_loss_does_not_use():
    given = activations()
    with pytest.raises(ValueError, match=r"table 'user' \(index 1\).*computed but not used"):
        through_dummies(lambda x: x["seen"][1].sum(), given)
    with pytest.warns(UserWarning, match=r"table 'item': the loss does not depend on seen/0"):
        _, found = through_dummies(lambda x: x["seen"][1].sum() + x["user"].sums().sum(), given)
    np.testing.assert_array_equal(found["seen"][0], np.zeros((S, C, D)))

    def of_lengths(found):  # the row splits alone, integers through which no gradient flows
        return (found["seen"][1] * found["user"].lengths.reshape(-1, 1).astype(float)).sum()

    found = through_compute_gradients(of_lengths, given)
    assert found["seen"][0] is found["user"] is None
