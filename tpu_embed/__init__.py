"""Embedding tables larger than one device, for JAX: sharded lookups, sparse updates.

The batch's path, by file name:

    ids ─▶ core/ids ─▶ core/batch ─▶ core/lookup (core/route, core/combine) ─▶ activations ─┐
                                                                                            │
                                                                                        your model
                                                                                            │
    tables ◀─ core/apply (optimizers/) ◀─ core/sums (core/dedup, core/route) ◀─ gradients ◀─┘

Two APIs lead to the same code: `EmbeddingEngine`, pure functions for your own jit, and
`TPUEmbedding`, which holds the state and a queue of batches.
"""

from tpu_embed import initializers, optimizers, training
from tpu_embed.config import FeatureConfig, QuantizationConfig, TableConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds, pad_batch
from tpu_embed.core.state import TableState
from tpu_embed.hashing import hash_ids
from tpu_embed.initializers import RowIdInitializer, ShardInfo
from tpu_embed.sparse import IndexedSlices, embedding_lookup, sparse_grad, sparse_value_and_grad
from tpu_embed.tpu_embedding import TPUEmbedding

__all__ = [
    "Batch",
    "BatchSpec",
    "EmbeddingEngine",
    "FeatureConfig",
    "IndexedSlices",
    "QuantizationConfig",
    "RaggedIds",
    "RowIdInitializer",
    "ShardInfo",
    "SparseIds",
    "TPUEmbedding",
    "TableConfig",
    "TableState",
    "embedding_lookup",
    "hash_ids",
    "initializers",
    "optimizers",
    "pad_batch",
    "sparse_grad",
    "sparse_value_and_grad",
    "training",
]
