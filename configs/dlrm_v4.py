"""MLPerf DLRMv4 (HSTU): 11 tables of 293,051,712 rows and D 512, jagged histories, Yambda-5b.

The whole workload was not run. The planner and the TPU compiler were asked about it:

Command:   python -m tpu_embed plan configs/dlrm_v4.py --topology tpu7x:4x4x4
Expected:  4.4 GiB of tables and slots and 7.5 GiB during a step on each of 128 devices. The least
           slice is tpu7x:2x2x2, with 86.1 of 94.8 GiB; on tpu7x:2x2x1 "user_x_artist" is refused,
           which has more than 16 GiB on a device

Command:   PYTHONPATH=build/libtpu:. JAX_PLATFORMS=cpu python examples/hstu/estimate.py
             --topology tpu7x:4x4x4
Expected:  the whole step, network included: arguments of 4.6 GiB, temporaries of 23.5 GiB where
           20.9 are planned (v5p:4x4x4: 9.0, 33.2 and 41.0 GiB), 328 GFLOP a sample; JAX 0.10.2,
           libtpu 0.0.42

Command:   PYTHONPATH=build/libtpu:. JAX_PLATFORMS=cpu python -m tpu_embed plan configs/dlrm_v4.py
             --topology tpu7x:4x4x4 --compile
Expected:  the tables alone: arguments of 4.4 GiB as planned, and temporaries of 7.0 GiB, 0.94 of
           what is planned. The loss is half the sum of the squares of all activations

Sizes and names are those of the reference (mlcommons/training, recommendation, README, November
2026). `examples/hstu/dlrm_v4_model.py` says what it leaves open.
"""

import dataclasses
import functools
from typing import Literal

import jax
import numpy as np
import optax

import tpu_embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmV4Config:
    """Sizes of tables, batch and network, and how tables are trained.

    Every event of a history is looked up in three tables, as is the candidate; every sample has one
    id in each of the other eight. With 4,086 events these are 3 · 4,086 + 3 + 8 = 12,269 ids.

    Args:
      rows: V of each table.
      histories: the tables in which events and candidates are looked up.
      dim: D of every table.
      events: the events of a sample on average. Jagged sequences take the room of their events, so
        this is what a batch is planned for.
      longest: how many events of a history are kept; also L, by which HSTU divides.
      batch_size: B.
      learning_rate: that of row-wise Adagrad, for which the reference takes 1e-6.
      epsilon: ε of row-wise Adagrad.
      warm_up: steps in which the learning rates rise from 0.
      width: the size of a vector in the HSTU layers.
      layers, heads: how many.
      key_dim, value_dim: sizes of queries and keys, and of values and gates, per head.
      hidden_size: of the two linear layers that make the vector of an event.
      action_dim: the size of the vector of each of three bits of an action.
      positions, ages: rows of the tables of positions, and of the time before the request.
      block: events of a tile of attention; the results depend on it by rounding alone.
      dtype: of products of matrices.
      dense_learning_rate: that of Adam for the network.
      clip: the largest norm of the network's gradient.
      seed: of the network.
    """

    rows: dict[str, int]
    histories: tuple[str, ...]
    dim: int = 512
    events: int = 4_086
    longest: int = 4_096
    batch_size: int = 8_192
    learning_rate: float = 1e-6
    epsilon: float = 1e-8
    warm_up: int = 24_000
    width: int = 512
    layers: int = 3
    heads: int = 4
    key_dim: int = 128
    value_dim: int = 128
    hidden_size: int = 256
    action_dim: int = 8
    positions: int = 8_192
    ages: int = 2_048
    block: int = 512
    dtype: str = "bfloat16"
    dense_learning_rate: float = 1e-6
    clip: float = 1.0
    seed: int = 0

    @property
    def contexts(self) -> tuple[str, ...]:
        """The tables in which a sample is looked up once."""
        return tuple(name for name in self.rows if name not in self.histories)


# fmt: off
CONFIG = DlrmV4Config(
    rows={
        "item": 9_390_624, "artist": 1_293_395, "album": 3_367_692, "user": 1_000_001,
        "user_x_artist": 100_000_000, "user_x_album": 40_000_000, "user_x_hour": 24_000_000,
        "item_x_hour": 40_000_000, "artist_x_hour": 32_000_000, "user_x_organic": 2_000_000,
        "user_x_artist_x_hour": 40_000_000,
    },
    histories=("item", "artist", "album"),
)
# fmt: on


def within_root(key, shape, dtype, *, rows):
    """Return initial values, uniform in ±1/√rows."""
    bound = rows**-0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def feature_config(config, placement: Literal["auto", "mod"] = "auto"):
    """Return the features: three tables per event and per candidate, the others per request."""
    features = {}
    for name, rows in config.rows.items():
        initial = functools.partial(within_root, rows=rows)
        table = tpu_embed.TableConfig(rows, config.dim, initial, name=name, placement=placement)
        features[name] = tpu_embed.FeatureConfig(table, jagged=name in config.histories)
        if name in config.histories:
            features[f"{name}_history"] = tpu_embed.FeatureConfig(
                table, config.longest, jagged=True, keep="last"
            )
    return features


def optimizer(config):
    """Return row-wise Adagrad, warmed up."""
    schedule = optax.linear_schedule(0.0, config.learning_rate, config.warm_up)
    return tpu_embed.optimizers.RowWiseAdagrad(schedule, epsilon=config.epsilon)


def workload(config=CONFIG):
    """Return feature configs, the optimizer and the shapes of a batch, for the planner."""
    batch = {name: jax.ShapeDtypeStruct((config.batch_size,), np.int32) for name in config.contexts}
    for name in config.histories:
        batch[name] = jax.ShapeDtypeStruct((config.batch_size, 1), np.int32)
        seen = (config.batch_size, config.events)
        batch[f"{name}_history"] = jax.ShapeDtypeStruct(seen, np.int32)
    return feature_config(config), optimizer(config), batch
