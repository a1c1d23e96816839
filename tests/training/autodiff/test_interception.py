"""Interception: gradients of a loss by activations, also by those that it does not use."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import mesh as mesh_of
from jagged_cases import SOME, C, D, S
from jagged_cases import make as make_jagged
from jax.sharding import PartitionSpec as P

from tpu_embed import FeatureConfig, Jagged, TableConfig, split_activations
from tpu_embed.training import Optimizer, create_dummy_table_variables, hook
from tpu_embed.training import get_gradients_through_compute_gradients as get_through_compute
from tpu_embed.training import get_gradients_through_dummy_table_variables as get_through_dummies

Pair = collections.namedtuple("Pair", ["left", "right"])

ITEM, USER = TableConfig(9, 2, name="item"), TableConfig(7, 3)
FEATURES = {
    "user": FeatureConfig(USER),
    "seen": [FeatureConfig(ITEM), FeatureConfig(ITEM, max_sequence_length=4)],
    "pair": Pair(FeatureConfig(USER), FeatureConfig(ITEM)),
}
SHAPES = {"user": (5, 3), "seen": [(5, 2), (5, 4, 2)], "pair": Pair((5, 3), (5, 2))}


class Halved:
    """An optimizer's loss scaling."""

    def scale_loss(self, loss):
        return loss / 2

    def local(self, tree):
        return tree


def draw():
    rng = np.random.default_rng(4)
    is_shape = {"is_leaf": lambda x: type(x) is tuple}
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x), jnp.float32), SHAPES, **is_shape)


def loss_of(x, factor=1.0):
    """Use every feature in a way of its own."""
    pair = jnp.sin(x["pair"].left).sum() + (x["pair"].right ** 2).sum()
    sequence = (x["seen"][1].sum(1) * x["seen"][0]).sum()
    return factor * (pair + sequence + (x["user"] ** 3).sum())


through_dummies = functools.partial(get_through_dummies, feature_config=FEATURES)


def equal(found, expected):
    """Assert equal structures and numbers."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


# -- dummies and the hook --------------------------------------------------------------------------


def test_dummies_are_zeros_grouped_by_table():
    activations = draw()
    activations["user"] = activations["user"].astype(jnp.bfloat16)
    dummies = create_dummy_table_variables(activations, FEATURES)
    assert jax.tree.map(lambda dummy: (dummy.shape, dummy.dtype.name), dummies) == {
        "item": {
            "pair/right": ((5, 2), "float32"),
            "seen/0": ((5, 2), "float32"),
            "seen/1": ((5, 4, 2), "float32"),
        },
        "table_0": {"pair/left": ((5, 3), "float32"), "user": ((5, 3), "bfloat16")},
    }
    assert not any(np.asarray(dummy).any() for dummy in jax.tree.leaves(dummies))


def test_one_feature_alone_and_a_loss_that_is_an_array_counts_with_its_sum():
    activation, alone = jnp.arange(6.0).reshape(2, 3), FeatureConfig(USER)
    dummies = create_dummy_table_variables(activation, alone)
    assert {name: list(group) for name, group in dummies.items()} == {"table_0": ["feature"]}
    assert np.array_equal(hook(activation, dummies), activation)
    value, found = through_dummies(lambda x: x**2, activation, feature_config=alone)
    assert np.array_equal(value, activation**2)
    assert np.array_equal(found, 2 * activation)


def test_the_hook_changes_no_bit():
    odd = np.array([-0.0, 0.0, np.inf, 1e-45], np.float32)
    odd = np.concatenate([odd, np.array([0x7FC12345, 0xFF800001], np.uint32).view(np.float32)])
    for make in (lambda f: f, jax.jit):
        (found,) = make(hook)([odd], {"item": {"0": jnp.ones(6)}})
        assert np.array_equal(np.asarray(found).view(np.uint32), odd.view(np.uint32))


def test_the_cotangent_goes_to_the_activation_and_to_its_dummy():
    activations = draw()
    dummies = create_dummy_table_variables(activations, FEATURES)
    run = jax.jit(jax.grad(lambda a, d: loss_of(hook(a, d)), (0, 1)))
    by_activations, by_dummies = run(activations, dummies)
    expected = jax.grad(loss_of)(activations)
    equal(by_activations, expected)
    equal(by_dummies["table_0"], {"user": expected["user"], "pair/left": expected["pair"].left})
    right, seen = expected["pair"].right, expected["seen"]
    equal(by_dummies["item"], {"pair/right": right, "seen/0": seen[0], "seen/1": seen[1]})


def test_dummies_of_other_activations_are_errors():
    for name, dummy, words in (
        ("b", jnp.ones(2), r"expected features \['b'\], got \['a'\]"),
        ("a", jnp.ones(3), r"a: expected float32 of shape \(3,\), as its dummy"),
        ("a", jnp.ones(2, jnp.bfloat16), r"a: expected bfloat16 .* got float32 of shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            hook({"a": jnp.ones(2)}, {"item": {name: dummy}})
    with pytest.raises(ValueError, match="activations: pair is missing"):
        create_dummy_table_variables({}, FEATURES)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FEATURES, None])
@pytest.mark.parametrize(
    ("optimizer", "make"), [(None, lambda f: f), (Halved(), lambda f: f), (Halved(), jax.jit)]
)
@pytest.mark.quick(2)
def test_gradients_are_those_by_the_activations(optimizer, make, config):
    """With a configuration and without, in two calls."""
    activations, options = draw(), {"feature_config": config, "optimizer": optimizer}

    @make
    def run(activations, factor):
        return get_through_dummies(loss_of, activations, factor, **options)

    for factor in (1.0, 3.0):
        value, found = run(activations, jnp.float32(factor))
        np.testing.assert_allclose(value, loss_of(activations, factor), rtol=1e-6)  # never scaled
        equal(found, jax.grad(loss_of)(activations, factor * (0.5 if optimizer else 1.0)))
    if optimizer is not None:
        through = make(lambda a: get_through_compute(optimizer, loss_of, a))
        equal(through(activations), jax.grad(loss_of)(activations, 0.5))


def test_features_come_in_the_order_of_their_configuration():
    activations = {name: jnp.full((1, 2), float(i)) for i, name in enumerate("bca")}
    config = {name: FeatureConfig(ITEM) for name in activations}

    def loss(x):
        return sum((one**2).sum() for one in x.values())

    _, found = through_dummies(loss, activations, feature_config=config)
    expected = [("b", 0.0), ("c", 2.0), ("a", 4.0)]
    assert [(name, one[0, 0].item()) for name, one in found.items()] == expected


def _without_a_sequence(x):
    return loss_of(x | {"seen": [x["seen"][0], jnp.ones((5, 4, 2))]})


@pytest.mark.parametrize(
    ("loss", "config", "words"),
    [
        (
            lambda x: x["pair"].right.sum(),
            FEATURES,
            r"'table_0' \(index 0\).*not used",
        ),
        (lambda x: x["user"].sum(), FEATURES, r"'item' \(index 1\)"),
        (lambda x: jnp.argmax(x["user"]), FEATURES, "loss: expected a float array, got int32"),
        (_without_a_sequence, None, r"'seen/1' \(index 3\).*feature_config says which share"),
    ],
    ids=["first table unused", "second", "integers", "without a configuration, a table each"],
)
def test_a_loss_is_float_and_uses_every_table(loss, config, words):
    with pytest.raises(ValueError, match=words):
        through_dummies(loss, draw(), feature_config=config)


def test_errors_of_arguments():
    with pytest.raises(ValueError, match="loss: expected a float array, got int32"):
        get_through_compute(Halved(), lambda x: jnp.int32(1), draw())
    with pytest.raises(TypeError, match="activations: the top: expected a mapping, got a list"):
        through_dummies(loss_of, [1])


def test_an_unused_feature_of_a_used_table_has_zeros_and_a_warning():
    activations = draw()

    def loss(x):
        return x["user"].sum() + (x["seen"][0] ** 2).sum()

    with pytest.warns(UserWarning, match="zero gradients") as caught:
        _, found = through_dummies(loss, activations)
    equal(found, jax.grad(loss)(activations))
    assert [str(warning.message) for warning in caught] == [
        "table 'table_0': the loss does not depend on pair/left: zero gradients",
        "table 'item': the loss does not depend on pair/right, seen/1: zero gradients",
    ]
    assert all(warning.filename == __file__ for warning in caught)


def test_through_compute_gradients_an_unused_feature_has_none():
    found = get_through_compute(Halved(), lambda x: x["user"].sum(), draw())
    assert np.array_equal(found.pop("user"), np.full((5, 3), 0.5))
    assert found == {"seen": [None, None], "pair": Pair(None, None)}


# -- without a feature configuration ---------------------------------------------------------------


def test_without_a_configuration_each_activation_is_a_table_of_its_own():
    dummies = create_dummy_table_variables(draw())
    assert jax.tree.map(jnp.shape, dummies) == {
        "pair/left": {"pair/left": (5, 3)},
        "pair/right": {"pair/right": (5, 2)},
        "seen/0": {"seen/0": (5, 2)},
        "seen/1": {"seen/1": (5, 4, 2)},
        "user": {"user": (5, 3)},
    }


def test_activations_of_one_path_are_an_error():
    activations = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
    for call in (create_dummy_table_variables, lambda x: hook(x, {"t": {"a/b": jnp.ones(2)}})):
        with pytest.raises(ValueError, match=r"activations: .* got several at 'a/b'; rename keys"):
            call(activations)


# --------------------------------------------------------------------------------------------------


def in_both_ways(loss, activations, reduction):
    """Return the gradients of a replica's loss in both ways, on 8 replicas."""
    optimizer = Optimizer(optax.sgd(0.1), "sgd", axis_name="d", reduction=reduction)
    how = {"feature_config": FeatureConfig(USER), "optimizer": optimizer}
    _, first = get_through_dummies(loss, activations, **how)
    return first, get_through_compute(optimizer, loss, activations)


def on_replicas(local, in_specs, check_vma):
    specs = {"in_specs": in_specs, "out_specs": P("d"), "check_vma": check_vma}
    return jax.jit(jax.shard_map(local, mesh=mesh_of(8), **specs))


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 8), ("sum", 1)])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.quick(2)
def test_scaled_as_by_an_optimizer_over_replicas(check_vma, reduction, scale):
    """Each replica's part is that of its own loss by its own activations, over S = 8 under mean."""
    activations = jnp.arange(48.0).reshape(16, 3)

    def local(activations):
        return in_both_ways(lambda x: jnp.mean(jnp.sin(x)), activations, reduction)

    expected = np.cos(np.asarray(activations, np.float64)) / 6 / scale
    for found in on_replicas(local, P("d"), check_vma)(activations):
        # Cosines of numbers below 48, in float32.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicated_activations_have_each_replica_s_own_gradient(check_vma):
    def local(activations, x):
        both = in_both_ways(lambda found: found.sum() * x[0], activations, "sum")
        return jax.tree.map(lambda found: found[None], both)

    found, x = on_replicas(local, (P(), P("d")), check_vma), jnp.arange(8.0)
    for one in found(jnp.ones((2, 3)), x):
        assert np.array_equal(one[:, 0, 0], x)


# -- jagged sequences: a `Jagged` counts as its values ---------------------------------------------

SEEN = TableConfig(9, D, name="item")
JAGGED = {
    "seen": [FeatureConfig(SEEN, jagged=True), FeatureConfig(SEEN)],
    "user": FeatureConfig(TableConfig(7, 3, name="user"), jagged=True),
}


def jagged():
    seen, user = (make_jagged(SOME, shape=(dim,)) for dim in (D, 3))
    bag = jnp.arange(12.0).reshape(6, D)
    return {"seen": [seen, bag], "user": user.with_values(jnp.nan_to_num(user.values))}


def loss_of_jagged(found, factor=1.0):
    seen, bag = found["seen"]
    return factor * ((seen.means() * bag).sum() + (found["user"].values ** 3).sum())


def expected_of_jagged(factor=1.0):
    values, rebuild = split_activations(jagged())
    return jax.grad(lambda values: loss_of_jagged(rebuild(values), factor))(values)


through_jagged = functools.partial(through_dummies, feature_config=JAGGED)
through_compute = functools.partial(get_through_compute, Optimizer(optax.sgd(0.1), "sgd"))


def test_dummies_are_zeros_like_the_values_and_the_hook_gives_a_jagged():
    given = jagged()
    dummies = create_dummy_table_variables(given, JAGGED)
    assert jax.tree.map(jnp.shape, dummies) == {
        "item": {"seen/0": (S, C, D), "seen/1": (6, D)},
        "user": {"user": (S, C, 3)},
    }
    hooked = hook(given, dummies)
    assert isinstance(hooked["user"], Jagged)
    jax.tree.map(np.testing.assert_array_equal, hooked, given)
    by_dummy = jax.jit(jax.grad(lambda dummies: loss_of_jagged(hook(given, dummies))))(dummies)
    np.testing.assert_array_equal(by_dummy["item"]["seen/0"], expected_of_jagged()["seen"][0])
    np.testing.assert_array_equal(by_dummy["user"]["user"], expected_of_jagged()["user"])
    with pytest.raises(ValueError, match=r"hook: activations: user: expected float32 of shape"):
        hook({**given, "user": given["seen"][0]}, dummies)


@pytest.mark.parametrize("make", [lambda f: f, jax.jit])
@pytest.mark.quick(1)
def test_gradients_are_those_by_the_values(make):
    """They are what `update` takes, in both ways; the loss gets a `Jagged`."""

    @make
    def intercepted(given, factor):
        first = through_jagged(loss_of_jagged, given, factor)
        return first, through_compute(lambda x: loss_of_jagged(x, factor), given)

    (value, first), second = intercepted(jagged(), 2.0)
    np.testing.assert_allclose(value, loss_of_jagged(jagged(), 2.0), rtol=1e-6)
    equal(first, expected_of_jagged(2.0))
    equal(second, expected_of_jagged(2.0))


def test_a_jagged_that_the_loss_does_not_use():
    given = jagged()
    with pytest.raises(ValueError, match=r"table 'user' \(index 1\).*computed but not used"):
        through_jagged(lambda x: x["seen"][1].sum(), given)
    with pytest.warns(UserWarning, match=r"table 'item': the loss does not depend on seen/0"):
        _, found = through_jagged(lambda x: x["seen"][1].sum() + x["user"].sums().sum(), given)
    np.testing.assert_array_equal(found["seen"][0], np.zeros((S, C, D)))

    def of_lengths(found):  # the row splits alone, integers through which no gradient flows
        return (found["seen"][1] * found["user"].lengths.reshape(-1, 1).astype(float)).sum()

    found = through_compute(of_lengths, given)
    assert found["seen"][0] is found["user"] is None
