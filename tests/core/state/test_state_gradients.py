"""A gradient by the state is refused in words that help, wherever it is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import optimizers as o


@pytest.fixture(scope="module")
def case():
    features = {"x": tpu_embed.FeatureConfig(tpu_embed.TableConfig(5, 2, name="item"))}
    engine = tpu_embed.EmbeddingEngine(features, o.SGD(0.5), mesh=mesh(2))
    return engine, engine.init(jax.random.key(0)), engine.place({"x": np.array([1, 3])})


def _asked(engine, state, batch):
    """Return every way to ask for it: a name, and the call."""

    def loss(state, scale=1.0):
        return (scale * engine.lookup(state, batch)["x"]).sum()

    def of_tables(tables):
        return loss(dataclasses.replace(state, tables=tables))

    return {
        "grad": lambda: jax.grad(loss)(state),
        "value_and_grad": lambda: jax.value_and_grad(loss, argnums=(0, 1))(state, 2.0),
        "in a jit": lambda: jax.jit(jax.grad(loss))(state),
        "in a dict": lambda: jax.grad(lambda both: loss(**both))({"state": state, "scale": 2.0}),
        "allow_int": lambda: jax.grad(loss, allow_int=True)(state),
        "sparse": lambda: tpu_embed.sparse_value_and_grad(loss)(state),
        "sparse, in a dict": lambda: tpu_embed.sparse_grad(lambda x: loss(x["s"]))({"s": state}),
        "gradients": lambda: tpu_embed.training.gradients(loss, [state]),
        "of tables": lambda: jax.grad(of_tables)(state.tables),
        "vjp": lambda: jax.vjp(loss, state)[1](1.0),
    }


@pytest.mark.parametrize("way", _asked(None, None, None))
def test_a_gradient_by_the_state_names_update(case, way):
    with pytest.raises(TypeError, match=r"EmbeddingEngine\.update; .* sparse_value_and_grad"):
        _asked(*case)[way]()


def test_an_update_is_not_differentiated(case, refused):
    engine, state, batch = case

    def after(tables, gradients):
        new = engine.update(dataclasses.replace(state, tables=tables), batch, {"x": gradients})
        return sum(table.sum() for table in new.tables.values())

    says = r"^update: expected a step that is not differentiated"
    for argument in (0, 1):
        gradient = jax.grad(after, argnums=argument)
        refused(says, gradient, state.tables, jnp.ones((2, 2)), error=TypeError)


def test_a_state_beside_what_is_differentiated(case):
    engine, state, batch = case

    def loss(scale, state):
        return (scale * engine.lookup(state, batch)["x"]).sum(), state

    gradient, same = jax.grad(loss, has_aux=True)(2.0, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    np.testing.assert_allclose(gradient, loss(1.0, state)[0], rtol=1e-6)  # a sum in another order


def test_a_state_is_a_pytree(case):
    _, state, _ = case
    paths, structure = jax.tree.flatten_with_path(state)
    names = [jax.tree_util.keystr(path[:1]) for path, _ in paths]
    assert names == [".tables", ".step", ".counters", ".counters"]
    assert jax.tree.structure(structure.unflatten([leaf for _, leaf in paths])) == structure
