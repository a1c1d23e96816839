"""Training of whole models: sparse gradients of a user's own function, and optimizers of a tree."""

from tpu_embed.sparse import (
    IndexedSlices,
    clip_by_global_norm,
    global_norm,
    is_indexed_slices,
    scale,
)
from tpu_embed.training.autodiff import (
    AggregationMethod,
    Tag,
    UnconnectedGradients,
    gradients,
    tag,
)
from tpu_embed.training.interception import (
    create_dummy_table_variables,
    get_gradients_through_compute_gradients,
    get_gradients_through_dummy_table_variables,
    hook,
)
from tpu_embed.training.optimizer import (
    CrossShardOptimizer,
    Optimizer,
    OptState,
    TreeOptimizer,
    cross_shard,
)

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
