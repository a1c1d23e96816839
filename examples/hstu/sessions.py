"""Made-up histories in which order and time matter, and what can be known about the next event.

Events come in sessions: the next one a unit of time later, or after a break. With a probability of
`follow`, the next item is the one that follows the last item in a fixed permutation. With one of
`again`, an old interest comes back: one of the events of PERIOD to 2 · PERIOD - 1 units ago, each
as likely as any other. Otherwise, or where there was no event at that time, any item is as likely.
Between two visits of an interest there are now few events and now many, so that positions alone do
not find it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

PERIOD = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sessions:
    """A model from which histories are drawn.

    Args:
      items: V.
      longest: L, the most events of a history; their number is lognormal, with a mean of L / 4.
      follow, again: probabilities.
      pause: the probability that a session ends.
    """

    items: int
    longest: int
    follow: float = 0.3
    again: float = 0.5
    pause: float = 0.5

    def follower(self) -> np.ndarray:
        """Return the item that follows each item, int [V]."""
        return np.random.default_rng(12).permutation(self.items)

    def chances(self, items: np.ndarray, times: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Return the probability of each next item, float64 [B, V].

        Args:
          items: int [B, t], the events until now.
          times: int [B, t], when they were.
          asked: int [B], when the next event is.
        """
        rows, elapsed = np.arange(len(items)), asked[:, None] - times
        back = (elapsed >= PERIOD) & (elapsed < 2 * PERIOD)
        shares = self.again * back / np.maximum(back.sum(1, keepdims=True), 1)
        chances = np.zeros((len(items), self.items))
        np.add.at(chances, (rows[:, None], items), shares)
        chances[rows, self.follower()[items[:, -1]]] += self.follow
        return chances + (1 - chances.sum(1, keepdims=True)) / self.items

    def draw(self, rng, histories: int) -> tuple[list, list, list, np.ndarray]:
        """Return items, times and times asked for of each history, and what is known of its next.

        Returns:
          items, times, asked: lists of int arrays, one number per event; what is asked for is when
            the event after it is.
          chances: float64 [histories, V], of the event after the last.
        """
        lengths = rng.lognormal(np.log(self.longest / 4) - 0.5, 1, histories)
        lengths = np.clip(lengths.astype(int), 2, self.longest)
        shape = histories, lengths.max() + 1
        ends = rng.random(shape) < self.pause
        gaps = np.where(ends, rng.integers(PERIOD // 4, 5 * PERIOD // 4, shape), 1)
        times = np.cumsum(gaps, axis=1)
        items = np.zeros(shape, int)
        items[:, 0] = rng.integers(self.items, size=histories)
        known = np.zeros((histories, self.items))
        for t in range(1, shape[1]):
            chances = self.chances(items[:, :t], times[:, :t], times[:, t])
            known[lengths == t] = chances[lengths == t]
            reached = chances.cumsum(1) > rng.random((histories, 1)) * (1 - 1e-9)
            items[:, t] = reached.argmax(1)
        pairs = list(enumerate(lengths))
        return (
            [items[e, :n] for e, n in pairs],
            [times[e, :n] for e, n in pairs],
            [times[e, 1 : n + 1] for e, n in pairs],
            known,
        )


def expected_ndcg(scores: np.ndarray, chances: np.ndarray, top: int) -> float:
    """Return the mean NDCG of the best `top` items if the next item is drawn by its chances.

    The item at place k, counted from 0, gains 1 / log2(k + 2). With `scores` equal to `chances` no
    model can have more.
    """
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    gains = 1 / np.log2(np.arange(min(top, scores.shape[1])) + 2)
    return float((np.take_along_axis(chances, best, axis=1) @ gains).mean())
