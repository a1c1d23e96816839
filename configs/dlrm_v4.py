"""MLPerf DLRMv4 (HSTU): 11 tables of 293,051,712 rows and D 512, jagged histories, Yambda-5b.

The whole workload was not run. The planner and the TPU compiler were asked about it:

Command:   python -m tpu_embed plan configs/dlrm_v4.py --topology tpu7x:4x4x4
Expected:  4.4 GiB of tables and slots and 7.5 GiB during a step on each of 128 devices. The least
           slice is tpu7x:2x2x2, with 74.1 of 94.8 GiB; on tpu7x:2x2x1 "cross0" is refused, which
           has more than 16 GiB on a device

Command:   PYTHONPATH=build/libtpu:. JAX_PLATFORMS=cpu python -m tpu_embed plan configs/dlrm_v4.py
             --topology tpu7x:4x4x4 --compile
Expected:  arguments of 4.4 GiB as planned, and temporaries of 7.0 GiB, 0.94 of what is planned,
           after 5 minutes on 2 cores of an AMD EPYC beside other work; JAX 0.10.2, libtpu 0.0.42

The network (HSTU layers) is left out: the loss of the compiled step is half the sum of the squares
of all activations, which have the shapes of the workload.
"""

import dataclasses
import functools

import jax
import numpy as np

import tpu_embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmV4Config:
    """Sizes of tables and batch, and how tables are trained.

    Every event of a history is looked up in three tables, and every sample has one id in each of
    the eleven. With 4,086 events these are 3 · 4,086 + 11 = 12,269 ids.

    Args:
      rows: V of each table.
      histories: the tables in which events are looked up.
      dim: D of every table.
      events: the events of a sample on average. Jagged sequences take the room of their events, so
        this is what a batch is planned for.
      longest: how many events of a history are kept.
      batch_size: B.
      learning_rate: that of row-wise Adagrad.
      epsilon: ε of row-wise Adagrad.
    """

    rows: dict[str, int]
    histories: tuple[str, ...]
    dim: int = 512
    events: int = 4_086
    longest: int = 4_096
    batch_size: int = 8_192
    learning_rate: float = 0.01
    epsilon: float = 1e-8


# fmt: off
CONFIG = DlrmV4Config(
    rows={
        "item": 9_390_624, "artist": 1_293_395, "album": 3_367_692, "user": 1_000_001,
        "cross0": 100_000_000, "cross1": 40_000_000, "cross2": 24_000_000, "cross3": 40_000_000,
        "cross4": 32_000_000, "cross5": 2_000_000, "cross6": 40_000_000,
    },
    histories=("item", "artist", "album"),
)
# fmt: on


def within_root(key, shape, dtype, *, rows):
    """Return initial values, uniform in ±1/√rows."""
    bound = rows**-0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def workload(config=CONFIG):
    """Return feature configs, the optimizer and the shapes of a batch, for the planner."""
    features, batch = {}, {}
    for name, rows in config.rows.items():
        initial = functools.partial(within_root, rows=rows)
        table = tpu_embed.TableConfig(rows, config.dim, initial, name=name, placement="auto")
        features[name] = tpu_embed.FeatureConfig(table)
        batch[name] = jax.ShapeDtypeStruct((config.batch_size,), np.int32)
        if name in config.histories:
            seen = f"{name}_history"
            features[seen] = tpu_embed.FeatureConfig(table, config.longest, jagged=True)
            batch[seen] = jax.ShapeDtypeStruct((config.batch_size, config.events), np.int32)
    optimizer = tpu_embed.optimizers.RowWiseAdagrad(config.learning_rate, epsilon=config.epsilon)
    return features, optimizer, batch
