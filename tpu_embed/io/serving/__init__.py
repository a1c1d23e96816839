"""Serving: lookups in plain arrays, exported models, and loading them to answer requests."""

from tpu_embed.io.serving.export import export_model
from tpu_embed.io.serving.following import FollowingModel, follow, publish
from tpu_embed.io.serving.lookup import host_table, serving_lookup
from tpu_embed.io.serving.served import ServedModel, load_model

__all__ = [
    "FollowingModel",
    "ServedModel",
    "export_model",
    "follow",
    "host_table",
    "load_model",
    "publish",
    "serving_lookup",
]
