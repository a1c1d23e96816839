"""Serve items that were born a moment ago: a trainer and a server that may be killed.

The server shows the items of `stream.py` in windows of 50 batches, and scores them. The trainer
learns from the clicks on each window, publishes, and saves; the server follows what is published,
and shows the next window. Beside it, a second model follows full exports alone, one every 1,000
batches. All that is trained stands in the tables, because arrays that a model closes over are
constants of an exported program: so a delta is the whole difference between two models.

With `--kills`, either process is killed again and again (SIGKILL), and started anew. The trainer
goes on from its last checkpoint, which has the record of touched rows; the server loads what it
needs. In every window the server's keys are compared with the trainer's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import settings
from fresh_server import report, serve
from fresh_trainer import train


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
        train(config, args.work)
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
