"""Gowalla: a step of `examples/published` beside the same network with flax and optax alone.

    python benchmarks/published_gowalla.py --data gowalla [--program factors] [--train [--validate]]

The other form has its tables as `nnx.Embed` among the parameters, pads the places of a user, and
lets `optax.adam` pass over all of them in each step. Network, loss, drawn places and rates are the
same. Both get the same batches, in turns. Prints milliseconds to place a batch and to train on it,
and steps a second with both. With `--train` the other form alone trains to the end, and recall@20
and NDCG@20 are printed: what this network learns without the library.
"""

from __future__ import annotations

import argparse
import functools
import importlib
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
    """Print a line per form and their ratio; or train the other form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of the three files")
    parser.add_argument("--program", default="towers", choices=["towers", "factors"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    parser.add_argument("--train", action="store_true", help="the other form, to the end")
    parser.add_argument("--validate", action="store_true", help="measure on valid.txt")
    args = parser.parse_args()
    common.emulate(1)
    sys.path += [str(ROOT / "examples"), str(ROOT / "examples" / "published")]

    import gowalla

    program = importlib.import_module(args.program)
    name = f"{args.program}_gowalla.py"
    config = SimpleNamespace(**runpy.run_path(str(ROOT / "configs" / "published" / name)))
    config.seed, config.epochs = args.seed, args.epochs or config.epochs
    visits = gowalla.load(args.data, validate=args.validate)
    engine, tower, loss, source, *_ = program.prepare(config, visits)
    print(common.machine())
    other = Dense(config, visits, tower)
    if args.train:
        begin = time.perf_counter()
        for item in source:
            other.place(*item)
            other.step()
        recall, ndcg = other.measure()
        minutes = (time.perf_counter() - begin) / 60
        print(f"flax and optax: recall@20 {recall:.4f} NDCG@20 {ndcg:.4f}, {minutes:.1f} minutes")
        return
    items = list(itertools.islice(source, args.rounds + 1))
    calls = {}
    for form in (Engine(engine, tower, loss, config, visits), other):
        given = iter(items)
        calls[f"{form.name}, place"] = functools.partial(place_next, form, given)
        calls[f"{form.name}, step"] = form.step
    spent = common.interleaved(calls, args.rounds)
    both = {}
    for name in (Engine.name, Dense.name):
        place, step = spent[f"{name}, place"], spent[f"{name}, step"]
        both[name] = place + step
        each = f"place {place:6.2f} ms, step {step:6.2f} ms"
        print(f"  {name:15s}{each}, {1e3 / both[name]:6.1f} steps/s")
    print(f"  engine / flax and optax: {both[Engine.name] / both[Dense.name]:.2f}")


def place_next(form: Any, items: Any) -> None:
    """Place the next batch."""
    form.place(*next(items))


class Engine:
    """The program of `examples/published`, a step at a time."""

    name = "engine"

    def __init__(self, engine: Any, tower: Any, loss: Any, config: Any, visits: Any):
        import gowalla
        import jax
        import optax
        from flax import nnx

        import tpu_embed

        adam = optax.adam(gowalla.learning_rate(config, visits))
        graph, params = nnx.split(tower)
        self.carry = engine.init(jax.random.key(config.seed)), params, adam.init(params)
        self.engine, self.placed = engine, None

        @functools.partial(jax.jit, donate_argnums=0)
        def train(carry, batch, ids):
            state, params, opt_state = carry
            values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))

            def loss_fn(params, values):
                models = [] if tower is None else [nnx.merge(graph, params)]
                return loss(*models, rebuild(values), ids)

            by_params, by_values = jax.grad(loss_fn, (0, 1))(params, values)
            updates, opt_state = adam.update(by_params, opt_state, params)
            state = engine.update(state, batch, by_values)
            return state, optax.apply_updates(params, updates), opt_state

        self.train = train

    def place(self, features: Any, ids: Any) -> None:
        import jax

        self.placed = jax.block_until_ready((self.engine.place(features), jax.device_put(ids)))

    def step(self) -> None:
        import jax

        self.carry = jax.block_until_ready(self.train(self.carry, *self.placed))


class Dense:
    """The same network with its tables among the parameters."""

    name = "flax and optax"

    def __init__(self, config: Any, visits: Any, tower: Any):
        import gowalla
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        init = {"embedding_init": nnx.initializers.normal(config.init_scale)}
        sizes, rngs = {"users": visits.users, "items": visits.items}, nnx.Rngs(config.seed)
        tables = {n: nnx.Embed(size, config.dim, rngs=rngs, **init) for n, size in sizes.items()}
        graph, params = nnx.split((nnx.Dict(tables), tower))
        params = jax.tree.map(jnp.copy, params)  # the tower's are those of the other form, too
        adam = optax.adam(gowalla.learning_rate(config, visits))
        self.config, self.visits, self.placed = config, visits, None
        self.carry = params, adam.init(params)

        def found(tables, ids):
            rows = {"user": tables["users"](ids["user"])}
            if "been" in ids:
                kept = (ids["been"] >= 0)[..., None]
                been = jnp.where(kept, tables["items"](jnp.maximum(ids["been"], 0)), 0)
                rows["been"] = been.sum(axis=1) / jnp.maximum(kept.sum(axis=1), 1)
            names = {"item", "drawn"} & ids.keys()
            return rows | {name: tables["items"](ids[name]) for name in names}

        def vectors(tower, rows):
            return rows["user"] if tower is None else tower(rows)

        @functools.partial(jax.jit, donate_argnums=0)
        def train(carry, features, ids):
            params, opt_state = carry

            def loss_fn(params):
                tables, tower = nnx.merge(graph, params)
                rows = found(tables, features)
                return gowalla.loss_of(config, vectors(tower, rows), rows, ids)

            updates, opt_state = adam.update(jax.grad(loss_fn)(params), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        @jax.jit
        def queries(params, features):
            tables, tower = nnx.merge(graph, params)
            return vectors(tower, found(tables, features))

        self.train, self.queries, self.graph = train, queries, graph

    def place(self, features: Any, ids: Any) -> None:
        import jax

        self.placed = jax.block_until_ready(jax.device_put((padded(features, self.config), ids)))

    def step(self) -> None:
        import jax

        self.carry = jax.block_until_ready(self.train(self.carry, *self.placed))

    def measure(self) -> tuple[float, float]:
        """Return recall and NDCG as the program measures them."""
        import gowalla
        import histories
        import jax
        import numpy as np
        from flax import nnx

        from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig

        params, visits = self.carry[0], self.visits
        tables, tower = nnx.merge(self.graph, params)
        trained = tables["items"].embedding[...]

        def initial(key, shape, dtype, shard_info):
            return trained[shard_info.rows]

        table = TableConfig(*trained.shape, name="items", initializer=initial)
        engine = EmbeddingEngine({"item": FeatureConfig(table)})

        def parts():
            for start in range(0, visits.users, gowalla.USERS_AT_ONCE):
                end = start + gowalla.USERS_AT_ONCE
                users = np.minimum(np.arange(start, end), visits.users - 1)
                been = histories.padded(visits.of(users))
                features = {"user": users} | ({} if tower is None else {"been": been})
                yield self.queries(params, features), been

        state, top = engine.init(jax.random.key(0)), gowalla.TOP
        return histories.rank(engine, state, parts(), visits.wanted, top, score="cosine")


def padded(features: Any, config: Any) -> dict[str, Any]:
    """Return the ids of a batch; the places of each user are a line padded with -1."""
    import numpy as np

    features = dict(features)
    if "been" in features:
        rows = features["been"]
        lines = np.full((len(rows.row_splits) - 1, config.longest), -1, np.int32)
        lines[np.arange(config.longest) < np.diff(rows.row_splits)[:, None]] = rows.values
        features["been"] = lines
    return features


if __name__ == "__main__":
    main()
