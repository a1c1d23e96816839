"""Gradients by whatever a user chooses: arguments, tagged values inside a function, activations."""

from tpu_embed.training.autodiff.gradients import (
    Aggregation,
    AggregationMethod,
    Gate,
    UnconnectedGradients,
    checked_loss,
    gradients,
    value_and_gradients,
)
from tpu_embed.training.autodiff.interception import (
    create_dummy_table_variables,
    get_gradients_through_compute_gradients,
    get_gradients_through_dummy_table_variables,
    hook,
)
from tpu_embed.training.autodiff.tags import Tag, tag

__all__ = [
    "Aggregation",
    "AggregationMethod",
    "Gate",
    "Tag",
    "UnconnectedGradients",
    "checked_loss",
    "create_dummy_table_variables",
    "get_gradients_through_compute_gradients",
    "get_gradients_through_dummy_table_variables",
    "gradients",
    "hook",
    "tag",
    "value_and_gradients",
]
