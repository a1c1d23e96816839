"""Optimizers of tables: rows, slots and gradients in, rows and slots out.

A rule of ours is a frozen dataclass, equal by value; any other row-separable optax transform is
taken as well. The engine turns what users pass into a `TableOptimizer` with `as_table_optimizer`.
"""

from tpu_embed.optimizers.adagrad import Adagrad
from tpu_embed.optimizers.adam import Adam
from tpu_embed.optimizers.base import SlotShape, TableOptimizer
from tpu_embed.optimizers.momentum import Momentum
from tpu_embed.optimizers.row_optimizer import RowOptimizer
from tpu_embed.optimizers.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Momentum", "RowOptimizer", "SlotShape", "TableOptimizer"]
