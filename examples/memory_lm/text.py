"""Text as numbers of characters, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tpu_embed import ngram_ids


class Text:
    """A text of which the first nine tenths are trained on; the rest is held out.

    Args:
      text: all of it.
      config: the numbers of `configs/memory_lm.py`.
      with_memory: whether batches have the ids of n-grams.
    """

    def __init__(self, text: str, config, *, with_memory: bool) -> None:
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        tokens = np.array([number[character] for character in text], np.int32)
        self.config, self.with_memory = config, with_memory
        self.train, self.held_out = np.split(tokens, [int(0.9 * len(tokens))])

    @classmethod
    def read(cls, path: Path, config, **options) -> Text:
        """Read a file of UTF-8."""
        return cls(path.read_text(encoding="utf-8"), config, **options)

    def batches(self) -> Iterator[tuple[dict, np.ndarray]]:
        """Yield blocks from anywhere in the text, the same ones each time, and their labels."""
        rng = np.random.default_rng(self.config.seed)
        for _ in range(self.config.steps):
            last = len(self.train) - self.config.block
            yield self._batch(self.train, rng.integers(0, last, self.config.batch_size))

    def evaluation(self) -> Iterator[tuple[dict, np.ndarray]]:
        """Yield the held-out text, block after block; the end that makes no batch is left out."""
        config = self.config
        starts = np.arange(0, len(self.held_out) - config.block, config.block)
        for at in range(0, len(starts) - config.batch_size + 1, config.batch_size):
            yield self._batch(self.held_out, starts[at : at + config.batch_size])

    def _batch(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[dict, np.ndarray]:
        """Return the features of blocks that begin at `starts`, and the characters after each."""
        config = self.config
        places = starts[:, None] + np.arange(config.block)  # [B, L]
        features = {"character": tokens[places]}
        if self.with_memory:
            ids = ngram_ids(
                tokens[places],
                config.orders,
                heads=config.memory_heads,
                vocabulary_size=config.memory_rows,
            )
            features["memory"] = ids[..., None]  # [B, L, C, 1]: each id is a bag of its own
        return features, tokens[places + 1]
