"""MLPerf DLRM-DCNv2: 26 tables of 204,184,588 rows, click prediction on Criteo 1TB.

Command:   python examples/dlrm.py --devices 8    (1/10,000 of the rows, planted clicks)
Hardware:  2 cores AMD EPYC, Python 3.11, JAX 0.10.2; 1.9 to 2.4 minutes with compilation
Expected:  test AUC 0.866 after 2,457,600 examples; the true probabilities reach 0.871. The
           model reaches 98.6 % of their distance to 0.5, on 32,768 test examples

The whole workload was not run:

Command:   python examples/dlrm.py --scale 1 --dim 128 --most-hot 100 --network 1
             --batch-size 65536 --steps 64013 --criteo DIR --matrices DIR
Hardware:  tables of 104.5 GB, and as much again for Adagrad's accumulators
Expected:  MLPerf's target, AUC 0.80275 within one epoch of 4,195,197,692 examples

What the plan says for TPUs:

Command:   python -m tpu_embed plan configs/dlrm_dcnv2.py --topology v5p:4x4x4
Expected:  3.5 GiB on each of 64 devices; refused on v5e:2x2
"""

import dataclasses

import jax
import numpy as np

import tpu_embed

LEAST_ROWS = 4  # a table that `scaled` shrinks keeps as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    """Sizes of the tables and the network, and how both are trained.

    Args:
      rows: V of each table.
      hots: H of each table, the number of ids in a bag.
      dim: D of every table, and the last output size of the bottom network.
      dense_features: the number of dense features per example.
      bottom: output sizes of the layers over the dense features.
      cross_layers: the number of low-rank cross layers.
      cross_rank: the rank of each cross layer.
      top: output sizes of the layers after the crosses.
      batch_size: B.
      learning_rate: that of Adagrad, for tables and network; no decay, no warm-up.
      epsilon: ε of Adagrad.
      initial_accumulator: the initial accumulator of Adagrad.
      seed: the seed of the initial values and of the order of examples.

    Raises:
      ValueError: `rows` and `hots` have different lengths, or `bottom` does not end with `dim`.
    """

    rows: tuple[int, ...]
    hots: tuple[int, ...]
    dim: int = 128
    dense_features: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    cross_layers: int = 3
    cross_rank: int = 512
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    batch_size: int = 65_536
    learning_rate: float = 0.005
    epsilon: float = 1e-8
    initial_accumulator: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.hots):
            raise ValueError(f"hots: expected {len(self.rows)} as in rows, got {len(self.hots)}")
        if self.bottom[-1] != self.dim:
            raise ValueError(f"bottom: expected {self.dim}, the dim, last, got {self.bottom}")

    def scaled(
        self,
        scale: float,
        *,
        dim: int | None = None,
        most_hot: int | None = None,
        network: float = 1.0,
        seed: int | None = None,
    ):
        """Return the workload with fewer rows, optionally with smaller vectors, bags and layers.

        Args:
          scale: the factor of the rows, in (0, 1]; a table keeps at least 4 rows, or all it has.
          dim: another D, which is also the last output size of the bottom network.
          most_hot: longer bags are cut to this length.
          network: the factor of hidden layer sizes and of the cross rank, in (0, 1].
          seed: another seed.

        Raises:
          ValueError: a factor is outside of (0, 1], or a size is below 1.
        """
        for name, factor in {"scale": scale, "network": network}.items():
            if not 0 < factor <= 1:
                raise ValueError(f"{name}: expected 0 < {name} <= 1, got {factor}")
        for name, size in {"dim": dim, "most_hot": most_hot}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}: expected {name} >= 1, got {size}")
        dim = dim or self.dim

        def hidden(*sizes: int) -> tuple[int, ...]:
            return tuple(max(1, round(size * network)) for size in sizes)

        return dataclasses.replace(
            self,
            rows=tuple(min(v, max(LEAST_ROWS, round(v * scale))) for v in self.rows),
            hots=tuple(min(h, most_hot or h) for h in self.hots),
            dim=dim,
            bottom=(*hidden(*self.bottom[:-1]), dim),
            cross_rank=hidden(self.cross_rank)[0],
            top=(*hidden(*self.top[:-1]), 1),
            seed=self.seed if seed is None else seed,
        )


# fmt: off
CONFIG = DlrmConfig(
    rows=(
        40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
        405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
        12_973, 108, 36,
    ),
    hots=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
# fmt: on


def workload(config=CONFIG):
    """Return feature configs, the optimizer and the shapes of a batch, for the planner."""
    features, batch = {}, {}
    for number, (rows, hot) in enumerate(zip(config.rows, config.hots, strict=True)):
        name = f"t{number:02d}"
        table = tpu_embed.TableConfig(rows, config.dim, combiner="sum", name=name, placement="auto")
        features[name] = tpu_embed.FeatureConfig(table)
        batch[name] = jax.ShapeDtypeStruct((config.batch_size, hot), np.int32)
    return features, tpu_embed.optimizers.Adagrad(config.learning_rate), batch
