"""Train DLRMv4's ranker day by day on a log in the order of the clock, as MLPerf's workload asks.

Before the requests of a day are trained on, they are scored: each figure is of the next day, by a
model that has seen nothing of it. Tastes drift, so it never stops learning.

A checkpoint holds tables, network, both optimizers and the number of requests trained on. Started
again with the same --checkpoints after it was killed, the program goes on with the bits of a run
that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside  # noqa: F401, finds the modules that examples share
import dlrm_v4
import jax
import matplotlib.pyplot as plt
import numpy as np
import settings
from day_batches import BLOCKS, batches, known
from drifting_log import Day, Log

import tpu_embed
from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager
from tpu_embed.metrics import auc, normalized_entropy


class Training:
    """A run that can be stopped after any step, and goes on where its last checkpoint stands.

    Args:
      config: the numbers of `configs/days.py`.
      directory: of the checkpoints.
    """

    def __init__(self, config, directory: Path) -> None:
        self.config, self.log = config, Log(config)
        features = dlrm_v4.feature_config(config, "mod")
        optimizer = dlrm_v4.table_optimizer(config)
        self.engine = tpu_embed.EmbeddingEngine(features, optimizer, sum_blocks=BLOCKS)
        self.dense = dlrm_v4.network_optimizer(config)
        self.graph, params = dlrm_v4.new_network(config)
        self.step = dlrm_v4.make_step(config, self.engine, self.dense, self.graph)
        self.score = dlrm_v4.make_score(config, self.engine, self.graph)
        self.saves = CheckpointManager(directory, self.engine, every=config.every, keep=2)
        self.position: dict[str, Any] = {"samples": 0}
        network = params, self.dense.init(params)
        if self.saves.latest_step() is None:
            state = self.engine.init(jax.random.key(config.seed))
        else:
            found = self.saves.restore(model=network)
            state, network, self.position = found.state, found.model, found.position
        self.trained = (state, *jax.device_put(network, state.step.sharding))

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the number and the figures of each day that is left, then train on that day.

        A day that was begun before the run was stopped is trained on to its end, but not scored.
        Days before `config.first_day` only fill the histories, as the workload begins late, too.
        """
        of_day = self.config.requests // self.config.batch_size  # batches
        first, done = divmod(self.position["samples"] // self.config.batch_size, of_day)
        for number in range(self.config.first_day + first, self.config.days):
            day = self.log.day(number)
            if not done:
                yield number, self.evaluate(day)
            self.train(day, done)
            done = 0
        self.saves.close()

    def train(self, day: Day, done: int) -> None:
        """Train on a day but for its first batches, and save from time to time."""
        with Prefetcher(self.engine, batches(self.config, self.log, day)) as placed:
            # Beside the batches that were taken, `data` has the room that they were given.
            placed.set_state(self.position.get("data", {}) | {"batches": done})
            for batch, chosen in placed:
                others = known(self.engine, batch, self.log, chosen)
                self.trained, loss = self.step(self.trained, batch, others)
                loss.block_until_ready()  # many unfinished steps can stop emulated devices
                samples = self.position["samples"] + len(chosen.order)
                self.position = {"samples": samples, "data": placed.get_state()}
                state, *network = self.trained
                step = samples // self.config.batch_size
                self.saves.save(step, state, model=tuple(network), position=self.position)

    def evaluate(self, day: Day) -> dict[str, float]:
        """Return figures of the scores of a day, and those of its true probabilities."""
        state, params, _ = self.trained
        logits, labels, truth = [], [], []
        source = batches(self.config, self.log, day)
        with Prefetcher(self.engine, source, training=False) as placed:
            for batch, chosen in placed:
                others = known(self.engine, batch, self.log, chosen)
                scores = others["labels"].with_values(self.score(state, params, batch, others))
                logits += scores.to_list()
                labels.append(day.listened[chosen.order].reshape(-1))
                truth.append(day.probability[chosen.order].reshape(-1))
        score, label, probability = map(np.concatenate, (logits, labels, truth))
        best = np.log(probability / (1 - probability)).astype(np.float32)
        return {
            "AUC": float(auc(score, label)),
            "best AUC": float(auc(best, label)),
            "normalized entropy": float(normalized_entropy(score, label)),
            "best normalized entropy": float(normalized_entropy(best, label)),
        }


def draw(figures: list[tuple[int, dict[str, float]]], path: Path) -> None:
    """Draw the AUC of each day, and that of the true probabilities."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    days = [number for number, _ in figures]
    axes.plot(
        days, [found["AUC"] for _, found in figures], "o-", label="trained until the day before"
    )
    axes.plot(days, [found["best AUC"] for _, found in figures], "k--", label="true probabilities")
    axes.set(xlabel="day", ylabel="AUC of the day", title="A ranker that follows drifting tastes")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.parser(__doc__, "days.py")
    options.add_argument("--checkpoints", type=Path, default="build/days", help="directory")
    options.add_argument("--plot", type=Path, default="build/days.png", help="drawn at the end")
    args, config = settings.read(options)
    training, begin, figures = Training(config, args.checkpoints), time.perf_counter(), []
    print(f"{jax.device_count()} device(s), from request {training.position['samples']} on")
    for number, found in training.run():
        figures.append((number, found))
        listed = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"day {number}: {listed}; {time.perf_counter() - begin:.0f} s", flush=True)
    if figures:
        draw(figures, args.plot)
        print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()
