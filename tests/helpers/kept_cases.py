"""Small runs whose files are kept in the repository, and what must come out of these files.

    python tests/helpers/kept_cases.py tests/data/0.2.0

writes the files of the version that is imported. Those of a version are made once, before its
successor changes anything, and stay as they are. The runs here are declared as the newest version
spells it; what they write, and the numbers in `expected.npz`, are of the version that made them.

Numbers are small multiples of powers of two wherever a compiler may choose the order of products
and sums, so that a run that goes on has the same bits on every processor. Random numbers are made
with the hash of the tests (`quick_random.py`): a change of it asks for files made with it.

    static     a checkpoint: every placement, a stack, bfloat16, random rounding, a network
    by_row     an export of it: rows of float32 and bfloat16, and int8; and a delta to it
    living     a checkpoint: keys with a shared row, keys at home on the host, ids at home
    by_key     an export of it from before, and the delta in between
    modules    a checkpoint of flax layers of all three kinds, a network and its optimizer
    fit        the directory of a run with a jagged feature
"""

import functools
import sys
from pathlib import Path

if __name__ == "__main__":  # where no conftest.py does so
    import os

    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quick_random
from facade_cases import mesh
from flax import nnx
from loop_cases import Stateful, on_host

import tpu_embed
from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig, io, nn
from tpu_embed import optimizers as o

B, SAVED, MORE = 8, 2, 2
"""Examples of a batch; steps before files are written; steps of a run that goes on from them."""

BY_ROW = tpu_embed.RowIdInitializer()
RANDOM = {"dtype": "bfloat16", "rounding": "stochastic"}
HALVES = {"beta_1": 0.5, "beta_2": 0.5}


def drawn(key, shape, dtype):
    """Draw multiples of a sixteenth in [0, 1)."""
    return jnp.floor(jax.random.uniform(key, shape, dtype) * 16) / 16


def train(engine, state, steps, *, touched=None):
    """Return the state, which is donated, after some steps, recorded if there is a record."""
    for _ in range(steps):
        number = int(state.step) + 1
        features = draw(engine, number)
        state, batch = engine.admit(state, engine.place(features))
        if touched is not None:
            touched.record(batch, number)
        rng = np.random.default_rng([1, number])
        gradients = {
            name: (rng.integers(-64, 65, (B, table.dim)) / 1024).astype(np.float32)
            for name, table in sorted(engine.table_configs.items())
        }
        state = engine.update_in_place(state, batch, gradients)
    return state


def draw(engine, number):
    """Return a batch of bags of two; keys are of 64 bits and drift with the number."""
    rng, found = np.random.default_rng(number), {}
    for name, table in sorted(engine.table_configs.items()):
        if table.vocabulary is None:
            found[name] = rng.integers(0, table.vocabulary_size, (B, 2))
        else:
            found[name] = (rng.integers(0, 12, (B, 2)) + number) * (2**40 + 3)
    return found


def bits(values):
    """Return arrays on the host; numbers of 16 bits and random keys as integers."""

    arrays = {name: on_host(one) for name, one in values.items()}
    half = jnp.bfloat16
    return {n: x.view(np.uint16) if x.dtype == half else x for n, x in arrays.items()}


def under(start, found):
    """Return arrays with a longer name each."""
    return {f"{start} {name}": one for name, one in found.items()}


def leaves(tree):
    """Return the leaves of a pytree by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


# -- rows by number ------------------------------------------------------------------------------


def static_engine(devices):
    """Return an engine whose tables are on the devices, as the tests of the files restore it."""
    div = {"placement": "div", "dtype": "bfloat16"}
    rules = {
        "films.v1/EU": (11, 3, {"optimizer": o.Adagrad(0.5)}),
        "tags": (5, 3, {"optimizer": o.Adagrad(0.5)}),  # in a stack with the films
        "users": (7, 2, {"optimizer": o.Adam(0.25, **HALVES), **div}),
        "days": (4, 2, {"optimizer": o.RowWiseAdagrad(0.5), "placement": "replicated"}),
        "optax": (6, 2, {"optimizer": optax.sgd(lambda step: 0.5, momentum=0.5)}),
        "rounded": (9, 2, {"optimizer": o.SGD(0.5), **RANDOM}),
        "fixed": (5, 2, {"trainable": False}),
    }
    shared = {"initializer": BY_ROW, "combiner": "sum"}
    features = {
        name: FeatureConfig(TableConfig(size, dim, name=name, **shared, **rest))
        for name, (size, dim, rest) in rules.items()
    }
    return EmbeddingEngine(features, mesh=mesh(devices))


NETWORK = {
    "kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 8,
    "half": np.arange(3).astype(jnp.bfloat16),
    "count": np.int32(7),
}
POSITION = {"epoch": 3, "name": "ü", "left": [1, 2.5, None]}


def of_static(engine, state):
    """Return all tables and slots, and the step."""
    return bits({"step": state.step} | leaves(engine.tables(state)) | leaves(engine.slots(state)))


ROW_TABLES = ("films.v1/EU", "users", "optax")
"""The tables that are exported; the last one as int8."""


def row_request():
    """Return ids by table, with padding."""
    rng = np.random.default_rng(9)
    sizes = dict(zip(ROW_TABLES, (11, 7, 6), strict=True))
    return {name: rng.integers(-1, size, (4, 3)) for name, size in sizes.items()}


def answers(root, name, request):
    """Return what an export answers, before and after its delta."""
    model = io.load_model(root / name)
    found = under(f"{name} before", model(request))
    return bits(found | under(f"{name} after", model.apply(root / f"{name}_delta")(request)))


def make_static(root):
    engine = static_engine(2)
    state, touched = engine.init(jax.random.key(3)), io.TouchedRows(engine)
    state = train(engine, state, SAVED, touched=touched)
    io.save(root / "static", engine, state, model=NETWORK, position=POSITION, touched=touched)
    found = under("static saved", of_static(engine, state))

    version, whole = touched.version(state), engine.tables(state)
    tables = {name: whole[name] for name in ROW_TABLES}
    tables["optax"] = io.quantize_rows(tables["optax"])
    features = {name: FeatureConfig(engine.table_configs[name]) for name in ROW_TABLES}
    features["users"] = FeatureConfig(engine.table_configs["users"], max_sequence_length=2)
    example = {name: np.zeros((1, 3), np.int32) for name in ROW_TABLES}
    export = functools.partial(io.export_model, platforms="cpu", version=version)
    export(root / "by_row", lambda a: a, tables, features, example)
    state = train(engine, state, MORE, touched=touched)
    io.export_delta(root / "by_row_delta", engine, state, touched, since=version)
    found |= answers(root, "by_row", row_request())
    return found | under("static after", of_static(engine, state))


# -- keys, and rows at home on the host ----------------------------------------------------------


def living_engine(devices):
    """Return an engine of keys on the devices, of keys on the host, and of ids on the host."""
    shared = DynamicVocabulary(admit_after=2, unseen="shared")
    host = tpu_embed.HostStorage(device_rows=20)
    tables = [
        TableConfig(12, 2, drawn, name="query", vocabulary=shared, **RANDOM),
        TableConfig(30, 2, drawn, name="both", vocabulary=DynamicVocabulary(ttl=2), storage=host),
        TableConfig(40, 2, drawn, name="far", storage=host),
    ]
    features = {one.name: FeatureConfig(one) for one in tables}
    return EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(devices), lookahead=0)


def of_rows(engine, state, slot="accumulators"):
    """Return keys, and all rows with a slot that somebody can look up."""
    found = {"step": state.step}
    for name, table in sorted(engine.table_configs.items()):
        rows = np.arange(table.vocabulary_size)
        if table.vocabulary is not None:
            keys, rows = engine.vocabularies.keys(name)
            order = np.argsort(keys)
            found[f"{name} keys"], rows = keys[order], rows[order]
            if table.vocabulary.unseen == "shared":
                rows = np.append(rows, table.vocabulary_size - 1)
        for part in (None, slot):
            found[f"{name} {part}"] = engine.rows(state, name, rows, slot=part)
    return bits(found)


def key_tables(engine, state):
    """Return what tables of `living_engine` are exported from."""
    rows = {name: functools.partial(engine.rows, state, name) for name in engine.table_configs}
    found = {"query": rows["query"](np.arange(12)), "both": rows["both"]}
    return found | {"far": io.host_table(engine, state, "far")}


def key_request():
    """Return keys and ids by table, some of them new."""
    return draw(living_engine(1), 5)


def make_living(root):
    engine = living_engine(2)
    state, touched = engine.init(jax.random.key(4)), io.TouchedRows(engine)
    state = train(engine, state, SAVED, touched=touched)
    io.save(root / "gone", engine, state)  # rows of it are linked by the next one
    version = touched.version(state)
    features = {name: FeatureConfig(one) for name, one in engine.table_configs.items()}
    io.export_model(
        root / "by_key", lambda a: a, key_tables(engine, state), features, draw(engine, 0),
        version=version, vocabularies=engine.vocabularies, platforms="cpu",
    )  # fmt: skip
    state = train(engine, state, MORE, touched=touched)
    io.export_delta(root / "by_key_delta", engine, state, touched, since=version)
    io.save(root / "living", engine, state, touched=touched)
    found = under("living saved", of_rows(engine, state))
    found |= answers(root, "by_key", key_request())
    return found | under("living after", of_rows(engine, train(engine, state, MORE)))


# -- flax modules --------------------------------------------------------------------------------


def modules_of(devices):
    """Return modules by name: layers of all kinds, a network and its optimizer."""
    rule, rngs = {"optimizer": o.Momentum(0.5, momentum=0.5)}, nnx.Rngs(5)
    home = tpu_embed.HostStorage(device_rows=20)
    tables = {
        "films": TableConfig(11, 2, BY_ROW, name="films", **rule),
        "tags": TableConfig(20, 2, drawn, name="t", vocabulary=DynamicVocabulary(), **rule),
        "far": TableConfig(40, 2, drawn, name="t", storage=home, **rule),
    }
    made = {
        name: nn.EmbeddingBag(table, mesh=mesh(devices), lookahead=0, rngs=rngs)
        for name, table in tables.items()
    }
    dense = nnx.Linear(2, 1, kernel_init=nnx.initializers.constant(0.5), rngs=rngs)
    model = nnx.Dict(**made, dense=dense, dropout=nnx.Dropout(0.5, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


@nnx.jit
def _train_modules(model, optimizer, batches, wanted):
    def loss(model):
        found = sum(model[name](batches[name]) for name in ("films", "tags", "far"))
        # Linear in each of them: numbers stay short, and sums exact.
        return (model.dense(model.dropout(found))[:, 0] * wanted).mean()

    optimizer.update(model, nn.fused_value_and_grad(loss)(model)[1])


def train_modules(modules, numbers):
    """Train on batches of these numbers."""
    for number in numbers:
        rng = np.random.default_rng(number)
        ids = {name: rng.integers(0, 11, (B, 2)) for name in ("films", "tags", "far")}
        ids["tags"] = (ids["tags"] + number) * (2**40 + 3)
        batches = nn.admit(modules["model"], nn.place(modules["model"], ids))
        wanted = rng.integers(-2, 3, B).astype(np.float32)
        _train_modules(modules["model"], modules["optimizer"], batches, wanted)


def of_modules(modules):
    """Return rows and slots of layers by id or key, and all other arrays."""
    found, model = {}, modules["model"]
    for name in ("films", "tags", "far"):
        layer = model[name]
        found |= under(name, of_rows(layer.engine, layer.state, "momenta"))
    rest = nnx.state(nnx.Dict(modules), nnx.Not((nn.Table, nn.Slot, nn.Counter, nn.MapVersion)))
    return bits(found | leaves(nnx.to_pure_dict(rest)))


def make_modules(root):
    modules = modules_of(2)
    train_modules(modules, range(SAVED))
    io.save_modules(root / "modules", modules, position=POSITION)
    found = under("modules saved", of_modules(modules))
    train_modules(modules, range(SAVED, SAVED + MORE))
    return found | under("modules after", of_modules(modules))


# -- a run of fit --------------------------------------------------------------------------------


def batches(count):
    """Yield bags of one id and of several."""
    for number in range(count):
        rng = np.random.default_rng(number)
        splits = np.append(0, np.cumsum(rng.permutation(np.arange(B) % 3)))
        seen = tpu_embed.RaggedIds(rng.integers(0, 9, splits[-1]), splits)
        yield {"item": rng.integers(0, 9, B), "seen": seen}, rng.integers(-2, 3, B).astype("f4")


class Network(nnx.Module):
    """Dropout, so that a step moves a random stream, and a linear layer."""

    def __init__(self):
        rngs = nnx.Rngs(6)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(2, 1, kernel_init=nnx.initializers.constant(0.5), rngs=rngs)


def _loss(network, activations, wanted):
    found = activations["item"] + activations["seen"].sums()
    return (network.dense(network.dropout(found))[:, 0] * wanted).mean()


def run_fit(directory, steps, devices):
    """Train, or go on, for so many steps in all; return all that was trained."""
    table = TableConfig(9, 2, BY_ROW, name="items")
    features = {"item": FeatureConfig(table), "seen": FeatureConfig(table, jagged=True)}
    engine = EmbeddingEngine(features, o.Momentum(0.5, momentum=0.5), mesh=mesh(devices))
    options = {"steps": steps, "directory": directory, "keep": 1, "progress": False}
    options |= {"model": Network(), "optimizer": optax.sgd(0.5, momentum=0.5)}
    report = tpu_embed.fit(engine, _loss, Stateful(8, batches), **options)
    network = leaves(nnx.to_pure_dict(nnx.state(report.model)))
    return of_static(engine, report.state) | bits(network)


def make_fit(root):
    found = under("fit saved", run_fit(root / "fit", SAVED, 2))
    return found | under("fit after", run_fit(root / "gone fit", SAVED + MORE, 2))


def main(root):
    """Write all files of this version."""
    expected = {}
    for make in (make_static, make_living, make_modules, make_fit):
        expected |= make(root)
    np.savez_compressed(root / "expected.npz", **expected)
    print(f"tpu_embed {tpu_embed.__version__}, JAX {jax.__version__}: {len(expected)} arrays")


if __name__ == "__main__":
    quick_random.install()
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # no paths of a machine
    main(Path(sys.argv[1]))
