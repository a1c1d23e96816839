"""The functional API: what users call, and the programs that run on the devices for it."""

from tpu_embed.core.engine.checks import check_engine
from tpu_embed.core.engine.engine import EmbeddingEngine

__all__ = ["EmbeddingEngine", "check_engine"]
