"""Warnings about tables that look as if they were trained and are not, once per layer.

Input: a layer that is called while JAX differentiates, or that has gradients and no optimizer.
Output: a warning, the first time that it happens to the layer.
"""

from __future__ import annotations

import weakref

from jax._src import core  # which trace is current, and of which kind, has no public name
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace

from tpu_embed._checks import warn_user
from tpu_embed.core.engine import EmbeddingEngine

_WARNED: weakref.WeakSet[EmbeddingEngine] = weakref.WeakSet()
"""The engines of layers that have had their warning."""


def warn_if_differentiated(engine: EmbeddingEngine) -> None:
    """Warn if a trainable table is looked up under `jax.grad` or the like, which does not train it.

    `fused_value_and_grad` and `sparse_value_and_grad` trace the function first and differentiate
    what they have traced, so a layer that they train is never called under differentiation.

    Args:
      engine: the engine of the layer.
    """
    if _differentiates() and any(one.trainable for one in engine.table_configs.values()):
        _warn(
            engine,
            "is looked up under differentiation, which does not train it; use "
            "tpu_embed.nn.fused_value_and_grad in place of nnx.value_and_grad",
        )


def warn_without_optimizer(engine: EmbeddingEngine) -> None:
    """Warn that a table has gradients and no optimizer.

    Args:
      engine: the engine of the layer.
    """
    _warn(engine, "is not trained: give its layer an optimizer, or trainable=False")


def _differentiates() -> bool:
    """Return whether the current trace, or one around it, is that of a derivative."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, (JVPTrace, LinearizeTrace)):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def _warn(engine: EmbeddingEngine, what: str) -> None:
    if engine in _WARNED:
        return
    _WARNED.add(engine)
    sizes = (f"{n!r} [{t.vocabulary_size}, {t.dim}]" for n, t in engine.table_configs.items())
    warn_user(f"table {', '.join(sizes)} of a layer {what}")
