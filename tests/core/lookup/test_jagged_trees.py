"""`Jagged` as a pytree, under transformations, in what users differentiate and on many devices."""

import contextlib
import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same
from jagged_cases import FULL, LONGEST, SOME, B, C, D, N, S, make
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tpu_embed import Jagged, split_activations


def test_it_is_a_pytree_of_any_leaves():
    jagged, spec, float0 = make(SOME), PartitionSpec("d"), np.zeros((S, N + 1), jax.dtypes.float0)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(jagged)]
    assert paths == [".values", ".row_splits"]
    structure = jax.tree.structure(jagged)
    for leaves in [(None, None), (1, 2), (object(), "x"), (jagged.values, float0), (spec, spec)]:
        for one in (structure.unflatten(leaves), Jagged(*leaves)):
            assert (one.values, one.row_splits) == leaves or one.row_splits is float0
    for one in (jagged, jax.eval_shape(lambda j: j, jagged)):
        assert repr(one) == "Jagged(values=float32[2, 13, 2], row_splits=int32[2, 4])"
    assert repr(Jagged(spec, None)) == f"Jagged(values={spec!r}, row_splits=None)"
    doubled = jax.tree.map(lambda x: x * 2, jagged)
    np.testing.assert_array_equal(doubled.row_splits, 2 * jagged.row_splits)

    for again in (copy.deepcopy(jagged), pickle.loads(pickle.dumps(jagged))):
        np.testing.assert_array_equal(again.values, jagged.values)


def test_gradients_through_jagged_leaves_of_floats():
    """`allow_int` gives float0 splits, and a `Jagged` of them is still one."""
    jagged = make(FULL)
    gradient = jax.grad(lambda j: j.sums().sum(), allow_int=True)(jagged)
    assert gradient.row_splits.dtype == jax.dtypes.float0
    expected = np.arange(C) < np.asarray(jagged.row_splits)[:, -1:]
    np.testing.assert_array_equal(gradient.values[..., 0], expected)


def finite(jagged):
    return jagged.with_values(jnp.nan_to_num(jagged.values))


def test_split_activations_leaves_floats(refused):
    jagged = {"seen": finite(make(SOME)), "cart": finite(make(FULL, seed=1))}
    found = jagged | {"nested": (jnp.ones((B, D)), None)}
    values, rebuild = split_activations(found)
    assert values["seen"] is found["seen"].values
    assert [x.dtype for x in jax.tree.leaves(values)] == [np.float32] * 3
    assert_same(rebuild(values), found)
    gradients = jax.jit(jax.grad(lambda v: rebuild(v)["seen"].sums().sum()))(values)
    assert jax.tree.structure(gradients) == jax.tree.structure(values)
    assert float(sum(x.sum() for x in jax.tree.leaves(gradients))) == D * sum(SOME)
    says = r"expected first axes \(2, 13\), got shape \(13, 2\)"
    refused(says, rebuild, jax.tree.map(lambda x: x[0], values))


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_nothing_moves_between_devices(kind):
    """A network per replica, results per example, and their gradients: no collective on 8."""
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    devices = jax.make_mesh((8,), ("d",), axis_types=(types[kind],))
    sharding = NamedSharding(devices, PartitionSpec("d"))
    jagged = jax.device_put(finite(make(SOME * 4)), sharding)

    def network(jagged):
        here, values = jagged.segment_ids, jagged.values
        scores = jnp.where(here[:, None] == here[None], values @ values.T, -jnp.inf)
        return jagged.with_values(jax.nn.softmax(scores) @ values).sums()

    def everything(values):
        own = jagged.with_values(values)
        rows, _ = own.to_padded(LONGEST)
        back = Jagged.from_padded(rows, own.lengths.reshape(-1), 8)
        results = jax.vmap(network)(own), own.concatenate([own]).values, back.values
        return *results, own.sums(), own.means(), rows

    @jax.jit
    def both(values):
        results, pull = jax.vjp(everything, values)
        return results, pull(results)

    with jax.set_mesh(devices) if kind == "explicit" else contextlib.nullcontext():
        text, found = both.lower(jagged.values).compile().as_text(), both(jagged.values)
    assert "scatter" in text or "gather" in text
    assert not re.findall(r"all-(?:reduce|gather|to-all)|collective-|reduce-scatter", text)
    assert all(x.sharding.spec[0] == "d" for x in jax.tree.leaves(found))
