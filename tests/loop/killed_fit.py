"""Train by `fit` from the latest checkpoint, saving after each step; the tests kill it.

    python killed_fit.py DIRECTORY STEPS

Prints a line before it trains, and one per step; then `DIRECTORY/last.npz` has what was trained.
"""

import sys
from pathlib import Path

import jax
import numpy as np

if __name__ == "__main__":  # not where pytest looks for doctests
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

from fit_cases import full_engine, run
from loop_cases import batches, left_by


def main(directory, steps):
    print("begins", flush=True)
    options = {"steps": steps, "save_every": 1, "report_every": 1}
    options["callback"] = lambda report: print("step", report.step, flush=True)
    report = run(directory, batches(steps), **options)
    np.savez(Path(directory) / "last.npz", *left_by(full_engine(), report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
