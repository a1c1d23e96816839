"""Steps inside of loops and branches compile for TPUs with SparseCores.

libtpu ends the process where it cannot compile a program, so a failure here ends the worker.
"""

import functools
import importlib.util

import jax
import pytest
from programs import OPTIMIZERS, quickstart

from tpu_embed.planning.compiled import compile_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)
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


@pytest.mark.parametrize("kind", ["branch", "loop"])
@pytest.mark.parametrize("optimizer", ["adagrad", "row-wise", "adam", "ftrl", "sgd"])
@pytest.mark.quick(1)
def test_steps_of_placed_batches(optimizer, kind):
    features, shapes = quickstart(dim=128)
    lowering = functools.partial(lower, kind)
    compiled = compile_for(CHIP, features, OPTIMIZERS[optimizer], shapes, lower=lowering)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")


@pytest.mark.parametrize("optimizer", ["ftrl", "adagrad"])
@pytest.mark.quick(1)
def test_a_step_of_traced_ids(optimizer):
    features, shapes = quickstart(dim=128)
    given = {"items": features["items"]}, OPTIMIZERS[optimizer], {"items": shapes["items"]}
    compiled = compile_for(CHIP, *given, placed=False)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")
