"""Train by `fit` from the latest checkpoint, saving after each step; the tests kill it.

    python killed_fit.py DIRECTORY STEPS

Prints a line before it trains, and one per step; then `DIRECTORY/last.npz` has what was trained.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

if __name__ == "__main__":  # not where pytest looks for doctests
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

from loop_cases import DENSE, Network, batches, left_by, loss_of_network, make_engine

import tpu_embed


def main(directory, steps):
    print("begins", flush=True)
    engine = make_engine()
    report = tpu_embed.fit(
        engine,
        loss_of_network,
        batches(steps),
        model=Network(nnx.Rngs(0)),
        optimizer=DENSE,
        directory=directory,
        save_every=1,
        keep=2,
        report_every=1,
        callback=lambda report: print("step", report.step, flush=True),
        progress=False,
    )
    np.savez(Path(directory) / "last.npz", *left_by(engine, report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
