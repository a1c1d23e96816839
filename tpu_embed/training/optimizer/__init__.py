"""Optimizers of a whole parameter tree: compute gradients, sum them over replicas, apply them."""

from tpu_embed.training.optimizer.cross_shard import CrossShardOptimizer, cross_shard
from tpu_embed.training.optimizer.optimizer import Optimizer, OptState, TreeOptimizer
from tpu_embed.training.optimizer.update import update_parameter_rows

__all__ = [
    "CrossShardOptimizer",
    "OptState",
    "Optimizer",
    "TreeOptimizer",
    "cross_shard",
    "update_parameter_rows",
]
