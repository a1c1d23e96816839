"""Attention costs what its events cost: HSTU attention of jagged and of padded sequences.

    python benchmarks/hstu.py --fill 0.1    (or 1; --longest 4096; --biases 0 --whole)

Results and gradients of queries, keys, values and of both tables of biases, on one CPU device.
The padded form has arrays `[B, L, heads, D]` and a causal mask. It computes one example after the
other, 128 queries at a time with all L keys, and computes again in the backward pass what the
jagged form computes again, too. `--whole` adds the form that most models have, scores
`[B, heads, L, L]`. Lengths are lognormal (σ = 1) with a mean of `--fill` times the longest, one of
them L. Results and gradients of all forms agree, which is checked first. Prints milliseconds and
temporary memory, and both relative to the padded form, and to the whole one.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import common


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fill", type=float, default=0.1, help="the mean length, relative to L")
    parser.add_argument("--longest", type=int, default=512, help="L, a multiple of 128")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64, help="of each head")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--biases", type=int, default=1, help="0: without tables of biases")
    parser.add_argument("--whole", action="store_true", help="scores [B, heads, L, L], too")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Print one line per form."""
    args = arguments()
    common.emulate(1)
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, args)
    print(common.machine())
    print(
        f"B {args.batch}, L {args.longest}, {args.heads} heads of {args.dim};"
        f" {lengths.sum()} events, {lengths.mean():.1f} per example;"
        f" {'biases by position and time' if args.biases else 'no biases'}"
    )
    runs = runs_of(args, rng, lengths)
    spent = common.interleaved({name: run for name, (run, _) in runs.items()}, args.rounds)
    for name, (_, memory) in runs.items():
        ratios = [
            f"{spent[name] / spent[peer]:6.3f} of the time, {memory / runs[peer][1]:6.3f} of the"
            f" memory of {peer}"
            for peer in runs
            if peer not in ("jagged", name)
        ]
        print(f"  {name:8s}{spent[name]:9.1f} ms, {memory / 1e6:8.1f} MB", *ratios, sep="; ")


def lengths_of(rng: Any, args: argparse.Namespace) -> Any:
    """Return B lengths from 1 to L; all are L if the fill is 1."""
    import numpy as np

    drawn = rng.lognormal(size=args.batch)
    lengths = np.rint(drawn / drawn.mean() * args.longest * args.fill)
    lengths = np.clip(lengths, 1, args.longest).astype(int)
    lengths[args.batch // 2] = args.longest
    return np.full_like(lengths, args.longest) if args.fill >= 1 else lengths


def runs_of(args: argparse.Namespace, rng: Any, lengths: Any) -> dict[str, tuple[Any, int]]:
    """Return a call and the temporary memory of each form, each run once and compared."""
    import jax
    import numpy as np

    there = np.arange(args.longest) < lengths[:, None]
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sizes = {"position": args.longest, "time": 32} if args.biases else {}
    tables = {
        n: rng.normal(size=(args.heads, size)).astype(np.float32) for n, size in sizes.items()
    }
    padded = padded_events(args, rng, there)
    room = -len(padded[0][there]) % 256
    jagged = [np.pad(x[there], [(0, room), *[(0, 0)] * (x.ndim - 2)]) for x in padded]
    forms = {"jagged": (jagged_form, jagged), "padded": (padded_form, padded)}
    if args.whole:
        forms["whole"] = whole_form, padded
    runs, results = {}, []
    for name, (form, events) in forms.items():
        operands = jax.device_put((*events, tables, splits))
        compiled = jax.jit(with_gradients(functools.partial(form, args))).lower(*operands).compile()
        of_events, of_tables = compiled(*operands)
        found = [x[there] if x.shape[:2] == there.shape else x[: there.sum()] for x in of_events]
        results.append(jax.device_get((found, of_tables)))
        run = lambda call=compiled, given=operands: jax.block_until_ready(call(*given))  # noqa: E731
        runs[name] = run, compiled.memory_analysis().temp_size_in_bytes
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3)
    for other in results[1:]:
        jax.tree.map(close, other, results[0])
    return runs


def padded_events(args: argparse.Namespace, rng: Any, there: Any) -> list[Any]:
    """Return q, k, v and the gradient of the results [B, L, heads, D], and times [B, L]."""
    import numpy as np

    shape = (*there.shape, args.heads, args.dim)
    arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(4)]
    arrays[3][~there] = 0
    return [*arrays, np.sort(rng.integers(0, 10**6, there.shape), axis=1).astype(np.int32)]


def with_gradients(form: Any) -> Any:
    """Return a function that gives results and gradients of events, and gradients of tables."""
    import jax

    def both(q, k, v, given, times, tables, splits):
        part = functools.partial(form, times=times, splits=splits)
        out, pull = jax.vjp(part, q, k, v, tables)
        *of_events, of_tables = pull(given)
        return [out, *of_events], of_tables

    return both


def jagged_form(args, q, k, v, tables, *, times, splits):
    from tpu_embed.nn import jagged_attention

    return jagged_attention(
        q,
        k,
        v,
        splits,
        longest=args.longest,
        position_bias=tables.get("position"),
        time_bias=tables.get("time"),
        times=times,
        block=args.block,
    )


def events_of(times):
    """Return what a tile is told about the events `[L]` of one padded example."""
    import jax.numpy as jnp

    from tpu_embed.nn.attention import Events

    index, zeros = jnp.arange(len(times), dtype=jnp.int32), jnp.zeros(len(times), jnp.int32)
    return Events(index, zeros, index, zeros, times, times)


def tables_of(args, tables):
    import jax.numpy as jnp

    from tpu_embed.nn.attention import Tables

    position = tables.get("position")
    if position is not None:
        position = jnp.pad(position, ((0, 0), (args.longest,) * 2), mode="edge")
    return Tables(position, tables.get("time"))


def padded_form(args, q, k, v, tables, *, times, splits):
    """Attend example by example, and in it by 128 queries; q, k and v are [B, L, heads, D]."""
    import jax

    from tpu_embed.nn.attention import Form, tile, time_bucket

    tables = tables_of(args, tables)

    def of_example(example):
        q, k, v, times = example
        k, v, events = k.swapaxes(0, 1), v.swapaxes(0, 1), events_of(times)
        blocks = q.reshape(-1, 128, *q.shape[1:]).swapaxes(1, 2)  # [L / 128, heads, 128, D]

        @jax.checkpoint
        def of_queries(part):
            return tile(
                Form(float(args.longest), time_bucket), part[0], k, v, tables, part[1], events
            )

        out = jax.lax.map(of_queries, (blocks, jax.tree.map(lambda x: x.reshape(-1, 128), events)))
        return out.swapaxes(1, 2).reshape(q.shape)

    return jax.lax.map(of_example, (q, k, v, times))


def whole_form(args, q, k, v, tables, *, times, splits):
    """Attend with all scores at once."""
    import jax

    from tpu_embed.nn.attention import Form, tile, time_bucket

    tables = tables_of(args, tables)

    def of_example(q, k, v, times):
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        events = events_of(times)
        return tile(
            Form(float(args.longest), time_bucket), q, k, v, tables, events, events
        ).swapaxes(0, 1)

    return jax.vmap(of_example)(q, k, v, times)


if __name__ == "__main__":
    main()
