"""Learn from a stream of clicks on items that are born and die, named by strings.

A dynamic vocabulary gives an item a row when it has been shown often enough, and later gives the
row to another item. A second model learns from the same clicks with what is usual today: a fixed
table of as many rows, onto which the names are hashed, so that items share rows, alive or dead.
Each batch is scored before it is trained on (progressive validation), so no score knows its click.

Why `evict="lru"`: a dead item is not shown again, so the item not seen for longest goes first. With
"lfu", items that were popular once would keep their rows for good. Why `admit_after=2`: there are
more items than rows, and many are shown once in a long time. Those take no row from another item.
"""

from __future__ import annotations

import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import settings
from stream_data import Impressions, Stream
from stream_model import Learner

from tpu_embed import DynamicVocabulary
from tpu_embed.metrics import auc, counters

EVENTS = ("admitted", "evicted", "unseen")


class Validation:
    """The clicks, their true probabilities, and the scores of each learner before its training.

    Args:
      learners: by name.
    """

    def __init__(self, learners: dict[str, Learner]) -> None:
        self._learners, self._clicks = learners, []
        self._scores = {name: [] for name in (*learners, "true probabilities")}

    def add(self, batch: Impressions) -> None:
        """Let all learners score a batch, and then train on it."""
        self._clicks.append(batch.click)
        self._scores["true probabilities"].append(batch.probability)
        for name, learner in self._learners.items():
            self._scores[name].append(learner.learn(batch))

    def areas(self, batches: int) -> dict[str, float]:
        """Return the AUC of the scores of the last batches, by name."""
        click = np.concatenate(self._clicks[-batches:])
        last = {name: np.concatenate(scores[-batches:]) for name, scores in self._scores.items()}
        return {name: float(auc(scores, click)) for name, scores in last.items()}


def events(learner: Learner) -> np.ndarray:
    """Return how many items were admitted, evicted, and without a row, int [3], all batches."""
    counted = counters(learner.engine, learner.state)["vocabularies"]["items"]
    return np.array([counted[name] for name in EVENTS])


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{value:.5f} {name}" for name, value in values.items())


def draw(curves: dict[str, list[float]], totals: np.ndarray, window: int, path: Path) -> None:
    """Draw the AUC of each window, and below it the events per batch of `totals` [windows, 3]."""
    figure, (above, below) = plt.subplots(2, figsize=(6, 5.4), sharex=True, layout="constrained")
    batches = window * np.arange(1, len(totals) + 1)
    for (name, curve), style in zip(curves.items(), ("o-", "s-", "k--"), strict=True):
        above.plot(batches, curve, style, markersize=4, label=name)
    above.set(ylabel="AUC of progressive validation", title="Clicks on items that come and go")
    above.legend(loc="lower right", ncols=3)
    for name, total, style in zip(EVENTS, totals.T, ("-", ":", "--"), strict=True):
        below.plot(batches, np.diff(total, prepend=0) / window, style, label=name)
    below.set(xlabel="batches", ylabel="items per batch", ylim=(0, None))
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.parser(__doc__, "stream.py")
    options.add_argument("--plot", type=Path, default="build/stream.png", help="drawn at the end")
    options.add_argument("--admit-after", type=int, help="instead of the config's")
    options.add_argument("--evict", choices=("lru", "lfu", "none"), help="instead of the config's")
    args, config = settings.read(options)

    stream, begin = Stream(config), time.perf_counter()
    vocabulary = DynamicVocabulary(admit_after=config.admit_after, evict=config.evict)
    learners = {"living": Learner(config, vocabulary), "hashed": Learner(config, None)}
    for learner in learners.values():
        learner.check(stream.batch(0))
    print(f"{jax.device_count()} device(s), {len(stream)} items, {config.rows} rows")
    validation, points, totals = Validation(learners), [], []
    for number in range(1, config.batches + 1):
        validation.add(stream.batch(number - 1))
        if number % config.window == 0:
            points.append(validation.areas(config.window))
            totals.append(events(learners["living"]))
            counted = ", ".join(f"{n} {name}" for n, name in zip(totals[-1], EVENTS, strict=True))
            print(f"batch {number}  AUC {listed(points[-1])}  {counted}", flush=True)
    print(f"all batches  AUC {listed(validation.areas(config.batches))}")
    print(f"{time.perf_counter() - begin:.0f} s")
    curves = {name: [point[name] for point in points] for name in points[0]}
    draw(curves, np.array(totals), config.window, args.plot)
    print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()
