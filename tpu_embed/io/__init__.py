"""What leaves a training process, and what comes back: lookups and models that serve."""

from tpu_embed.io.export import export_model
from tpu_embed.io.quantize import QuantizedTable, quantize_rows
from tpu_embed.io.served import ServedModel, load_model
from tpu_embed.io.serving import serving_lookup

__all__ = [
    "QuantizedTable",
    "ServedModel",
    "export_model",
    "load_model",
    "quantize_rows",
    "serving_lookup",
]
