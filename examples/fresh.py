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
from fresh_publisher import Follower, report
from fresh_trainer import Trainer
from stream_data import Stream

from tpu_embed import hash_ids


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
        found: dict[str, list] = {"click": [], "fresh": [], "stale": []}
        for number in range(begin, min(begin + config.every, config.batches)):
            batch = stream.batch(number)
            asked = {"user": batch.user, "item": hash_ids(batch.item, None)}
            found["click"].append(batch.click)
            for name, follower in (("fresh", fresh), ("stale", stale)):
                found[name].append(np.asarray(follower.model(asked)))
        hidden = path.with_suffix(".new.npz")
        click, scored, late = (np.concatenate(found[name]) for name in ("click", "fresh", "stale"))
        np.savez(hidden, lags=lags, click=click, fresh=scored, stale=late)
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
                fresh, stale = report(work, config.full)
            differences.append(fresh - stale)
            print(f"seed {seed}, {kills} kills, {time.perf_counter() - begin:.0f} s", flush=True)
        if len(differences) > 1:
            mean, spread = np.mean(differences), np.std(differences, ddof=1)
            print(f"difference {mean:.5f}, standard deviation {spread:.5f}")


if __name__ == "__main__":
    main()
