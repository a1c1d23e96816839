"""A program that copies large tables, because its state is not donated, is told so: once."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o

V, D = 2**18, 32  # 32 MiB, and as much for the slots
SAYS = r"copies 64 MiB of tables and slots.*donate_argnums=0.*update_in_place"


@functools.cache
def made():
    features = FeatureConfig(TableConfig(V, D, name="t"))
    engine = EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(2))
    state = jax.eval_shape(engine.init, jax.random.key(0))
    return engine, state, engine.place(np.zeros((4, 1), int))


def step(state, batch):
    engine = made()[0]
    return engine.update(state, batch, engine.lookup(state, batch))


def repeated(state, batch):
    return jax.lax.fori_loop(0, 3, lambda _, state: step(state, batch), state)


def scanned(state, batch):
    return jax.lax.scan(lambda s, _: (step(s, batch), None), state, jnp.arange(3))[0]


def chosen(state, batch):
    return jax.lax.cond(state.step > 0, step, lambda state, batch: state, state, batch)


def lowered(program, **options):
    _, state, batch = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(program, **options).lower(state, batch)
    return [f"{one.message}" for one in caught if "update:" in f"{one.message}"]


@pytest.mark.parametrize("program", [step, jax.jit(step), repeated, scanned, chosen])
def test_a_program_that_copies_is_told_once(program):
    (text,) = lowered(program)
    assert re.search(SAYS, text)
    assert not lowered(program, donate_argnums=0)


def test_a_program_that_makes_its_tables_copies_none():
    engine, _, batch = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda key: step(engine.init(key), batch)).lower(jax.random.key(0))


def test_nobody_is_told_who_does_not_run_it(refused):
    engine, state, batch = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused("not donated", engine.check_in_place, jax.jit(step), state, batch)
        jax.export.export(jax.jit(step), platforms=["cuda"])(state, batch)


def test_outside_a_jit_too(monkeypatch):
    monkeypatch.setattr("tpu_embed.core.update.in_place.LARGE", 1)
    engine = EmbeddingEngine(FeatureConfig(TableConfig(8, 2)), o.SGD(0.1), mesh=mesh(1))
    state, batch = engine.init(jax.random.key(0)), engine.place(np.zeros((4, 1), int))
    found = engine.lookup(state, batch)
    with pytest.warns(UserWarning, match="outside a jit, engine.update_in_place") as caught:
        [engine.update(state, batch, found) for _ in range(2)]
    assert [one.filename for one in caught] == [__file__]
    engine.update_in_place(state, batch, found)
