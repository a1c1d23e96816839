"""SASRec on Amazon's reviews: a step of `examples/published` beside the same with flax and optax.

    python benchmarks/published.py --data Beauty.txt

The other form is what flax and optax offer by themselves: histories padded to one length, a table
`nnx.Embed` among the parameters, and `optax.adam` for all of them, which passes over the whole
table in each step. Network, loss, drawn items and dropout are the same. Both get the same batches,
in turns. Prints milliseconds to place a batch and to train on it, steps a second with both (`fit`
places the next batch while a step runs, so it may be faster), and seconds of an evaluation.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print a line per form, their ratio, and the time of an evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="Beauty.txt or Toys_and_Games.txt")
    parser.add_argument("--config", default="sasrec_amazon.py", help="a file of configs/published")
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    common.emulate(1)
    sys.path += [str(ROOT / "examples"), str(ROOT / "examples" / "published")]

    import next_item
    import reviews

    config = SimpleNamespace(**runpy.run_path(str(ROOT / "configs" / "published" / args.config)))
    histories = reviews.load(args.data)
    trained = histories.without(2)
    task = next_item.NextItem(config, next_item.make_engine(config, trained))
    batches = next_item.batches(config, trained)
    items = list(itertools.islice(batches, args.rounds + 1))
    forms = {"engine": engine_form(task), "flax and optax": padded_form(task, histories.items)}
    calls = {
        f"{name}, {stage}": functools.partial(call_with_next, call, iter(items))
        for name, form in forms.items()
        for stage, call in zip(("place", "step"), form, strict=True)
    }
    print(common.machine())
    spent = common.interleaved(calls, args.rounds)
    both = {name: spent[f"{name}, place"] + spent[f"{name}, step"] for name in forms}
    for name, total in both.items():
        stages = f"place {spent[f'{name}, place']:6.2f} ms, step {spent[f'{name}, step']:6.2f} ms"
        print(f"  {name:15s}{stages}, {1e3 / total:6.1f} steps/s")
    print(f"  engine / flax and optax: {both['engine'] / both['flax and optax']:.2f}")
    print(f"  an evaluation of {len(histories.rows):,} users: {evaluation(task, histories):.1f} s")


def call_with_next(call: Any, items: Any) -> None:
    """Call a function with the next item."""
    call(*next(items))


def new_network(task: Any) -> Any:
    """Return SASRec's graph and parameters."""
    from flax import nnx
    from sasrec import SASRec

    return nnx.split(SASRec(task.config, nnx.Rngs(task.config.seed)))


def engine_form(task: Any) -> tuple[Any, Any]:
    """Return functions that place a batch, and that train on the one that was placed last."""
    import jax
    import optax
    from flax import nnx

    import tpu_embed

    engine, (graph, params) = task.engine, new_network(task)
    adam = optax.adam(task.config.learning_rate, b2=task.config.beta_2)
    state = engine.init(jax.random.key(0))
    now = SimpleNamespace(carry=(state, params, adam.init(params)), placed=None)

    def place(features: Any, known: Any) -> None:
        batch = engine.place(features)
        of_events = {k: v.place(engine, batch, features) for k, v in known.items() if k != "drawn"}
        now.placed = jax.block_until_ready((batch, {**known, **of_events}))

    @functools.partial(jax.jit, donate_argnums=0)
    def train(carry, batch, known):
        state, params, opt_state = carry
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
        rng = jax.random.fold_in(jax.random.key(0), state.step)

        def loss_fn(params, values):
            return task.loss(nnx.merge(graph, params), rebuild(values), known, rng=rng)

        by_params, by_values = jax.grad(loss_fn, (0, 1))(params, values)
        updates, opt_state = adam.update(by_params, opt_state, params)
        state = engine.update(state, batch, by_values)
        return state, optax.apply_updates(params, updates), opt_state

    def step(features: Any, known: Any) -> None:
        now.carry = jax.block_until_ready(train(now.carry, *now.placed))

    return place, step


def padded_form(task: Any, items: int) -> tuple[Any, Any]:
    """Return the same two functions of a table that is a parameter, and of padded histories."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from events import Events, drop
    from flax import nnx

    from tpu_embed import Jagged, retrieval

    config, (graph, params) = task.config, new_network(task)
    width, size = config.longest + 1, config.batch_size
    embed = nnx.split(nnx.Embed(items, config.dim, rngs=nnx.Rngs(0)))
    params, adam = (params, embed[1]), optax.adam(config.learning_rate, b2=config.beta_2)
    now = SimpleNamespace(carry=(params, adam.init(params), 0), placed=None)

    def place(features: Any, known: Any) -> None:
        ids, splits = np.full((size, width), -1, np.int32), features["history"].row_splits
        # The events of a history are first in its line, so positions and bits are the same.
        ids[np.arange(width) < np.diff(splits)[:, None]] = features["history"].values
        now.placed = jax.block_until_ready(jax.device_put((ids, known["drawn"])))

    @functools.partial(jax.jit, donate_argnums=0)
    def train(carry, ids, drawn):
        params, opt_state, number = carry
        rng = jax.random.fold_in(jax.random.key(0), number)

        def loss_fn(params):
            of_vectors, of_items = jax.random.split(rng)
            network, table = nnx.merge(graph, params[0]), nnx.merge(embed[0], params[1])
            rows = drop(table(jnp.maximum(ids, 0)), config.item_dropout, of_items, ids)
            wrong = drop(table(drawn), config.item_dropout, of_items, drawn)
            history = Jagged(rows.reshape(-1, config.dim), jnp.arange(size + 1) * width)
            events = Events(history, jnp.arange(size * width), of_vectors)
            vectors = network(events).reshape(rows.shape)[:, :-1]
            names = {"positive_ids": ids[:, 1:], "negative_ids": drawn}
            losses = retrieval.sampled_softmax(vectors, rows[:, 1:], wrong, **names, **task.scores)
            return losses.sum() / (ids[:, 1:] >= 0).sum()

        updates, opt_state = adam.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, number + 1

    def step(features: Any, known: Any) -> None:
        now.carry = jax.block_until_ready(train(now.carry, *now.placed))

    return place, step


def evaluation(task: Any, histories: Any) -> float:
    """Return the seconds of an evaluation, without its compilation."""
    import jax
    from flax import nnx

    state = task.engine.init(jax.random.key(0))
    report = SimpleNamespace(state=state, model=nnx.merge(*new_network(task)))
    measure = task.measure(histories, 2)
    measure(report)
    begin = time.perf_counter()
    measure(report)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
