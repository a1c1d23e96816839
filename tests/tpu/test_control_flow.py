"""Steps inside of loops and branches compile for TPUs with SparseCores.

libtpu ends the process where it cannot compile a program, so a failure here ends the worker.
"""

import functools
import importlib.util

import jax
import numpy as np
import pytest
from programs import OPTIMIZERS, quickstart

from tpu_embed.planning.compiled import compile_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)
whole = pytest.mark.whole
CHIP = "v5p:2x2x1"


def lower(kind, engine, state, batch):
    """Lower three steps, or one that may be left out; return what `jax.jit` lowers."""

    def run(state, batch, flag):
        def step(state):
            return engine.update(state, batch, engine.lookup(state, batch))

        if kind == "loop":
            return jax.lax.fori_loop(0, 3, lambda _, state: step(state), state)
        return jax.lax.cond(flag, step, lambda state: state, state)

    flag = jax.ShapeDtypeStruct((), bool)
    return jax.jit(run, donate_argnums=0).lower(state, batch, flag)


@pytest.mark.parametrize("kind", ["loop", pytest.param("branch", marks=whole)])
@pytest.mark.parametrize(
    "optimizer",
    ["sgd", *(pytest.param(name, marks=whole) for name in ("adagrad", "row-wise", "adam", "ftrl"))],
)
def test_steps_of_placed_batches(optimizer, kind):
    features, shapes = quickstart(dim=128)
    lowering = functools.partial(lower, kind)
    compiled = compile_for(CHIP, features, OPTIMIZERS[optimizer], shapes, lower=lowering)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("ftrl", marks=whole)])
def test_a_step_of_traced_ids(optimizer):
    features, shapes = quickstart(dim=128)
    features, rule = {"items": features["items"]}, OPTIMIZERS[optimizer]
    shapes = {"items": jax.ShapeDtypeStruct(shapes["items"].shape, np.int32)}
    compiled = compile_for(CHIP, features, rule, shapes, placed=False)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")
