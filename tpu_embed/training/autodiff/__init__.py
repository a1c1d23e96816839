"""Gradients by whatever a user chooses: arguments, tagged values inside a function, activations."""

from tpu_embed.training.autodiff.collect import Collected, collect_gradients
from tpu_embed.training.autodiff.gradients import (
    Aggregation,
    AggregationMethod,
    Gate,
    UnconnectedGradients,
    gradients,
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
    "Collected",
    "Gate",
    "Tag",
    "UnconnectedGradients",
    "collect_gradients",
    "create_dummy_table_variables",
    "get_gradients_through_compute_gradients",
    "get_gradients_through_dummy_table_variables",
    "gradients",
    "hook",
    "tag",
]
