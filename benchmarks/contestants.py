"""The libraries that `embedding.py` compares, one class each, with equal tables, ids and targets.

A contestant has `forward(i)` (the activations of batch i), `step(i)` (lookup, gradient, update) and
`rows(t)` (table t as NumPy array). The loss is half the squared distance to a target, so the
gradient is the activation minus the target, the least work that a model can add.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np

LEARNING_RATE = 0.05
FIRST_ACCUMULATOR = 0.1
BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the results.

    Args:
      rows: V of every table.
      dim: D.
      hot: ids per sample and table.
      tables: the number of tables.
      ids: "uniform" or "zipf" (exponent 1.2).
      optimizer: "sgd", "adagrad" or "adam".
    """

    rows: int
    dim: int
    hot: int
    tables: int
    ids: str
    optimizer: str

    @property
    def slots(self) -> int:
        """The number of slots per row, each as long as the row."""
        return {"sgd": 0, "adagrad": 1, "adam": 2}[self.optimizer]

    @property
    def table_bytes(self) -> int:
        """The bytes of all tables, without slots."""
        return self.rows * self.dim * self.tables * 4


class Data:
    """Start tables, batches of ids and targets of a cell.

    Args:
      cell: the cell.
      batch: B.
    """

    def __init__(self, cell: Cell, batch: int) -> None:
        rng = np.random.default_rng(0)
        self.cell, self.batch = cell, batch
        shape = (BATCHES, cell.tables, batch, cell.hot)
        if cell.ids == "zipf":
            ids = (rng.zipf(1.2, shape) - 1) % cell.rows
        else:
            ids = rng.integers(0, cell.rows, shape)
        self.ids = ids.astype(np.int32)
        self.targets = rng.standard_normal((cell.tables, batch, cell.dim), dtype=np.float32)

    def start(self, t: int) -> np.ndarray:
        """Return the first rows of table t, float32 `[V, D]`."""
        rng = np.random.default_rng(t + 1)
        return rng.random((self.cell.rows, self.cell.dim), np.float32) * 0.2 - 0.1


class Ours:
    """tpu_embed; `kernels` is "native" or "reference", `options` are the engine's."""

    def __init__(self, data: Data, kernels: str, **options: Any) -> None:
        import jax

        import tpu_embed
        from tpu_embed import optimizers

        cell = data.cell
        optimizer = {
            "sgd": optimizers.SGD(LEARNING_RATE),
            "adagrad": optimizers.Adagrad(LEARNING_RATE, epsilon=1e-8),
            "adam": optimizers.Adam(LEARNING_RATE, epsilon=1e-3, sum_inside_sqrt=False),
        }[cell.optimizer]
        self.names = [f"t{t:02d}" for t in range(cell.tables)]

        def table(t: int) -> tpu_embed.TableConfig:
            def first_rows(key: Any, shape: Any, dtype: Any, shard_info: Any) -> Any:
                return jax.pure_callback(
                    lambda rows: data.start(t)[rows],
                    jax.ShapeDtypeStruct(shape, dtype),
                    shard_info.rows,
                )

            sizes = (cell.rows, cell.dim)
            return tpu_embed.TableConfig(
                *sizes, initializer=first_rows, name=self.names[t], combiner="sum"
            )

        features = {n: tpu_embed.FeatureConfig(table(t)) for t, n in enumerate(self.names)}
        self.engine = engine = tpu_embed.EmbeddingEngine(features, optimizer, **options)
        # Wait for the state: its callbacks need the GIL, which another dispatch might hold.
        self.state = jax.block_until_ready(engine.init(jax.random.key(0)))
        batches = [dict(zip(self.names, ids, strict=True)) for ids in data.ids]
        spec = tpu_embed.BatchSpec.union(*(engine.place(ids).spec for ids in batches))
        self.batches = [engine.place(ids, spec=spec) for ids in batches]
        sharding = engine.layout.axes.sharding(engine.layout.axes.batch_axes)
        targets = dict(zip(self.names, data.targets, strict=True))
        self.targets = jax.device_put(targets, sharding)
        self._trace(kernels)

    def _trace(self, kernels: str) -> None:
        import jax

        engine = self.engine

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: Any, targets: Any) -> Any:
            activations = engine.lookup(state, batch)
            gradients = jax.tree.map(jax.numpy.subtract, activations, targets)
            return engine.update(state, batch, gradients)

        # A function chooses its kernels when it is traced, which is at its first call.
        self._lookup, self._step = jax.jit(engine.lookup), step
        before = os.environ.get("TPU_EMBED_KERNELS")
        os.environ["TPU_EMBED_KERNELS"] = kernels
        self._lookup.lower(self.state, self.batches[0])
        self._step.lower(self.state, self.batches[0], self.targets)
        os.environ.pop("TPU_EMBED_KERNELS")
        if before is not None:
            os.environ["TPU_EMBED_KERNELS"] = before

    def forward(self, i: int) -> None:
        import jax

        jax.block_until_ready(self._lookup(self.state, self.batches[i]))

    def step(self, i: int) -> None:
        import jax

        self.state = self._step(self.state, self.batches[i], self.targets)
        jax.block_until_ready(self.state)

    def rows(self, t: int) -> np.ndarray:
        return np.asarray(self.engine.tables(self.state)[self.names[t]])


class Flax:
    """flax `nnx.Embed` and optax as most people use them, with dense gradients."""

    def __init__(self, data: Data) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        cell = data.cell

        class Model(nnx.Module):
            def __init__(self) -> None:
                rngs = nnx.Rngs(0)
                embeds = []
                for t in range(cell.tables):
                    embed = nnx.Embed(cell.rows, cell.dim, rngs=rngs)
                    embed.embedding.value = jnp.asarray(data.start(t))
                    embeds.append(embed)
                self.embeds = nnx.List(embeds)

            def __call__(self, ids: Any) -> list[Any]:
                return [embed(i).sum(1) for embed, i in zip(self.embeds, ids, strict=True)]

        rule = {
            "sgd": optax.sgd(LEARNING_RATE),
            "adagrad": optax.adagrad(LEARNING_RATE, FIRST_ACCUMULATOR, 1e-12),
            # optax adds epsilon after the bias correction of the root, so it is scaled here. Both
            # are equal at the first step, the one that is compared.
            "adam": optax.adam(LEARNING_RATE, eps=1e-3 / 0.001**0.5),
        }[cell.optimizer]
        graph, self.params = nnx.split(Model(), nnx.Param)
        self.opt_state = rule.init(self.params)
        self.ids = [jnp.asarray(ids) for ids in data.ids]
        self.targets = jnp.asarray(data.targets)

        def loss(params: Any, ids: Any) -> Any:
            found = nnx.merge(graph, params)(ids)
            return sum(0.5 * ((a - t) ** 2).sum() for a, t in zip(found, self.targets, strict=True))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, opt_state: Any, ids: Any) -> Any:
            updates, opt_state = rule.update(jax.grad(loss)(params, ids), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._forward = jax.jit(lambda params, ids: nnx.merge(graph, params)(ids))
        self._step = step

    def forward(self, i: int) -> None:
        import jax

        jax.block_until_ready(self._forward(self.params, self.ids[i]))

    def step(self, i: int) -> None:
        import jax

        self.params, self.opt_state = self._step(self.params, self.opt_state, self.ids[i])
        jax.block_until_ready(self.params)

    def rows(self, t: int) -> np.ndarray:
        return np.asarray(self.params["embeds"][t]["embedding"].value)


class Torch:
    """torch `EmbeddingBag(sparse=True)` with the optimizers of torch."""

    def __init__(self, data: Data) -> None:
        import torch

        cell, bag = data.cell, torch.nn.EmbeddingBag
        self.torch = torch
        weights = [torch.from_numpy(data.start(t)) for t in range(cell.tables)]
        self.bags = [
            bag(cell.rows, cell.dim, mode="sum", sparse=True, _weight=weight) for weight in weights
        ]
        parameters = [b.weight for b in self.bags]
        self.optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            "adagrad": lambda: torch.optim.Adagrad(
                parameters, LEARNING_RATE, initial_accumulator_value=FIRST_ACCUMULATOR, eps=1e-8
            ),
            "adam": lambda: torch.optim.SparseAdam(parameters, LEARNING_RATE, eps=1e-3),
        }[cell.optimizer]()
        self.ids = [[torch.from_numpy(i.astype(np.int64)) for i in ids] for ids in data.ids]
        self.targets = [torch.from_numpy(target) for target in data.targets]

    def _lookup(self, i: int) -> list[Any]:
        return [bag(ids) for bag, ids in zip(self.bags, self.ids[i], strict=True)]

    def forward(self, i: int) -> None:
        with self.torch.no_grad():
            self._lookup(i)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        found = self._lookup(i)
        with self.torch.no_grad():
            gradients = [a - t for a, t in zip(found, self.targets, strict=True)]
        self.torch.autograd.backward(found, gradients)
        self.optimizer.step()

    def rows(self, t: int) -> np.ndarray:
        return self.bags[t].weight.detach().numpy()


class Fbgemm:
    """FBGEMM's table-batched embedding on CPU, which fuses the update into the backward pass."""

    def __init__(self, data: Data) -> None:
        import fbgemm_gpu  # noqa: F401  (registers the operators)
        import torch
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cell, batch = data.cell, data.batch
        rule = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.torch = torch
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(cell.rows, cell.dim, *place)] * cell.tables,
            optimizer=rule[cell.optimizer],
            learning_rate=LEARNING_RATE,
            eps=1e-8,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            device="cpu",
        )
        for t, weight in enumerate(self.module.split_embedding_weights()):
            weight.data.copy_(torch.from_numpy(data.start(t)))
        if cell.optimizer == "adagrad":
            for (accumulator,) in self.module.split_optimizer_states():
                accumulator.fill_(FIRST_ACCUMULATOR)
        self.ids = [torch.from_numpy(ids.reshape(-1).astype(np.int64)) for ids in data.ids]
        self.offsets = torch.arange(0, cell.tables * batch * cell.hot + 1, cell.hot)
        targets = data.targets.transpose(1, 0, 2).reshape(batch, -1)
        self.targets = torch.from_numpy(np.ascontiguousarray(targets))

    def _lookup(self, i: int) -> Any:
        return self.module(indices=self.ids[i], offsets=self.offsets)

    def forward(self, i: int) -> None:
        with self.torch.no_grad():
            self._lookup(i)

    def step(self, i: int) -> None:
        found = self._lookup(i)
        with self.torch.no_grad():
            gradient = found - self.targets
        found.backward(gradient)

    def rows(self, t: int) -> np.ndarray:
        return self.module.split_embedding_weights()[t].detach().numpy()
