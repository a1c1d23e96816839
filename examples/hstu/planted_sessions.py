"""Predict the next event of made-up sessions, for which the best possible score is known.

HSTU is trained with and without times. A history is drawn for one step alone, so nothing can be
learned by heart. Scores are NDCG@10, relative to that of the true probabilities.
"""

from __future__ import annotations

import time
from pathlib import Path

import beside  # noqa: F401

# isort: split
import matplotlib.pyplot as plt
import numpy as np
import settings
from flax import nnx
from model import Hstu, Learner
from sessions import Sessions, expected_ndcg

TOP = 10


def train(name: str, config, buckets: int) -> list[tuple[int, float]]:
    """Train one model; return how many steps it had at each point, and its relative score."""
    sessions = Sessions(items=config.items, longest=config.longest)
    *test, chances = sessions.draw(np.random.default_rng([config.seed, 1]), config.tested)
    best, rng = expected_ndcg(chances, chances, TOP), np.random.default_rng(config.seed)
    network = Hstu(config, nnx.Rngs(config.seed), buckets)
    learner = Learner(config, config.items, network, config.steps)
    curve, losses, begin = [], [], time.perf_counter()
    for step in range(1, config.steps + 1):
        rows, *known, _ = sessions.draw(rng, config.batch_size)
        losses.append(learner.learn(learner.engine.place(learner.features(rows)), *known))
        if step % config.every == 0:
            ndcg = expected_ndcg(learner.predict(*test), chances, TOP)
            curve.append((step, ndcg / best))
            loss, seconds = np.mean(losses[-config.every :]), time.perf_counter() - begin
            print(
                f"{name}  step {step}  loss {loss:.4f}  NDCG@{TOP} {ndcg:.4f},"
                f" {ndcg / best:.4f} of {best:.4f}  {seconds:.0f} s",
                flush=True,
            )
    return curve


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw the score of each model, relative to what can be attained."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("o-", "s--"), strict=True):
        axes.plot(*zip(*curve, strict=True), style, markersize=4, label=name)
    axes.axhline(1, color="black", linestyle=":", label="true probabilities")
    title = "Sessions in which order and time matter"
    axes.set(xlabel="steps", ylabel=f"NDCG@{TOP}, relative", title=title)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = settings.parser(__doc__, "hstu_sessions.py")
    options.add_argument("--steps", type=int, help="instead of the config's")
    options.add_argument("--plot", type=Path, default="build/hstu_sessions.png", help="drawn last")
    args, config = settings.read(options)
    kinds = {"with times": config.buckets, "without times": 0}
    curves = {name: train(name, config, buckets) for name, buckets in kinds.items()}
    draw(curves, args.plot)
    print(f"the curves are in {args.plot}")


if __name__ == "__main__":
    main()
