"""Time of `EmbeddingEngine.place`: 26 features, 214 ids per sample (the sizes of DLRM-DCNv2).

    python benchmarks/place.py --devices 8 --batch 4096

Ids are uniform (the hardest case for dedup) or Zipf 1.2, as dense arrays and as `RaggedIds`. The
time includes the transfer of the packed batch to the devices. The tables are declared with their
real sizes, but never allocated. Beside the time of a call, there is how many ids a second of one
core's time is enough for, whatever number of cores share the work, and what is sent per id.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import common


def main() -> None:
    """Print a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    common.emulate(args.devices)

    import jax
    import numpy as np

    import tpu_embed

    rng = np.random.default_rng(0)
    features = {
        f"f{i:02d}": tpu_embed.FeatureConfig(tpu_embed.TableConfig(rows, 128, name=f"t{i:02d}"))
        for i, rows in enumerate(common.DLRM_ROWS)
    }

    def placer(batch: dict) -> Callable[[], jax.Array]:
        """Return a call that places the batch; its engine is not shared, so specs do not mix."""
        engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adagrad(0.005))
        return lambda: jax.block_until_ready(engine.place(batch).packed)

    def core_seconds(place: Callable[[], jax.Array]) -> float:
        """Return the processor time of one call, on all cores together."""
        start = time.process_time()
        for _ in range(args.rounds):
            place()
        return (time.process_time() - start) / args.rounds

    def draw(rows: int, hot: int, zipf: bool) -> np.ndarray:
        shape = (args.batch, hot)
        drawn = rng.zipf(1.2, shape) - 1 if zipf else rng.integers(0, rows, shape)
        return np.minimum(drawn, rows - 1).astype(np.int32)

    def ragged(dense: np.ndarray) -> tpu_embed.RaggedIds:
        splits = np.arange(args.batch + 1) * dense.shape[1]
        return tpu_embed.RaggedIds(dense.reshape(-1), splits)

    cases = {}
    for zipf in (False, True):
        sizes = zip(features, common.DLRM_ROWS, common.DLRM_HOTS, strict=True)
        dense = {name: draw(rows, hot, zipf) for name, rows, hot in sizes}
        words = "Zipf 1.2" if zipf else "uniform"
        cases[f"dense, {words}"] = placer(dense)
        cases[f"ragged, {words}"] = placer({name: ragged(ids) for name, ids in dense.items()})
    print(common.machine())
    ids = args.batch * sum(common.DLRM_HOTS)
    print(f"place, batch {args.batch}, {sum(common.DLRM_HOTS)} ids a sample, {ids} in all")
    print(f"{'ids':18s} {'median ms':>10s} {'ids per core second':>20s} {'int32 per id':>13s}")
    for name, spent in common.interleaved(cases, args.rounds).items():
        speed, sent = ids / core_seconds(cases[name]), cases[name]().size / ids
        print(f"{name:18s} {spent:10.1f} {speed:20.2g} {sent:13.1f}")


if __name__ == "__main__":
    main()
