"""The classic optimizer over a whole model: minimize, compute and apply, also over replicas."""

from tpu_embed.training.optimizer.cross_shard import CrossShardOptimizer, cross_shard
from tpu_embed.training.optimizer.optimizer import Optimizer
from tpu_embed.training.optimizer.rows import update_touched
from tpu_embed.training.optimizer.state import OptState
from tpu_embed.training.optimizer.verbs import TreeOptimizer

__all__ = [
    "CrossShardOptimizer",
    "OptState",
    "Optimizer",
    "TreeOptimizer",
    "cross_shard",
    "update_touched",
]
