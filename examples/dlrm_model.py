"""The DLRM-DCNv2 model: tables looked up by bags, a network with low-rank crosses, loss and AUC.

`feature_config` declares the tables. `Dlrm` maps their activations and the dense features to one
logit per example. `Auc` collects logits over batches, also inside a jitted step.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tpu_embed import FeatureConfig, TableConfig

BINS, LIMIT = 2**16, 16.0  # of `Auc`: logits in [-16, 16], each bin 1/2048 wide


def table_names(count: int) -> list[str]:
    """Return names whose sorted order is the order of the tables."""
    return [f"t{number:02d}" for number in range(count)]


def feature_config(config) -> dict[str, FeatureConfig]:
    """Return one feature per table: a bag of ids, summed; rows start uniform in ±1/√V."""

    def feature(name: str, rows: int) -> FeatureConfig:
        limit = rows**-0.5
        uniform = functools.partial(jax.random.uniform, minval=-limit, maxval=limit)
        table = TableConfig(rows, config.dim, initializer=uniform, combiner="sum", name=name)
        return FeatureConfig(table)

    names = table_names(len(config.rows))
    return {name: feature(name, rows) for name, rows in zip(names, config.rows, strict=True)}


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, use_bias: bool = True) -> nnx.Linear:
    glorot = nnx.initializers.glorot_normal()
    return nnx.Linear(inputs, outputs, kernel_init=glorot, use_bias=use_bias, rngs=rngs)


def _layers(inputs: int, outputs: tuple[int, ...], rngs: nnx.Rngs) -> list:
    """Return linear layers with a ReLU after each."""
    sizes = zip((inputs, *outputs[:-1]), outputs, strict=True)
    return [layer for size in sizes for layer in (_linear(*size, rngs), nnx.relu)]


class Cross(nnx.Module):
    """Map x₀ and x, both [B, n], to x₀ (W V x + b) + x, where V has `rank` rows.

    Reference:
      Wang et al., "DCN V2: improved deep & cross network and practical lessons for web-scale
      learning to rank systems", 2021.
    """

    def __init__(self, width: int, rank: int, *, rngs: nnx.Rngs):
        self.down = _linear(width, rank, rngs, use_bias=False)
        self.up = _linear(rank, width, rngs)

    def __call__(self, x0: jax.Array, x: jax.Array) -> jax.Array:
        return x0 * self.up(self.down(x)) + x


class Dlrm(nnx.Module):
    """Map the dense features and the activations of each example to one logit."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width = config.dim * (1 + len(config.rows))
        self.bottom = nnx.Sequential(*_layers(config.dense_features, config.bottom, rngs))
        crosses = [Cross(width, config.cross_rank, rngs=rngs) for _ in range(config.cross_layers)]
        self.crosses = nnx.List(crosses)
        self.top = nnx.Sequential(*_layers(width, config.top, rngs)[:-1])  # no ReLU at the end

    def __call__(self, dense: jax.Array, activations: dict[str, jax.Array]) -> jax.Array:
        """Return logits [B] of `dense` float32 [B, 13] and `activations` [B, D] by table name."""
        vectors = [activations[name] for name in sorted(activations)]
        x0 = x = jnp.concatenate([self.bottom(dense), *vectors], axis=-1)
        for cross in self.crosses:
            x = cross(x0, x)
        return self.top(x)[:, 0]


def parameter_count(module: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Return the mean sigmoid cross entropy over examples whose label is not padding (-1)."""
    real = label >= 0
    each = jnp.where(real, optax.sigmoid_binary_cross_entropy(logits, label), 0.0)
    return each.sum() / jnp.maximum(real.sum(), 1).astype(each.dtype)


class Auc(NamedTuple):
    """Histograms of the logits seen so far, from which the AUC is computed; counts go to 2³² - 1.

    The area under the ROC curve (AUC) is the fraction of pairs (a click, no click) that the logits
    order correctly. Pairs in different bins count exactly. Pairs in the same bin count half, so the
    value is off by at most half of their fraction, which `value` also returns.
    """

    clicks: jax.Array  # uint32 [bins]
    others: jax.Array  # uint32 [bins]
    nans: jax.Array  # uint32 scalar

    @classmethod
    def empty(cls, bins: int = BINS) -> Auc:
        """Return empty histograms."""
        counts = jnp.zeros(bins, jnp.uint32)
        return cls(counts, counts.copy(), jnp.zeros((), jnp.uint32))

    def add(self, logits: jax.Array, label: jax.Array) -> Auc:
        """Return the histograms with one more batch: logits and labels [B]; label -1 is padding."""
        nan, bins = jnp.isnan(logits), self.clicks.size
        logits = jnp.where(nan, 0.0, jnp.clip(logits, -LIMIT, LIMIT))
        place = jnp.floor((logits + LIMIT) * (bins / (2 * LIMIT))).astype(jnp.int32)
        place = jnp.minimum(place, bins - 1)

        def counted(which: jax.Array) -> jax.Array:
            return which.astype(jnp.uint32)

        return Auc(
            self.clicks.at[place].add(counted((label == 1) & ~nan)),
            self.others.at[place].add(counted((label == 0) & ~nan)),
            self.nans + counted((label >= 0) & nan).sum(dtype=jnp.uint32),
        )

    def value(self) -> tuple[float, float]:
        """Return the AUC, and the most that it can be off by.

        Raises:
          ValueError: logits were NaN, or all labels are alike.
        """
        clicks, others = (np.asarray(a, np.float64) for a in (self.clicks, self.others))
        pairs = clicks.sum() * others.sum()
        if int(self.nans) or not pairs:
            seen = f"{clicks.sum():.0f} clicks, {others.sum():.0f} others, {self.nans} NaN logits"
            raise ValueError(f"AUC: expected numbers, and labels of both kinds, got {seen}")
        in_one_bin = (clicks * others).sum() / 2
        # a click orders correctly all non-clicks in lower bins: cumsum without its own bin
        in_order = (clicks * (np.cumsum(others) - others)).sum()
        return float((in_order + in_one_bin) / pairs), float(in_one_bin / pairs)
