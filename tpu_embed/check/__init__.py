"""Check on the devices that are there that the library computes right, and how fast it is.

Every part trains or looks up small tables and compares all numbers with plain float64 loops, which
share no code with the rest of the package. `python -m tpu_embed check` runs them all.

Input: the devices. Output: a report per part.
"""

from tpu_embed.check.parts import PARTS, PartReport, run_parts

__all__ = ["PARTS", "PartReport", "run_parts"]
