"""Time of a checkpoint, compared with a NumPy write of the same bytes, and its extra memory.

    python benchmarks/checkpoint.py --mib 512 --devices 1

There is one float32 table, trained by Adagrad, which has a slot of the same size. Each figure comes
from its own process. Memory is the peak of resident memory minus what the process held before the
call (for `restore` also minus the restored state), as a multiple of the table. Time is that of the
call, and for a save in the background also that of `wait`. NumPy writes one file per array, with
fsync, in the same process; both take turns, each on an emptied directory.

A virtual machine may return memory that was unused for some seconds to its host. Touching it again
then takes ten times as long as the copy itself. So memory for four tables is touched and freed
before each call; --cold leaves this out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

KINDS = ("save", "save in the background", "restore")


def resident(field: str) -> int:
    """Return bytes of this process: "VmRSS" now, or "VmHWM", the peak since the reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{field}:\s+(\d+) kB", status)[0])


def reset_peak() -> int:
    """Reset the peak; return the bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def empty(root: Path) -> None:
    """Remove what was written, so that its pages are free for the next write."""
    for path in root.iterdir():
        shutil.rmtree(path)
    os.sync()


def warm(args: argparse.Namespace) -> None:
    """Touch and free as much memory as a call needs, in large pages as NumPy arrays have."""
    if not args.cold:
        np.ones(4 * args.mib * 2**20, np.uint8)


def numpy_write(root: Path, arrays: list[Any]) -> None:
    """Write one file per array, and wait until it is on disk."""
    root.mkdir()
    for i, array in enumerate(arrays):
        with (root / f"{i}").open("wb") as file:
            array.tofile(file)
            file.flush()
            os.fsync(file.fileno())


def engine_of(args: argparse.Namespace) -> Any:
    """Return an engine of one table, on emulated devices."""
    common.emulate(args.devices)
    import tpu_embed

    table = tpu_embed.TableConfig(args.mib * 2**18 // args.dim, args.dim, name="item")
    features = {"x": tpu_embed.FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adagrad(0.1))


def measure_restore(args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of `restore`, measured in this process."""
    engine = engine_of(args)
    import jax

    from tpu_embed.io import restore

    beyond, seconds = 0.0, []
    for i in range(args.rounds):
        warm(args)
        before, start = reset_peak(), time.perf_counter()
        state = jax.block_until_ready(restore(f"{args.directory}/saved", engine).state)
        seconds.append(time.perf_counter() - start)
        if not i:
            beyond = resident("VmHWM") - before - 2 * args.mib * 2**20
        del state
    return {"beyond": beyond / args.mib / 2**20, "seconds": statistics.median(seconds)}


def measure_save(args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one kind of save, measured in this process."""
    engine, root = engine_of(args), Path(args.directory)
    import jax

    from tpu_embed.io import CheckpointManager, save

    state = jax.block_until_ready(engine.init(jax.random.key(0)))
    arrays = [np.asarray(array) for array in jax.tree.leaves((state.tables, state.slots))]
    seconds: dict[str, list[float]] = {"blocked": [], "seconds": [], "numpy": []}
    beyond = 0
    for _ in range(args.rounds):
        empty(root)
        with CheckpointManager(root / "run", engine, in_background=args.kind != "save") as manager:
            warm(args)
            before, start = reset_peak(), time.perf_counter()
            manager.save(1, state)
            seconds["blocked"].append(time.perf_counter() - start)
            manager.wait()
            seconds["seconds"].append(time.perf_counter() - start)
            beyond = max(beyond, resident("VmHWM") - before)
        empty(root)
        warm(args)
        start = time.perf_counter()
        numpy_write(root / "numpy", arrays)
        seconds["numpy"].append(time.perf_counter() - start)
    empty(root)
    save(root / "saved", engine, state)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {"beyond": beyond / args.mib / 2**20, **medians}


def main() -> None:
    """Print one line per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of the table; its slot has as many")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="do not touch memory before a call")
    parser.add_argument("--directory", help="where to write; default: a temporary one")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        figures = measure_restore(args) if args.kind == "restore" else measure_save(args)
        print(json.dumps({"machine": common.machine(), **figures}))
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for kind in KINDS:
            command = [sys.executable, *sys.argv, "--kind", kind, "--directory", directory]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout)
            if kind == KINDS[0]:
                print(found["machine"])
                print(f"a table of {args.mib} MiB and a slot of as many:")
            line = f"  {kind:23s} {found['seconds']:6.2f} s"
            if "numpy" in found:
                ratio = found["numpy"] / found["seconds"]
                line += f", NumPy {found['numpy']:6.2f} s, ratio {ratio:.2f}"
                line += f"; the call returns after {found['blocked']:.2f} s"
            print(f"{line}; memory beyond {found['beyond']:.2f} of the table", flush=True)


if __name__ == "__main__":
    main()
