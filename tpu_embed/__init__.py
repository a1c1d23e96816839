"""Embedding tables larger than one device, for JAX: sharded lookups and sparse updates.

This is the path of a batch; the names are packages and files:

    on the host
      your ids ─▶ core/ids/             checked: shapes, weights, bad ids
               ─▶ core/batch/           physical rows of core/layout/, routed, packed, sent
    on the devices
               ─▶ core/exchange/        rows come from the shards that own them
               ─▶ core/lookup/          the rows of each bag are combined
               ─▶ activations ─▶ your model ─▶ gradients
               ─▶ core/update/sharded.py summed by row, with core/exchange/, on the row's owner
                                        there the rule of optimizers/ gives new rows
               ─▶ core/state/           tables and slots, updated in place

Which shard owns a row is decided in `core/layout/`; rows are moved and summed by `kernels/`. If a
table's vocabulary lives, its ids are keys, which `vocabulary/` turns into rows in `core/batch/`.

Two APIs lead to the same code. The functional API is `EmbeddingEngine` (`core/engine/`): pure
functions for your own jit. The stateful API is `TPUEmbedding` (`stateful/`), which holds the
state and a queue of batches.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from tpu_embed import initializers, optimizers, training
from tpu_embed._stop import Stop
from tpu_embed.config import FeatureConfig, QuantizationConfig, TableConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds, hash_ids, pad_batch
from tpu_embed.core.lookup import Jagged, split_activations
from tpu_embed.core.state import TableState
from tpu_embed.initializers import RowIdInitializer, ShardInfo
from tpu_embed.ngrams import ngram_ids
from tpu_embed.sparse import (
    IndexedSlices,
    embedding_lookup,
    sparse_grad,
    sparse_value_and_grad,
)
from tpu_embed.stateful import TPUEmbedding
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import DynamicVocabulary, FixedVocabulary

if TYPE_CHECKING:
    from tpu_embed import data as data
    from tpu_embed import io as io
    from tpu_embed import metrics as metrics
    from tpu_embed import nn as nn
    from tpu_embed import planning as planning
    from tpu_embed import retrieval as retrieval
    from tpu_embed.loop import fit as fit

__all__ = [
    "Batch",
    "BatchSpec",
    "DynamicVocabulary",
    "EmbeddingEngine",
    "FeatureConfig",
    "FixedVocabulary",
    "HostStorage",
    "IndexedSlices",
    "Jagged",
    "QuantizationConfig",
    "RaggedIds",
    "RowIdInitializer",
    "ShardInfo",
    "SparseIds",
    "Stop",
    "TPUEmbedding",
    "TableConfig",
    "TableState",
    "embedding_lookup",
    "fit",
    "hash_ids",
    "initializers",
    "ngram_ids",
    "optimizers",
    "pad_batch",
    "sparse_grad",
    "sparse_value_and_grad",
    "split_activations",
    "training",
]

_LATER = ("data", "io", "metrics", "nn", "planning", "retrieval")
"""Packages that are imported when they are first used: they need flax, orbax or others."""


_ANCESTORS = {
    "GPUEmbeddingV0": "TPUEmbedding",
    "TPUEmbeddingV0": "TPUEmbedding",
    "TPUEmbeddingV2": "TPUEmbedding",
    "TPUEmbeddingForServing": "io.serving_lookup",
    "cpu_embedding_lookup": "io.serving_lookup",
    "serving_embedding_lookup": "io.serving_lookup",
    "SGD": "optimizers.SGD",
    "Adagrad": "optimizers.Adagrad",
    "AdagradMomentum": "optimizers.AdagradMomentum",
    "Adam": "optimizers.Adam",
    "FTRL": "optimizers.FTRL",
    "CustomOptimizer": "optimizers.CustomOptimizer",
    "AdagradParameters": "optimizers.Adagrad",
    "AdamParameters": "optimizers.Adam",
    "FtrlParameters": "optimizers.FTRL",
    "StochasticGradientDescentParameters": "optimizers.SGD",
    "Optimizer": "training.Optimizer",
    "CrossShardOptimizer": "training.CrossShardOptimizer",
    "gradients": "training.gradients",
    "AggregationMethod": "training.AggregationMethod",
    "UnconnectedGradients": "training.UnconnectedGradients",
    "clip_by_global_norm": "training.clip_by_global_norm",
    "global_norm": "training.global_norm",
    "RowIdInitializerV2": "RowIdInitializer",
}
"""Names of TensorFlow's API -> ours."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("tpu-embed")
    if name == "fit":  # it needs orbax, which takes a second to import
        return importlib.import_module(f"{__name__}.loop").fit
    if name not in _LATER:
        text = f"module {__name__!r} has no attribute {name!r}"
        if name in _ANCESTORS:
            text += f"; here it is tpu_embed.{_ANCESTORS[name]}: see docs/migrating.md"
        raise AttributeError(text)
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, "__version__"})
