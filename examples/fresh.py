"""Serve items that were born a moment ago: a trainer and a server that may be killed.

The trainer learns from the stream of `stream.py`. Every 50 batches it publishes a delta, and every
1,000 a full export. The server follows by the deltas, and scores each next window of 50 batches
before the trainer's rows of it arrive; beside it, a second model is loaded from the full exports
only. All that is trained stands in the tables, because arrays that a model closes over are
constants of an exported program: so a delta is the whole difference between two models.

With `--kills`, either process is killed again and again (SIGKILL), and started anew. The trainer
goes on from its last checkpoint, which has the record of touched rows; the server loads what it
needs. At every delta the server's keys are compared with the trainer's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import settings
from fresh_publisher import Follower, Note, digest, publish, report
from stream_data import Stream
from stream_model import Learner, logits

from tpu_embed import DynamicVocabulary, hash_ids, io


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
            admitted = self.learner.engine.vocabularies.last["items"].admitted
            self.born += [time.time()] * admitted.size
            if self.done % config.every == 0:
                self.export()
                position = {"done": self.done, "published": list(self.published)}
                state = self.learner.state
                self.saves.save(self.done, state, position=position, touched=self.touched)
        self.saves.close()

    def export(self) -> None:
        """Publish a delta, and a full export if it is time for one."""
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
                vocabularies=engine.vocabularies,
            )
            self.note("full", path, version, version)
        self.published, self.born = version, []

    def note(self, kind: str, path: Path, since: io.Version, version: io.Version) -> None:
        keys = digest(self.learner.engine.vocabularies.keys("items")[0])
        publish(self.root, Note(self.done, kind, str(path), since, version, keys, self.born))


def serve(config, work: Path) -> None:
    """Score every window by the deltas, and by the full exports alone; keep scores and lags."""
    stream, root, kept = Stream(config), work / "published", work / "scores"
    root.mkdir(parents=True, exist_ok=True)
    kept.mkdir(exist_ok=True)
    fresh, stale, last_full = Follower(root), Follower(root), -1
    for begin in range(0, config.batches, config.every):
        path = kept / f"{begin:06d}.npz"
        if path.exists():  # scored before this process was started again
            continue
        note = fresh.wait(begin, ("delta",) if begin else ("full",))
        fresh.follow(note)
        lags = time.time() - np.array(note.born)
        if last_full != begin // config.full:
            last_full = begin // config.full
            stale.follow(stale.wait(last_full * config.full, ("full",)))
        found = {"click": [], "fresh": [], "stale": []}
        for number in range(begin, min(begin + config.every, config.batches)):
            batch = stream.batch(number)
            asked = {"user": batch.user, "item": hash_ids(batch.item, None)}
            found["click"].append(batch.click)
            for name, follower in (("fresh", fresh), ("stale", stale)):
                found[name].append(np.asarray(follower.model(asked)))
        hidden = path.with_suffix(".new.npz")
        np.savez(hidden, lags=lags, **{name: np.concatenate(one) for name, one in found.items()})
        hidden.rename(path)


def watch(arguments: list[str], work: Path, kills: int, seed: int) -> int:
    """Run trainer and server until both are done; kill them at random; return how often."""
    rng, done = np.random.default_rng(seed), 0

    def start(role: str) -> subprocess.Popen:
        command = [sys.executable, __file__, *arguments, "--role", role, "--work", str(work)]
        return subprocess.Popen(command)

    running = {role: start(role) for role in ("trainer", "server")}
    next_kill = time.monotonic() + rng.uniform(3, 8)
    while running:
        time.sleep(0.05)
        for role, process in list(running.items()):
            if process.poll() == 0:
                del running[role]
            elif process.poll() is not None and process.poll() != -9:
                for other in running.values():
                    other.kill()
                raise SystemExit(f"the {role} has failed")
        if done < kills and running and time.monotonic() > next_kill:
            role = rng.choice(list(running))
            running[role].kill()
            running[role].wait()
            running[role], done = start(role), done + 1
            next_kill = time.monotonic() + rng.uniform(3, 8)
    return done


def main() -> None:
    options = settings.parser(__doc__, "stream.py")
    options.add_argument("--batches", type=int, default=2_000)
    options.add_argument("--admit-after", type=int, default=1)
    options.add_argument("--every", type=int, default=50, help="batches between two deltas")
    options.add_argument("--full", type=int, default=1_000, help="batches between full exports")
    options.add_argument("--kills", type=int, default=0)
    options.add_argument("--seeds", type=int, default=1, help="runs, each with a seed of its own")
    options.add_argument("--role", choices=("trainer", "server"), help="used by the example itself")
    options.add_argument("--work", type=Path, help="folder of files; None: a temporary one")
    args, config = settings.read(options)
    config.every, config.full = args.every, args.full
    if args.role == "trainer":
        Trainer(config, args.work).run()
    elif args.role == "server":
        serve(config, args.work)
    else:
        differences = []
        for seed in range(config.seed, config.seed + args.seeds):
            given, begin = [*sys.argv[1:], "--seed", str(seed)], time.perf_counter()
            with tempfile.TemporaryDirectory() as temporary:
                work = args.work or Path(temporary)
                kills = watch(given, work, args.kills, seed)
                fresh, stale = report(work)
            differences.append(fresh - stale)
            print(f"seed {seed}, {kills} kills, {time.perf_counter() - begin:.0f} s", flush=True)
        if len(differences) > 1:
            mean, spread = np.mean(differences), np.std(differences, ddof=1)
            print(f"difference {mean:.5f}, standard deviation {spread:.5f}")


if __name__ == "__main__":
    main()
