"""The trainer of `fresh.py`: it learns what has been shown, publishes, saves, and is restored."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax
from stream_data import Stream
from stream_model import Learner, logits

from tpu_embed import DynamicVocabulary, fit, hash_ids, io


def digest(keys: np.ndarray) -> str:
    """Return the same text for the same set of keys, uint64 `[n]`."""
    return hashlib.sha256(np.sort(keys).tobytes()).hexdigest()


class Clicks(Iterator):
    """Yields the batches that the server has shown, with their clicks; goes on where it was.

    Args:
      config: the numbers of `configs/stream.py`, and `every`, the batches of a window.
      shown: the folder in which the server notes each window.
    """

    def __init__(self, config, shown: Path) -> None:
        self._stream, self._config, self._shown, self._next = Stream(config), config, shown, 0

    def __next__(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        if self._next == self._config.batches:
            raise StopIteration
        window = self._next - self._next % self._config.every
        while not (self._shown / f"{window:06d}.npz").exists():
            time.sleep(0.005)
        batch = self._stream.batch(self._next)
        self._next += 1
        return {"user": batch.user, "item": hash_ids(batch.item, None)}, batch.click

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def loss(activations, click):
    return optax.sigmoid_binary_cross_entropy(logits(activations), click).sum()


def train(config, work: Path) -> None:
    """Train on all that is shown, and publish after each window.

    Args:
      config: the numbers of `configs/stream.py`, and `every` and `full`: batches between deltas,
        and between full exports.
      work: the folder that trainer and server share.
    """
    rules = DynamicVocabulary(admit_after=config.admit_after, evict=config.evict)
    learner, shown = Learner(config, rules), work / "shown"
    engine, touched = learner.engine, io.TouchedRows(learner.engine)

    def publish(state) -> None:
        def export(path, version):
            tables = {name: np.asarray(table) for name, table in engine.tables(state).items()}
            examples = {"user": np.zeros(2, np.int64), "item": np.zeros(2, np.int64)}
            options = {"version": version, "vocabularies": engine.vocabularies}
            io.export_model(path, logits, tables, learner.feature_config, examples, **options)

        step = int(state.step)
        known = work / "known" / f"{step:06d}"
        known.parent.mkdir(exist_ok=True)
        assert engine.vocabularies is not None, "items have a dynamic vocabulary"
        known.write_text(digest(engine.vocabularies.keys("items")[0]))
        if step % config.full == 0:  # beside the deltas: for a server of full exports alone
            io.publish(work / "full", engine, state, touched, export, deltas=0)
        io.publish(work / "published", engine, state, touched, export)

    if not (work / "saved").exists():
        publish(learner.state)  # zeros, with which the server begins
    fit(
        engine,
        loss,
        Clicks(config, shown),
        state=learner.state,
        directory=work / "saved",
        save_every=config.every,
        touched=touched,
        report_every=config.every,
        callback=lambda report: publish(report.state),
        progress=False,
    )
