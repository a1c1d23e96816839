"""Import the modules of the DLRM-DCNv2 example; make small workloads, lines and metrics."""

import dataclasses
import importlib
import runpy
import sys
from pathlib import Path

import numpy as np
import scipy.stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))
criteo, dlrm_data, dlrm_model, multi_hot, planted = map(
    importlib.import_module, ("criteo", "dlrm_data", "dlrm_model", "multi_hot", "planted")
)

CONFIG = runpy.run_path(str(ROOT / "configs" / "dlrm_dcnv2.py"))["CONFIG"]
TINY = dataclasses.replace(
    CONFIG.scaled(1e-6, dim=4, most_hot=3), bottom=(8, 4), cross_rank=3, top=(8, 1)
)
ROWS = CONFIG.scaled(1e-5).rows
"""Of the tables that lines are read for."""


def exact_auc(score, label):
    """Return the area from ranks, equal scores at their mean rank: O(n log n)."""
    clicks, others = score[label == 1], score[label == 0]
    return scipy.stats.mannwhitneyu(clicks, others).statistic / (len(clicks) * len(others))


def line(label: object = 0, integers=(), numbers=()):
    """Return a line of a Criteo file; fields that are not given are missing."""
    integers = [*map(str, integers), *[""] * (13 - len(integers))]
    numbers = [*numbers, *[""] * (26 - len(numbers))]
    return "\t".join([str(label), *integers, *numbers])


def write(path: Path, text):
    """Write lines, and return the path."""
    path.write_bytes(("\n".join(text) + "\n").encode())
    return path


def joined(batches):
    """Return one batch of them all."""
    return dlrm_data.Examples(*map(np.concatenate, zip(*batches, strict=True)))
