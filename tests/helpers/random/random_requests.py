"""Random worlds to serve: tables of every kind, features of every form, and requests for them.

A world is what takes long to compile: engines, and one model of all features that is exported. Any
number of requests is then asked of it, each of other ids. An id may be valid, bad, of a key that is
unseen, or missing; the last id of a row is more often than others.
"""

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from random_optimizers import choose

import tpu_embed
from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig, io

BATCH, INNER, ROWS, DIM = 5, 2, 7, 2
"""Examples of a batch, bags of each example where it has several, rows of small tables, and D."""
NAMES = [f"item {n}" for n in range(6)]
KEYS = [int(key) for key in tpu_embed.hash_ids(NAMES, None)]
KNOWN = KEYS[:3]
"""The keys that have a row; those of the other names are unseen."""
PLAIN, KEYED = ("rows",), ("home", "living", "living home")
"""The tables of each engine; only ids of the first one may be looked up inside a jit."""
KINDS = ("one", "bag", "bags", "sequence", "jagged")


class Form(namedtuple("Form", "kind width longest given weights")):
    """How the ids of a feature are given.

    Attributes:
      kind: one of `KINDS`.
      width: H of the exported program.
      longest: the most ids that a row of a request has, H or H - 1.
      given: "dense", "masked", "sparse", "ragged", "lists" or "strings".
      weights: "none", "beside" or "inside".
    """

    @property
    def rows(self):
        """How many bags or sequences a batch has."""
        return BATCH * (INNER if self.kind == "bags" else 1)

    @property
    def is_flat(self):
        """Whether a missing id has a place at the end of its row, and -1 is not padding."""
        return self.kind != "one" and self.given not in ("dense", "masked")


Rows = namedtuple("Rows", "ids weights")
"""The ids of each row of a feature, None for a missing one, and a weight for each."""


class Drawn(namedtuple("Drawn", "features forms has_fixed_batch")):
    """What a world is made of: features and their forms, by path."""

    def of(self, names):
        """Return the features of some tables by path."""
        return {path: one for path, one in self.features.items() if one.table.name in names}


# -- what is drawn -------------------------------------------------------------------------------


def first_row(key, shape, dtype):
    """Return first values that differ by key and are quick to compile."""
    number = jax.random.key_data(key)[-1] >> 8
    return jnp.full(shape, number.astype(dtype) / np.asarray(2**24, dtype))


def draw(seed):
    """Return what a world is made of."""
    rng = np.random.default_rng(seed)
    drawn = Drawn({}, {}, bool(rng.random() < 0.5))
    for table in _draw_tables(rng):
        last = "one" if table.name == "home" else choose(rng, ("bag", "bags"))
        for kind in ("sequence", "jagged", last):
            path = f"{table.name} {len(drawn.features)} {kind}"
            drawn.forms[path] = _draw_form(rng, table, kind)
            drawn.features[path] = _draw_feature(rng, table, kind, drawn.has_fixed_batch)
    return drawn


def _draw_tables(rng):
    """Return a table of each kind; one of those with keys has a row that unseen keys share."""
    grid = tpu_embed.QuantizationConfig(9, -0.5, 0.5)

    def table(name, size, **options):
        options["combiner"] = choose(rng, ("sum", "mean", "sqrtn"))
        options["quantization_config"] = choose(rng, (None, None, grid))
        return TableConfig(size, DIM, first_row, name=name, **options)

    one, other = (DynamicVocabulary(unseen=u) for u in rng.permutation(["zero", "shared"]))
    home = tpu_embed.HostStorage(device_rows=4)
    return [
        table("rows", ROWS, dtype=choose(rng, ("float32", "bfloat16"))),
        table("home", 2**40, storage=home),
        table("living", ROWS, vocabulary=one),
        table("living home", ROWS, vocabulary=other, storage=home),
    ]


def _draw_form(rng, table, kind):
    """Return how a feature of this table is given."""
    several = {"one": ["lists"], "bags": ["sparse"]}.get(kind, ["sparse", "ragged", "lists"])
    strings = ["strings"] if table.vocabulary is not None and kind != "bags" else []
    given = choose(rng, ["dense", "masked", *several, *strings])
    weights = ["none"] if kind == "one" else ["none", "beside"]
    weights += ["inside"] if given in ("sparse", "ragged") else []
    width = int(rng.integers(3, 5))
    return Form(kind, width, width - int(rng.integers(2)), given, choose(rng, weights))


def _draw_feature(rng, table, kind, has_fixed_batch):
    """Return the configuration of a feature."""
    options, length = {"on_bad_id": choose(rng, ("error", "drop", "clip"))}, 0
    if kind in ("sequence", "jagged"):
        length = choose(rng, (1, 1, 2, 2, 4) if kind == "sequence" else (0, 1, 1, 2, 2, 4))
    if length:
        options["keep"] = choose(rng, ("first", "last", "last", "last", "last"))
    if kind in ("one", "bag", "bags") and has_fixed_batch:
        options["output_shape"] = (BATCH, INNER) if kind == "bags" else (BATCH,)
    return FeatureConfig(table, length, jagged=kind == "jagged", **options)


def draw_rows(rng, feature, form):
    """Return the ids of a feature, with weights."""
    found, scale = Rows([], []), choose(rng, (1.0, 2.0**-70))  # whose square is no float32
    # Rows of the same lengths in another order, so that few programs compile.
    lengths = [1] * BATCH if form.kind == "one" else np.arange(form.rows) % (form.longest + 1)
    for length in rng.permutation(lengths):
        row = [_draw_id(rng, feature, form, 0.2) for _ in range(length)]
        if row and rng.random() < 0.5:
            row[-1] = _draw_id(rng, feature, form, 0.7)
        # Such a row is refused by a served model.
        if row and row[-1] is None and form.kind == "jagged" and feature.on_bad_id == "clip":
            row[-1] = 1 if form.is_flat and feature.table.vocabulary is None else None
        found.ids.append(row)
        found.weights.append([scale * float(w) for w in rng.choice([-1.5, 0.0, 0.5, 2.0], length)])
    return found


def _draw_id(rng, feature, form, odd):
    """Return an id, which is missing, unseen or bad with some odds."""
    table = feature.table
    if table.storage is not None and table.vocabulary is None and form.kind == "one":
        # Rows that nobody has trained, in every request about as many: few programs compile.
        return int(rng.integers(2**33, 2**39))
    if rng.random() < odd / 2:
        return None
    if table.vocabulary is not None:
        return choose(rng, KEYS[3:] if rng.random() < odd else KNOWN)
    if rng.random() < odd and feature.on_bad_id != "error":
        size = table.vocabulary_size
        return choose(rng, [size, size + 3, -2] + ([-1] if form.is_flat else []))
    return int(rng.integers(ROWS))


# -- how users write it --------------------------------------------------------------------------


def written(rows, form):
    """Return ids and weights as a user gives them."""
    ids, scales = rows.ids, None if form.weights == "none" else rows.weights
    if form.given in ("dense", "masked"):
        ids = dense(ids, form, form.longest)
        if form.given == "masked":
            ids = np.ma.masked_array(np.where(ids == -1, 1, ids), ids == -1)
        return ids, None if scales is None else dense(scales, form, form.longest, 0.5)
    if form.given == "strings":
        ids = [[None if key is None else NAMES[KEYS.index(key)] for key in row] for row in ids]
    if form.kind == "one":
        return [row[0] for row in ids], None
    if form.given in ("lists", "strings"):
        return ids, scales
    sparse = functools.partial(_sparse, form)
    make = tpu_embed.RaggedIds.from_lists if form.given == "ragged" else sparse
    if form.weights == "inside":
        return make(ids, weights=scales), None
    return make(ids), None if scales is None else make(scales)


def _sparse(form, rows, weights=None):
    """Return rows as `SparseIds`."""
    one = tpu_embed.SparseIds.from_lists(rows, width=form.longest, weights=weights)
    if form.kind != "bags":
        return one
    row, column = one.indices.T
    indices = np.stack([*np.divmod(row, INNER), column], axis=1)
    return tpu_embed.SparseIds(indices, one.values, (BATCH, INNER, form.longest), one.weights)


def dense(rows, form, width, fill=-1):
    """Return rows as an array `[B]`, `[B, H]` or `[B, K, H]`, padded; what is missing is -1."""
    dtype = np.int64 if fill == -1 else np.float32
    found = np.full((len(rows), 1 if form.kind == "one" else width), fill, dtype)
    for r, row in enumerate(rows):
        found[r, : len(row)] = [fill if x is None else x for x in row]
    shape = {"one": (BATCH,), "bags": (BATCH, INNER, width)}.get(form.kind, (BATCH, width))
    return found.reshape(shape)


# -- what it is asked of -------------------------------------------------------------------------


class World:
    """Tables with rows, engines, and a model of all features that was exported and loaded.

    Attributes:
      drawn: the features.
      engines: names of tables, the engine that has them, and its state; of each.
      tables: of all features, for `serving_lookup`.
      maps: the rows of keys.
      model: the loaded model.
      traced, traced_serving: look up row numbers inside a jit, in the engine or for serving.
    """

    def __init__(self, drawn, root):
        self.drawn = drawn
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
        rule = tpu_embed.optimizers.SGD(0.5)
        plain, keyed = (EmbeddingEngine(drawn.of(n), rule, mesh=mesh) for n in (PLAIN, KEYED))
        state, homes = plain.init(jax.random.key(0)), _filled(keyed)
        self.engines = (PLAIN, plain, state), (KEYED, keyed, homes)
        self.maps = keyed.vocabularies
        self.tables = {
            "rows": np.asarray(plain.tables(state)["rows"]),
            "home": io.host_table(keyed, homes, "home"),
            "living": keyed.rows(homes, "living", np.arange(ROWS)),
            "living home": functools.partial(keyed.rows, homes, "living home"),
        }
        self.model = self._exported(root / "model")
        self.traced = jax.jit(lambda *given: plain.lookup(state, *given))
        plain_tables = {name: self.tables[name] for name in PLAIN}
        lookup = jax.jit(lambda tables, *x: io.serving_lookup(tables, x[0], drawn.of(PLAIN), x[1]))
        self.traced_serving = functools.partial(lookup, plain_tables)

    def served(self, ids, weights):
        """Return what `serving_lookup` finds for features of any tables."""
        given = self.tables, ids, self.drawn.features, weights
        return io.serving_lookup(*given, vocabularies=self.maps)

    def _exported(self, path):
        """Return a model of all features, which was exported."""
        examples, weights = {}, {}
        for label, form in self.drawn.forms.items():
            examples[label] = dense([[0]] * form.rows, form, form.width)
            scales = dense([[1.0]] * form.rows, form, form.width, 1.0)
            weights[label] = None if form.weights == "none" else scales
        options = {"vocabularies": self.maps, "platforms": "cpu", "weights": weights}
        options["batch"] = BATCH if self.drawn.has_fixed_batch else None
        given = self.tables, self.drawn.features, examples
        io.export_model(path, lambda found: found, *given, **options)
        return io.load_model(path)

    def program(self, ids, weights):
        """Return what the program itself makes of row numbers; other features are empty."""
        given, scales, model = {}, {}, self.model
        for path, one in model.metadata["features"].items():
            shape = [BATCH, *one["shape"][1:]]
            given[path] = np.asarray(ids.get(path, np.full(shape, -1)), one["dtype"])
            if one["weights"]:
                scales[path] = np.asarray(weights.get(path, np.ones(shape)), one["weights"])
        tables = dict(model.tables)
        tables["home"] = {**tables["home"], "first": np.zeros((8, DIM), np.float32)}
        return model._program(tables, given, scales)


def _filled(engine):
    """Return a state in which some keys, and some ids of the table on the host, have a row."""
    rng = np.random.default_rng(0)
    state = engine.init(jax.random.key(1))
    for name, numbers in {"living": KNOWN, "living home": KNOWN, "home": range(ROWS - 1)}.items():
        values = rng.normal(size=(len(numbers), DIM)).astype(np.float32)
        rows = {"rows" if name == "home" else "keys": np.array(numbers)}
        state = engine.set_rows(state, name, values=values, **rows)
    return state
