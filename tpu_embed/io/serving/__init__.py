"""Lookups where nothing is trained: exported models, their files, and models that call them."""

from tpu_embed.io.serving.export import export_model
from tpu_embed.io.serving.lookup import serving_lookup
from tpu_embed.io.serving.served import ServedModel, load_model

__all__ = ["ServedModel", "export_model", "load_model", "serving_lookup"]
