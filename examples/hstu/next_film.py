"""Predict the next film of each user of MovieLens-100K: HSTU beside the model of `sequences.py`.

HSTU knows when each film was rated and for when the next one is asked for; the other model knows
the order alone, and is trained by the numbers of `configs/sequences.py`. Held out is the last
rating of each user, as in `sequences.py`.
"""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import beside  # noqa: F401

# isort: split
import matplotlib.pyplot as plt
import movielens_data
import numpy as np
import ranking
import sequences_model
import settings
from flax import nnx
from model import Hstu, Learner, Windowed

from tpu_embed import metrics
from tpu_embed.data import Prefetcher

TOP = 10


class Histories:
    """Histories of items with the times of their events, and of the events after them.

    Args:
      data: the ratings.
      longest: L; longer histories are cut into several, elsewhere in each epoch.
    """

    def __init__(self, data, longest: int):
        self.longest, (train, test) = longest, ranking.leave_one_out(data)
        self.pairs = [(data.user[rows], data.item[rows]) for rows in (train, test)]
        ends = np.flatnonzero(np.diff(data.user[train])) + 1
        self.items = np.split(data.item[train], ends)
        whens = np.split(data.timestamp[train], ends)
        self.times = [when - when[0] for when in whens]
        last = zip(whens, data.timestamp[test], strict=True)
        self.asked = [np.append(when[1:], after) - when[0] for when, after in last]

    def pieces(self, rng) -> list[tuple[np.ndarray, ...]]:
        """Return items, times and times asked for of each piece."""
        found = []
        for columns in zip(self.items, self.times, self.asked, strict=True):
            places = np.arange(len(columns[0]))
            cut = sequences_model.pieces([places], self.longest, rng)
            found += [tuple(column[piece] for column in columns) for piece in cut]
        return found

    def newest(self) -> tuple[list, list, list]:
        """Return the last L events of each user."""
        columns = self.items, self.times, self.asked
        items, times, asked = ([row[-self.longest :] for row in column] for column in columns)
        return items, times, asked

    def measure(self, scores: np.ndarray) -> tuple[float, float]:
        """Return recall and NDCG of the held-out items, of scores [users, items]."""
        (train, test), unseen = self.pairs, scores.copy()
        unseen[train] = -np.inf
        best = np.argsort(-unseen, axis=1, kind="stable")[:, :TOP]
        held_out = ranking.by_user(*test, len(scores))
        found = metrics.recall_at_k(best, held_out), metrics.ndcg_at_k(best, held_out)
        return float(found[0]), float(found[1])


def train(name: str, config, data) -> list[float]:
    """Train one model; return its NDCG after every epoch."""
    histories, items = Histories(data, config.longest), len(data.decade)
    rng, rngs = np.random.default_rng(config.seed), nnx.Rngs(config.seed)
    network = Hstu(config, rngs, config.buckets) if name == "HSTU" else Windowed(config, rngs)
    per_epoch = len(histories.pieces(rng)) // config.batch_size
    learner = Learner(config, items, network, config.epochs * per_epoch)

    def batches():
        cut = histories.pieces(rng)
        order = rng.permutation(len(cut))
        for start in range(0, len(cut) - config.batch_size + 1, config.batch_size):
            chosen = [cut[i] for i in order[start : start + config.batch_size]]
            rows, times, asked = zip(*chosen, strict=True)
            yield learner.features(rows), times, asked

    curve = []
    for epoch in range(1, config.epochs + 1):
        begin = time.perf_counter()
        losses = [learner.learn(*batch) for batch in Prefetcher(learner.engine, batches())]
        recall, ndcg = histories.measure(learner.predict(*histories.newest()))
        curve.append(ndcg)
        seconds = time.perf_counter() - begin
        print(
            f"{name}  seed {config.seed}  epoch {epoch:2d}  loss {np.mean(losses):.4f}"
            f"  recall@{TOP} {recall:.4f}  NDCG@{TOP} {ndcg:.4f}  {seconds:.1f} s",
            flush=True,
        )
    return curve


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Draw the mean and the range of the curves `[seeds, epochs]` of each model."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("o-", "s--"), strict=True):
        epochs = 1 + np.arange(curve.shape[1])
        axes.plot(epochs, curve.mean(0), style, markersize=4, label=name)
        axes.fill_between(epochs, curve.min(0), curve.max(0), alpha=0.2)
    axes.set(xlabel="epochs", ylabel=f"NDCG@{TOP}", title="The next film of MovieLens-100K")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.movielens_parser(__doc__, "hstu.py")
    options.add_argument("--seeds", type=int, default=3, help="runs of each model")
    options.add_argument("--plot", type=Path, default="build/hstu.png", help="drawn at the end")
    before = "leave the last ratings out, and hold out those before, to choose a config by"
    options.add_argument("--validate", action="store_true", help=before)
    args, config = settings.read(options)
    data, curves = movielens_data.load(args.data), {}
    if args.validate:
        data = data.only(ranking.leave_one_out(data)[0])
    seeds = range(config.seed, config.seed + args.seeds)
    other = runpy.run_path(str(settings.CONFIGS / "sequences.py"))
    if args.epochs:
        other["epochs"] = args.epochs
    for name, numbers in (("HSTU", vars(config)), ("sequences.py", other | {"bias_rate": 1})):
        runs = [SimpleNamespace(**numbers | {"seed": seed}) for seed in seeds]
        curves[name] = np.array([train(name, run, data) for run in runs])
        last = curves[name][:, -1]
        print(f"{name}: NDCG@{TOP} {last.mean():.4f}, standard deviation {last.std():.4f}")
    draw(curves, args.plot)
    print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()
