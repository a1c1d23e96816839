"""The part of the check that plans tables of more bytes than a SparseCore addresses.

It needs no memory: nothing but the layout is computed.

Input: nothing of the devices. Output: faults, and a line that says what was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed import optimizers, planning
from tpu_embed.check.findings import Findings
from tpu_embed.config import FeatureConfig, TableConfig

_CHIP, _CHIPS = "v5p:1x1x1", "v5p:2x1x1"
"""SparseCores, and 95 GiB a device."""


def check_limits(devices: Sequence[Any], findings: Findings) -> str:
    """Plan 12 GiB and 24 GiB a device: two tables are two arrays, one table is refused."""
    del devices
    rows = 12 * 2**30 // (4 * 128)
    halves = [TableConfig(rows, 128, name=f"12_GiB_{i}") for i in range(2)]
    found = _plan(halves, _CHIP)
    if found.stacks != 2:
        findings.add(f"plan of two tables of 12 GiB on {_CHIP}", "2 arrays", found.stacks)
    whole = [TableConfig(2 * rows, 128, name="24_GiB")]
    _plan(whole, _CHIPS)
    try:
        found = _plan(whole, _CHIP)
        findings.add(f"plan of a table of 24 GiB on {_CHIP}", "ValueError", f"fits: {found.fits}")
    except ValueError as error:
        if "table '24_GiB'" not in str(error):
            findings.add(f"plan of a table of 24 GiB on {_CHIP}", "an error that names it", error)
    return "arrays of more than 16 GiB on a SparseCore: split by tables, or refused"


def _plan(tables: Sequence[TableConfig], topology: str) -> planning.Plan:
    features = [FeatureConfig(table) for table in tables]
    batch = [jax.ShapeDtypeStruct((1024, 2), np.int32) for _ in tables]
    return planning.plan(features, optimizers.SGD(0.1), topology, batch)
