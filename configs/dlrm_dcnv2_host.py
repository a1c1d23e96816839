"""MLPerf DLRM-DCNv2 whole on four chips of 16 GiB: its five large tables are at home on the host.

The tables and their accumulators take 209 GB; `configs/dlrm_dcnv2.py` has the workload.

Command:   python -m tpu_embed plan configs/dlrm_dcnv2_host.py --topology v5e:2x2 --hit-rate 0.8
             --compile      (needs libtpu: pip install ".[tpu]")
Hardware:  2 cores AMD EPYC, Python 3.11, JAX 0.10.2, libtpu 0.0.42; a minute. Nothing has run on
           a TPU
Expected:  12.9 of 15.8 GiB a device are planned: 7.8 of tables and slots (48.7 without the host),
           4.2 for a step, 0.9 for rows on their way. Compiled: 7.9 GiB of arguments, 5.1 of
           temporaries; the first `admit`, in which all rows are new, 1.6 of temporaries.
           195.8 GiB of the host's memory once every row was touched, 190.7 of them rows:
           `path=` puts these into a file

The hit rate is an assumption, not a measurement. With it, each step moves 1.8 GiB to the devices
and as much home; `--sample t20=FILE` counts it on real ids. Of uniform ids, a batch has up to
6.0 million rows of t20; there is room for two batches, so that one can be placed ahead.
"""

import dataclasses
import pathlib
import runpy

from tpu_embed import HostStorage

_WHOLE = runpy.run_path(str(pathlib.Path(__file__).with_name("dlrm_dcnv2.py")))

DEVICE_ROWS = {
    "t00": 4_000_000,
    "t09": 4_000_000,
    "t19": 4_000_000,
    "t20": 12_500_000,
    "t21": 4_000_000,
}
"""The tables of 40 million rows: how many of them the devices hold together."""


def workload():
    """Return feature configs, the optimizer and the shapes of a batch, for the planner."""
    features, optimizer, batch = _WHOLE["workload"]()
    for name, rows in DEVICE_ROWS.items():
        storage = HostStorage(device_rows=rows)
        table = dataclasses.replace(features[name].table, storage=storage)
        features[name] = dataclasses.replace(features[name], table=table)
    return features, optimizer, batch
