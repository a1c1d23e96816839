"""A training loop in one call: read, place, train, save, evaluate, and go on after an interrupt.

What it does in a step is in `step.py`; what it keeps between steps, in `run.py`. Whoever needs
another loop begins with `examples/custom_loop.py`, which is this one without checkpoints.

Input: an engine, a loss and a source of batches. Output: trained tables, and a trained network.
"""

from tpu_embed.loop.fit import fit
from tpu_embed.loop.reports import Best, Report

__all__ = ["Best", "Report", "fit"]
