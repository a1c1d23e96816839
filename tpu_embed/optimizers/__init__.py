"""Optimizers of tables: a rule updates each row from nothing but its slots and its gradient.

That lets the engine update just the rows that a batch touches. Our own rules are frozen dataclasses
that are equal by value. Any row-separable optax transform can be used as well;
`as_table_optimizer` wraps it.

Input: rows, their slots, and their gradients.
Output: the rows and the slots after one update.
"""

from tpu_embed.optimizers.base import (
    LearningRateKind,
    SlotShape,
    TableOptimizer,
    learning_rate_kind,
)
from tpu_embed.optimizers.optax_rows import OptaxOptimizer, as_table_optimizer
from tpu_embed.optimizers.row_optimizer import RowOptimizer, row_mean, row_norm, row_sum
from tpu_embed.optimizers.rules import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    AdagradMomentum,
    Adam,
    CenteredRMSProp,
    CustomOptimizer,
    Lion,
    Momentum,
    ProximalAdagrad,
    RMSProp,
    RowWiseAdagrad,
    Yogi,
)

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "CenteredRMSProp",
    "CustomOptimizer",
    "LearningRateKind",
    "Lion",
    "Momentum",
    "OptaxOptimizer",
    "ProximalAdagrad",
    "RMSProp",
    "RowOptimizer",
    "RowWiseAdagrad",
    "SlotShape",
    "TableOptimizer",
    "Yogi",
    "as_table_optimizer",
    "learning_rate_kind",
    "row_mean",
    "row_norm",
    "row_sum",
]
