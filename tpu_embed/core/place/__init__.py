"""Make a placed batch on the host: validate ids, turn keys into rows, agree on a shape, route."""

from tpu_embed.core.place.intake import Intake
from tpu_embed.core.place.keys import give_rows_of
from tpu_embed.core.place.router import exact_spec, natural_spec, pack_line

__all__ = [
    "Intake",
    "exact_spec",
    "give_rows_of",
    "natural_spec",
    "pack_line",
]
