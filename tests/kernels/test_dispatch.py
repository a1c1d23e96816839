"""One traced program lowers for every platform, each with its own kernels."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.kernels import dispatch


def step_of(devices):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("d",))
    table = TableConfig(64, 8, dtype="bfloat16")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, optimizers.Adam(0.1), mesh=mesh)
    state = jax.eval_shape(engine.init, jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features):
        return engine.update(state, features, engine.lookup(state, features))

    return step, (state, {"x": jax.ShapeDtypeStruct((16, 3), jnp.int32)})


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_training_step_lowers_for(platform, devices):
    step, arguments = step_of(devices)
    lowered = step.trace(*arguments).lower(lowering_platforms=(platform,))
    assert "stablehlo.gather" in lowered.as_text()


def test_one_program_for_several_platforms():
    step, arguments = step_of(1)
    exported = export.export(step, platforms=("cpu", "cuda", "tpu"))(*arguments)
    assert exported.platforms == ("cpu", "cuda", "tpu")


def test_a_gpu_sums_without_atomics():
    """A scatter-add of floats on a GPU adds in the order of arrival: it must not be there."""
    arguments = (jax.ShapeDtypeStruct((32, 4), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32))
    summed = jax.jit(lambda values, segments: dispatch.segment_sum(values, segments, 8))

    def adding_scatters(platform):
        text = summed.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        bodies = re.findall(r'"stablehlo.scatter"\(.*?\}\)', text, re.DOTALL)
        assert len(bodies) == 1
        return sum("stablehlo.add" in body for body in bodies)

    assert adding_scatters("cuda") == 0
    assert adding_scatters("cpu") == 1
