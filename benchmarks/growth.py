"""A dynamic vocabulary that doubles its capacity while it trains, by `EmbeddingEngine.adopt`.

    python benchmarks/growth.py [--first 1000] [--last 64000] [--dim 16] [--devices 1] [--on-host]

Every batch has bags of keys, a share of which nobody has seen. When rows were taken from keys, the
next engine has twice the capacity and adopts the state. Printed for each capacity: the training
steps there; the milliseconds of a step, as the median; the seconds that the change took, from the
last step of the engine before to the end of the first one of the new one, and those of `adopt`
alone; and what XLA compiled meanwhile: programs, and seconds of these. The last line is the same
training in an engine of the last capacity from the start.
"""

from __future__ import annotations

import argparse
import statistics
import time

import common
import jax
import jax.monitoring
import numpy as np

import tpu_embed
from tpu_embed import optimizers

COMPILED: list[float] = []
"""The seconds of each program that XLA has compiled."""


def note_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Note a program that was compiled."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration_secs)


def make(capacity: int, options: argparse.Namespace) -> tpu_embed.EmbeddingEngine:
    """Return an engine whose table has so many rows."""
    storage = tpu_embed.HostStorage(device_rows=options.device_rows) if options.on_host else None
    table = tpu_embed.TableConfig(
        capacity,
        options.dim,
        name="items",
        vocabulary=tpu_embed.DynamicVocabulary(),
        storage=storage,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: options.devices]), ("d",))
    features = {"x": tpu_embed.FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(features, optimizers.Adagrad(0.1), mesh=mesh)


def draw(rng: np.random.Generator, known: int, options: argparse.Namespace) -> np.ndarray:
    """Return bags of keys; a few of them are new, the next ones after `known`."""
    keys = rng.integers(0, max(known, 1), (options.batch, options.bag))
    fresh = np.arange(known, known + options.new)
    keys.reshape(-1)[rng.choice(keys.size, options.new, replace=False)] = fresh
    return keys


def train(engine, state, keys):
    """Return the state after a step on bags of keys."""
    state, batch = engine.admit(state, engine.place({"x": keys}))
    activations = engine.lookup(state, batch)
    state = engine.update_in_place(state, batch, activations)
    jax.block_until_ready(state.tables)
    return state


def evicted(engine) -> int:
    """Return how many keys have lost their rows to others."""
    return engine.vocabularies.counters["items"]["evicted"]


def run(first: int, last: int, steps: int, options: argparse.Namespace) -> None:
    """Train; double the capacity whenever keys were evicted, until the last one."""
    rng, known = np.random.default_rng(0), 0
    COMPILED.clear()
    start = time.perf_counter()
    engine, adopting = make(first, options), 0.0
    state = engine.init(jax.random.key(0))
    capacity, lost, times = first, 0, []
    for step in range(steps):
        mark = time.perf_counter()
        state = train(engine, state, draw(rng, known, options))
        known += options.new
        if not times:
            changed, programs, compiling = mark - start, len(COMPILED), sum(COMPILED)
            changed += time.perf_counter() - mark
        times.append(1e3 * (time.perf_counter() - mark))
        full = evicted(engine) > lost and capacity < last
        if full or step == steps - 1:
            print(
                f"{capacity:>8} {len(times):>7} {statistics.median(times[1:] or times):>9.2f} "
                f"{changed:>9.2f} {adopting:>7.2f} {programs:>9} {compiling:>10.2f}",
                flush=True,
            )
        if full:
            lost, capacity, times = evicted(engine), 2 * capacity, []
            COMPILED.clear()
            start = time.perf_counter()
            larger = make(capacity, options)
            begun = time.perf_counter()
            state = jax.block_until_ready(larger.adopt(state, engine))
            engine, adopting = larger, time.perf_counter() - begun


def main() -> None:
    """Print a line per capacity, and one of the engine that does not grow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=1_000)
    parser.add_argument("--last", type=int, default=64_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--bag", type=int, default=4)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument("--device-rows", type=int, default=4_096)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    print(common.machine())
    jax.monitoring.register_event_duration_secs_listener(note_compilation)
    steps = options.last // options.new
    columns = "capacity", "steps", "ms a step", "change s", "adopt s", "programs", "compile s"
    print(
        " ".join(
            f"{name:>{size}}" for name, size in zip(columns, (8, 7, 9, 9, 7, 9, 10), strict=True)
        )
    )
    run(options.first, options.last, steps, options)
    run(options.last, options.last, steps, options)


if __name__ == "__main__":
    main()
