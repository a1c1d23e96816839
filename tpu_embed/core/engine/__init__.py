"""The functional API: what users call, and the programs that run on the devices for it."""

from tpu_embed.core.engine.engine import EmbeddingEngine
from tpu_embed.core.engine.logical_rows import check_engine

__all__ = ["EmbeddingEngine", "check_engine"]
