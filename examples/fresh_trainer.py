"""The trainer of `fresh.py`: it learns from the stream, publishes, saves, and is restored."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from fresh_publisher import Note, digest, publish
from stream_data import Stream
from stream_model import Learner, logits

from tpu_embed import DynamicVocabulary, io


class Trainer:
    """Trains on the stream, publishes and saves.

    Args:
      config: the numbers of `configs/stream.py`, and `every` and `full`: batches between deltas,
        and between full exports.
      work: the folder that trainer and server share.
    """

    def __init__(self, config, work: Path) -> None:
        self.config, self.root = config, work / "published"
        self.root.mkdir(parents=True, exist_ok=True)
        rules = DynamicVocabulary(admit_after=config.admit_after, evict=config.evict)
        self.learner, self.born = Learner(config, rules), []
        maps = self.learner.engine.vocabularies
        assert maps is not None, "the items have a vocabulary"
        self.maps = maps
        self.touched, self.done = io.TouchedRows(self.learner.engine), 0
        self.published: io.Version | None = None
        self.saves = io.CheckpointManager(work / "saved", self.learner.engine)
        if self.saves.latest_step() is not None:
            found = self.saves.restore(touched=self.touched)
            self.learner.state, self.done = found.state, found.position["done"]
            self.published = io.Version(*found.position["published"])

    def run(self) -> None:
        """Train on all batches that are left."""
        stream, config = Stream(self.config), self.config
        if self.published is None:
            self.export()
        while self.done < config.batches:
            self.learner.learn(batch := stream.batch(self.done))
            self.done += 1
            self.touched.record(self.learner.features(batch), self.done)
            admitted = self.maps.last["items"].admitted
            self.born += [time.time()] * admitted.size
            if self.done % config.every == 0:
                position = {"done": self.done, "published": list(self.export())}
                state = self.learner.state
                self.saves.save(self.done, state, position=position, touched=self.touched)
        self.saves.close()

    def export(self) -> io.Version:
        """Publish a delta, and a full export if it is time for one; return what they hold."""
        engine, state = self.learner.engine, self.learner.state
        version, since = self.touched.version(state), self.published
        if since is not None:
            path = self.root / f"delta-{self.done}-{version.run[:8]}"
            io.export_delta(path, engine, state, self.touched, since)
            self.note("delta", path, since, version)
        if self.done % self.config.full == 0:
            path = self.root / f"full-{self.done}-{version.run[:8]}"
            examples = {"user": np.zeros(2, np.int64), "item": np.zeros(2, np.int64)}
            io.export_model(
                path,
                logits,
                {name: np.asarray(table) for name, table in engine.tables(state).items()},
                self.learner.feature_config,
                examples,
                version=version,
                vocabularies=self.maps,
            )
            self.note("full", path, version, version)
        self.published, self.born = version, []
        return version

    def note(self, kind: str, path: Path, since: io.Version, version: io.Version) -> None:
        keys = digest(self.maps.keys("items")[0])
        publish(self.root, Note(self.done, kind, str(path), since, version, keys, self.born))
