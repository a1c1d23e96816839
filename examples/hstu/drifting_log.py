"""A made-up log of requests in the order of the clock; tastes drift, so yesterday's model ages.

A user is shown a few tracks per request and listens to each or skips it, by a logistic model of the
track's quality, its style, and the user's taste on that day. What was shown is part of the user's
history from then on. The true probabilities are known, so the attainable AUC is, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DAY = 86_400  # seconds
LISTENED, SKIPPED = 1, 4  # bits of an action


class Day(NamedTuple):
    """The requests of one day, R of them with `shown` candidates each."""

    user: np.ndarray  # int64 [R]
    asked: np.ndarray  # int32 [R], seconds from the beginning of the log
    item: np.ndarray  # int64 [R, shown]
    listened: np.ndarray  # float32 [R, shown], 1 or 0
    probability: np.ndarray  # float64 [R, shown], of listening
    history: np.ndarray  # int64, events of all histories, one after the other: places in `Log.item`
    splits: np.ndarray  # int64 [R + 1], where each history begins


class Log:
    """All requests; it depends on the config alone.

    Args:
      config: the numbers of `configs/days.py`.

    Attributes:
      artist, album: int64 [items], those of each track.
      item: int64 [E], the track of each event, in the order of the clock.
      action: int32 [E], bits.
      time: int32 [E], seconds.
    """

    def __init__(self, config) -> None:
        self._config, rng = config, np.random.default_rng(config.seed)
        rows, shown = config.rows, config.shown
        self.artist = rng.integers(rows["artist"], size=rows["item"])
        self.album = rng.integers(rows["album"], size=rows["item"])
        requests = config.days * config.requests
        self._user = self._draw_users(rng, requests)
        day = np.repeat(np.arange(config.days), config.requests)
        second = rng.integers(DAY, size=(config.days, config.requests))
        self._asked = (day * DAY + np.sort(second, axis=1).reshape(-1)).astype(np.int32)
        shares = np.cumsum(1 / (np.arange(rows["item"]) + config.flatness))
        drawn = rng.random((requests, shown)) * shares[-1]
        self._item = rng.permutation(rows["item"])[np.searchsorted(shares, drawn)]
        self._probability = self._probabilities(rng, day)
        self._listened = rng.random((requests, shown)) < self._probability
        self.item, self.time = self._item.reshape(-1), np.repeat(self._asked, shown)
        self.action = np.where(self._listened, LISTENED, SKIPPED).astype(np.int32).reshape(-1)
        # The requests of each user stand side by side in `_of_user`, in the order of the clock.
        self._of_user = np.argsort(self._user, kind="stable")
        self._place = np.empty(requests, np.int64)
        self._place[self._of_user] = np.arange(requests)
        counts = np.bincount(self._user, minlength=rows["user"])
        self._first = np.cumsum(counts) - counts

    def day(self, number: int) -> Day:
        """Return the requests of a day, from 0 on, with the newest events of each history."""
        config, shown = self._config, self._config.shown
        of_day = np.arange(number * config.requests, (number + 1) * config.requests)
        place, first = self._place[of_day], self._first[self._user[of_day]]
        kept = np.minimum(place - first, config.longest // shown)  # earlier requests, [R]
        splits = np.concatenate([[0], np.cumsum(kept * shown)])
        # A request at place 7 of `_of_user` that keeps 2 has the requests at the places 5 and 6.
        steps = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
        earlier = self._of_user[np.repeat(place - kept, kept) + steps]
        history = (earlier[:, None] * shown + np.arange(shown)).reshape(-1)
        arrays = self._user, self._asked, self._item, self._listened, self._probability
        user, asked, item, listened, probability = (array[of_day] for array in arrays)
        return Day(user, asked, item, listened.astype(np.float32), probability, history, splits)

    def _draw_users(self, rng: np.random.Generator, requests: int) -> np.ndarray:
        """Return the user of each request: some come much more often than others."""
        activity = rng.lognormal(sigma=1.0, size=self._config.rows["user"])
        shares = np.cumsum(activity)
        return np.searchsorted(shares, rng.random(requests) * shares[-1])

    def _probabilities(self, rng: np.random.Generator, day: np.ndarray) -> np.ndarray:
        """Return the probability that each candidate is listened to, `[requests, shown]`."""
        config, rows = self._config, self._config.rows
        of_artist = rng.normal(size=(rows["artist"], config.hidden))
        own = rng.normal(size=(rows["item"], config.hidden))
        style = (0.8 * of_artist[self.artist] + 0.6 * own) / config.hidden**0.5
        quality = config.quality * rng.normal(size=rows["item"])
        taste, found = rng.normal(size=(rows["user"], config.hidden)), []
        for number in range(config.days):
            here = day == number
            liking = np.einsum("rd,rcd->rc", taste[self._user[here]], style[self._item[here]])
            logit = quality[self._item[here]] + config.strength * liking
            found.append(1 / (1 + np.exp(-logit)))
            # A taste keeps its size, and is forgotten at the rate of `drift` a day.
            fresh = rng.normal(size=taste.shape)
            taste = (1 - config.drift) ** 0.5 * taste + config.drift**0.5 * fresh
        return np.concatenate(found)
