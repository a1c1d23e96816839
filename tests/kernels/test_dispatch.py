"""One traced program lowers for every platform, each with its own kernels."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from jax import export
from kernel_cases import sums_of
from pairs import parametrize_pairs

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.kernels import cpu, dispatch

NATIVE = cpu.load().path is not None
PLATFORMS = ("cpu", "cuda", "tpu")
CALL = r"custom_call @tpu_embed_(\w+)"
CALLS = [export.DisabledSafetyCheck.custom_call(f"tpu_embed_{name}") for name in cpu.TARGETS]


def step_of(devices):
    """Return a training step, and its arguments' shapes."""
    table = TableConfig(64, 8, dtype="bfloat16")
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, optimizers.Adam(0.1), mesh=mesh(devices))
    state = jax.eval_shape(engine.init, jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features):
        return engine.update(state, features, engine.lookup(state, features))

    return step, (state, {"x": jax.ShapeDtypeStruct((16, 3), jnp.int32)})


@parametrize_pairs(
    kernels=["native", "reference"] if NATIVE else ["reference"],
    platform=list(PLATFORMS),
    devices=[8, 1],
)
@pytest.mark.quick(2)
def test_a_training_step_lowers_for(monkeypatch, kernels, platform, devices):
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    step, arguments = step_of(devices)
    text = step.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    called = set(re.findall(CALL, text))
    if (kernels, platform) == ("native", "cpu"):
        assert called == {"gather_sum", "update"}
    else:
        assert not called
        assert "stablehlo.gather" in text
        assert "stablehlo.sort" in text


def exported_step(monkeypatch, kernels, disabled_checks=()):
    """Return a step exported for all platforms, and its state's leaves."""
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    step, (state, features) = step_of(1)
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def flat_step(leaves, features):
        return jax.tree.leaves(step(jax.tree.unflatten(structure, leaves), features))

    options = {"platforms": PLATFORMS, "disabled_checks": disabled_checks}
    return export.export(flat_step, **options)(leaves, features), leaves


def test_one_program_for_several_platforms(monkeypatch):
    """XLA's own operations need no leave to be exported."""
    exported, _ = exported_step(monkeypatch, "reference")
    assert not re.search(CALL, exported.mlir_module())


@pytest.mark.skipif(not NATIVE, reason=f"compiled library: {cpu.load().why_not}")
@pytest.mark.whole
def test_one_program_with_compiled_kernels_for_several_platforms(monkeypatch):
    with pytest.raises(ValueError, match="tpu_embed_"):
        exported_step(monkeypatch, "native")
    native, leaves = exported_step(monkeypatch, "native", CALLS)
    assert "tpu_embed_update" in native.mlir_module()
    reference, _ = exported_step(monkeypatch, "reference")
    rng, numbers = np.random.default_rng(0), []
    for leaf in leaves:
        most = 2 if jnp.issubdtype(leaf.dtype, jnp.floating) else 2**14
        numbers.append(rng.uniform(0, most, leaf.shape).astype(leaf.dtype))
    ids = {"x": rng.integers(-1, 64, (16, 3)).astype(np.int32)}
    found, expected = (jax.jit(step.call)(numbers, ids) for step in (native, reference))
    assert_same(found, expected)
    assert any(np.any(a != b) for a, b in zip(found, numbers, strict=True))


def _segment_sum(values, segments):
    return dispatch.segment_sum(values, segments, 8)


def _gather_sum(values, segments):
    return sums_of(dispatch.gather_sum, values, segments, segments, bags=(4, 4))


@pytest.mark.parametrize("function", [_segment_sum, _gather_sum])
def test_a_gpu_sums_without_atomics(monkeypatch, function):
    """A scatter-add of floats on a GPU adds in the order of arrival: it must not be there."""
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    traced = jax.jit(function).trace(jnp.zeros((32, 4)), jnp.zeros(32, jnp.int32))
    for platform, adding in (("cuda", False), ("cpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        (body,) = re.findall(r'"stablehlo.scatter"\(.*?\}\)', text, re.DOTALL)
        assert ("stablehlo.add" in body) == adding


# -- which kernels run on a CPU --------------------------------------------------------------------


@pytest.fixture
def without_library(monkeypatch):
    """Take the compiled library away, and what was said about it."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "load", lambda: cpu.Loaded(None, "gone for a test"))
    dispatch._say_once.cache_clear()
    yield
    dispatch._say_once.cache_clear()


@pytest.mark.parametrize("word", [None, "native", "reference"] if NATIVE else ["reference"])
def test_the_kernels_that_are_asked_for_are_used(monkeypatch, word):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    if word is not None:
        monkeypatch.setenv(dispatch.VARIABLE, word)
    assert dispatch.kernels_in_use() == (word or "native")


def test_another_word_is_an_error(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "Native")
    said = "^TPU_EMBED_KERNELS: expected native, reference or unset, got 'Native'"
    with pytest.raises(ValueError, match=said):
        dispatch.gather_rows(jnp.ones((2, 1)), jnp.zeros(1, jnp.int32))


def test_the_compiled_kernels_asked_for_but_missing(monkeypatch, without_library):
    monkeypatch.setenv(dispatch.VARIABLE, "native")
    said = r"^TPU_EMBED_KERNELS: expected compiled kernels, got gone for a test; install .* C\+\+"
    with pytest.raises(RuntimeError, match=said):
        dispatch.kernels_in_use()


def test_without_the_library_the_reference_runs_and_says_so_once(caplog, without_library):
    with caplog.at_level(logging.WARNING, "tpu_embed"):
        assert [dispatch.kernels_in_use() for _ in range(3)] == ["reference"] * 3
        found = dispatch.gather_rows(jnp.ones((2, 1)), jnp.array([1, -1], jnp.int32))
    assert found.tolist() == [[1.0], [0.0]]
    (said,) = caplog.messages
    assert "slower: gone for a test; install the package again" in said


def test_a_library_that_does_not_load_is_named(monkeypatch, tmp_path):
    library = tmp_path / f"_native{cpu.importlib.machinery.EXTENSION_SUFFIXES[0]}"
    library.write_text("no library")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    loaded = cpu.load.__wrapped__()
    assert loaded.path is None
    assert loaded.why_not.startswith(f"{library.name} does not load: ")
    library.unlink()
    assert "not built" in cpu.load.__wrapped__().why_not


def test_a_clone_without_the_library_is_named(monkeypatch, tmp_path):
    """Started in a clone, Python imports what is there, even where a wheel of it is installed."""
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "tpu_embed" / "kernels" / "cpu.py"))
    (tmp_path / "setup.py").touch()
    says = f"imported from {tmp_path}, where `pip install --editable .` builds them"
    assert says in cpu.load.__wrapped__().why_not
