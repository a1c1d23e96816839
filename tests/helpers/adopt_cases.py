"""Engines of the same tables in many arrangements, and what a state holds of each row or key."""

import jax
import numpy as np
from facade_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.rows import host_arrays
from tpu_embed.core.state import field, slot_shapes

STATIC = {"clicks": 21, "tags": 13}
NEVER = 4
"""The last rows of the static tables, which no batch has."""
LIVING = DynamicVocabulary()
WAITING = DynamicVocabulary(admit_after=2, evict="lfu", unseen="shared")


def features(capacity=16, placement="auto", on_host=(), device_rows=24, living=LIVING, words=12):
    """Return features of two living and two static tables, with three optimizers.

    Args:
      capacity: of the living table "items", which has the dim and the optimizer of "clicks".
      placement: of all tables on the devices.
      on_host: names of tables on the host.
      device_rows: how many rows the devices hold of each of these.
      living: the vocabulary of "items".
      words: the capacity of the living table "words", whose unseen keys share a row.
    """

    def table(name, size, dim, rule, **options):
        if name in on_host:
            options["storage"] = HostStorage(device_rows=device_rows)
        if name not in on_host or placement == "div":
            options["placement"] = placement
        options |= {"optimizer": rule, "initializer": jax.nn.initializers.normal(0.3)}
        return FeatureConfig(TableConfig(size, dim, name=name, **options))

    return {
        "items": table("items", capacity, 4, o.Adagrad(0.5), vocabulary=living),
        "clicks": table("clicks", STATIC["clicks"], 4, o.Adagrad(0.5)),
        "tags": table("tags", STATIC["tags"], 2, o.Adam(0.1), dtype="bfloat16"),
        "words": table("words", words, 2, o.FTRL(0.2), vocabulary=WAITING),
    }


def engine(devices=1, stack_tables=True, lookahead=0, on_bad_gradient="allow", **options):
    """Return an engine of these tables."""
    given = {"stack_tables": stack_tables, "lookahead": lookahead}
    given |= {"mesh": mesh(devices), "on_bad_gradient": on_bad_gradient}
    return tpu_embed.EmbeddingEngine(features(**{"placement": "mod", **options}), **given)


def draw(rng, keys=20, size=8):
    """Return a batch of 8 examples; keys are below `keys`, but far apart."""
    few = rng.integers(0, keys, (size, 2)).astype(np.uint64)
    return {
        "items": few * np.uint64(2**61 + 3),
        "clicks": rng.integers(0, STATIC["clicks"] - NEVER, (size, 1)),
        "tags": rng.integers(0, STATIC["tags"] - NEVER, (size, 2)),
        "words": rng.integers(0, keys, (size, 1)).astype(np.uint64),
    }


def ids_of(made, name):
    """Return what names the rows of a table, and their row numbers: keys and "shared", or rows."""
    table = made.layout.table(name)[1]
    if table.key_rules is None:
        rows = np.arange(table.declared_size)
        return rows.tolist(), rows
    keys, rows = made.vocabularies.keys(name)
    names = keys.tolist()
    if table.key_rules.unseen == "shared":
        names, rows = [*names, "shared"], np.append(rows, table.declared_size - 1)
    return names, rows


def contents(made, state):
    """Return what a state holds, by (table, slot, key or row); a shared slot has the key None."""
    found, hosted = {}, [table.name for _, table in made.layout.on_host]
    whole = None if hosted else host_arrays(state, made.layout)
    for name in ("items", "clicks", "tags", "words"):
        names, rows = ids_of(made, name)
        for slot in (None, *slot_shapes(made.layout.table(name)[0])):
            f = field(made.layout, name, slot)
            if not f.shape.per_row:
                found[name, slot, None] = np.asarray(f.read(state)).tolist()
                continue
            if whole is None:
                values = made.rows(state, name, rows, slot=slot)
            else:
                values = (whole[0][name] if slot is None else whole[1][name][slot])[rows]
            found |= {(name, slot, x): row.tobytes() for x, row in zip(names, values, strict=True)}
    return found


def map_contents(made):
    """Return what the maps of keys hold, by table: of each key its scores; and the rest."""
    states, found = made.vocabularies.states(), {}
    for name in ("items", "words"):
        one = (dict(states.maps) | dict(states.ids))[name]
        scores = zip(one.last_seen.tolist(), one.batches_seen.tolist(), strict=True)
        found[name] = {
            "keys": dict(zip(one.keys.tolist(), scores, strict=True)),
            "waiting": [one.waiting_keys.tolist(), one.waiting_counts.tolist()],
            "step": int(one.step),
            "counters": one.counters.tolist(),
        }
    return found


def scramble(made, state, seed):
    """Return a state with random numbers in all arrays; rows at home get some, too."""
    rng = np.random.default_rng(seed)

    def drawn(array):
        whole = array.dtype.kind in "iu"
        numbers = rng.integers(1, 99, array.shape) if whole else rng.normal(size=array.shape)
        return jax.device_put(np.asarray(numbers, array.dtype), array.sharding)

    tables, slots = jax.tree.map(drawn, (state.tables, state.slots))
    for name in () if made.storage is None else made.storage.tables:
        made.storage.flush()
        rows = ids_of(made, name)[1].astype(np.uint64)
        rows = rows[: -NEVER if name in STATIC else None]
        home, some = made.storage[name], rng.permutation(rows)[: rows.size * 2 // 3]
        shapes = {n: (some.size, *one.shape) for n, one in home.fields.items()}
        drawn_rows = {n: rng.integers(1, 99, shape) for n, shape in shapes.items()}
        home.write(some, {n: x.astype(home.fields[n].dtype) for n, x in drawn_rows.items()})
    return type(state)(tables, slots, drawn(state.step), state.counters, state.vocabulary)
