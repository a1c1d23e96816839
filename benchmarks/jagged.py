"""Jagged sequences cost what their ids cost: a step beside the same step of the padded form.

    python benchmarks/jagged.py --devices 1    (or 8)

Looks up histories of very different lengths, and updates their rows with Adagrad: once as a jagged
feature, once with `max_sequence_length`, whose activations `[B, L, D]` have a place for every
position up to the longest history. Lengths are lognormal (σ = 1), and their mean is a tenth of the
longest. The activations stand in for the gradients, so nothing but lookup and update is measured.
Both get the same `RaggedIds`; a third step gets them as a dense array padded with -1. Ids are
uniform, which repeat least, or Zipf 1.2. After the first turn all tables have the same bits, which
is checked; then steps are timed in turns of four. Prints milliseconds, temporary memory per device,
and both relative to the padded form. With `--balance`, a fourth step gets the histories in the
order of `tpu_embed.data.balance_replicas`. C is the room for events on a device.
"""

from __future__ import annotations

import argparse
from typing import Any

import common

STEPS = 4  # in each turn: the first finds caches and memory as another form has left them


def main() -> None:
    """Print one line per form, for both kinds of ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--balance", action="store_true", help="a balanced batch, too")
    args = parser.parse_args()
    common.emulate(args.devices)

    import numpy as np

    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, args.batch, args.longest)
    print(common.machine())
    print(
        f"Adagrad step, V {args.rows}, D {args.dim}, B {args.batch}; {lengths.sum()} ids,"
        f" {lengths.mean():.1f} per history, the longest {lengths.max()}"
    )
    uniform = rng.integers(0, args.rows, lengths.sum())
    zipf = (rng.zipf(1.2, lengths.sum()) - 1) % args.rows
    for kind, values in (("uniform", uniform), ("zipf", zipf)):
        runs = runs_of(args, lengths, values.astype(np.int32))
        spent = common.interleaved(runs, args.rounds)
        for name, run in runs.items():
            time, memory = spent[name] / STEPS, run.temporaries
            ratios = spent[name] / spent["padded"], memory / runs["padded"].temporaries
            print(
                f"  {kind:8s}{name:18s}{time:8.2f} ms, {ratios[0]:5.2f} of padded;"
                f" temporaries {memory / 1e6:7.2f} MB, {ratios[1]:5.2f}; C {run.capacity or '-'}"
            )


def lengths_of(rng: Any, batch: int, longest: int) -> Any:
    """Return B lengths from 1 to L, lognormal with a mean of about L / 10, one of them L."""
    import numpy as np

    drawn = rng.lognormal(size=batch)
    lengths = np.clip(np.rint(drawn / drawn.mean() * longest / 10), 1, longest).astype(int)
    lengths[rng.integers(batch)] = longest
    return lengths


def runs_of(args: argparse.Namespace, lengths: Any, values: Any) -> dict[str, Any]:
    """Return the steps by name, each run once; their tables have the same bits."""
    import jax
    import numpy as np

    import tpu_embed

    class Run:
        """An engine with its state and one batch."""

        def __init__(self, ids: Any, *, jagged: bool) -> None:
            table = tpu_embed.TableConfig(args.rows, args.dim, name="items")
            feature = {"x": tpu_embed.FeatureConfig(table, args.longest, jagged=jagged)}
            engine = tpu_embed.EmbeddingEngine(feature, tpu_embed.optimizers.Adagrad(0.1))
            self.batch, self.state = engine.place({"x": ids}), engine.init(jax.random.key(0))

            def step(state, batch):
                return engine.update(state, batch, engine.lookup(state, batch))

            lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.batch)
            self.step, self.tables = lowered.compile(), engine.tables
            self.temporaries = self.step.memory_analysis().temp_size_in_bytes
            self.capacity = self.batch.spec.feature_shapes[0].capacity

        def __call__(self) -> None:
            for _ in range(STEPS):
                self.state = jax.block_until_ready(self.step(self.state, self.batch))

    ragged = tpu_embed.RaggedIds(values, np.concatenate([[0], np.cumsum(lengths)]))
    dense = np.full((args.batch, args.longest), -1, np.int32)
    dense[np.arange(args.longest) < lengths[:, None]] = values
    runs = {
        "padded": Run(ragged, jagged=False),
        "padded, dense ids": Run(dense, jagged=False),
        "jagged": Run(ragged, jagged=True),
    }
    for run in runs.values():
        run()
    first, *others = (np.asarray(run.tables(run.state)["items"]) for run in runs.values())
    assert all(np.array_equal(first, other) for other in others), "tables differ"
    if args.balance:
        # Another order of the examples is another order of the sums, so other last bits.
        order = tpu_embed.data.balance_replicas(lengths, args.devices)
        runs["jagged, balanced"] = Run(tpu_embed.data.reorder_batch(ragged, order), jagged=True)
    return runs


if __name__ == "__main__":
    main()
