"""Neighbours of the embedding engine: gradients that are sparse, and optimizers of whole models."""

from tpu_embed.core.indexed_slices import (
    IndexedSlices,
    clip_by_global_norm,
    global_norm,
    is_indexed_slices,
    scale,
)
from tpu_embed.training.cross_shard import CrossShardOptimizer, cross_shard
from tpu_embed.training.gradients import AggregationMethod, UnconnectedGradients, gradients
from tpu_embed.training.interception import (
    create_dummy_table_variables,
    get_gradients_through_compute_gradients,
    get_gradients_through_dummy_table_variables,
    hook,
)
from tpu_embed.training.optimizer import Optimizer
from tpu_embed.training.state import OptState
from tpu_embed.training.tags import Tag, tag
from tpu_embed.training.verbs import TreeOptimizer

__all__ = [
    "AggregationMethod",
    "CrossShardOptimizer",
    "IndexedSlices",
    "OptState",
    "Optimizer",
    "Tag",
    "TreeOptimizer",
    "UnconnectedGradients",
    "clip_by_global_norm",
    "create_dummy_table_variables",
    "cross_shard",
    "get_gradients_through_compute_gradients",
    "get_gradients_through_dummy_table_variables",
    "global_norm",
    "gradients",
    "hook",
    "is_indexed_slices",
    "scale",
    "tag",
]
