"""The program of a placed batch moves rows alone: it sorts nothing, and indexes no list of ids."""

import itertools

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, optimizers
from tpu_embed.core.batch import view_stacks
from tpu_embed.kernels import cpu, dispatch

B, D, LARGE = 32, 4, 1500
KERNELS = ["reference", "native"] if cpu.load().path is not None else ["reference"]
TABLES = {
    # name: rows, placement, combiner, optimizer, ids per bag
    "mod": (LARGE, "mod", "mean", optimizers.Adagrad(0.1), 1),
    "div": (LARGE, "div", "sqrtn", optimizers.Adam(0.1), 1),
    "many": (LARGE, "mod", "sum", optimizers.SGD(0.1), 12),
    "small": (3, "replicated", "mean", optimizers.Adagrad(0.1), 3),
    "large": (LARGE, "replicated", "sum", optimizers.Lion(0.1), 2),
}


def make_engine(devices, batch_axes):
    """Return an engine whose tables are stacks of their own; on two axes one splits the rows."""
    two = isinstance(devices, tuple)
    on = Mesh(np.array(jax.devices()).reshape(devices), ("x", "y")) if two else mesh(devices)
    features = {}
    for name, (size, placement, combiner, optimizer, _) in TABLES.items():
        split = "y" if two and placement != "replicated" else None
        options = {"combiner": combiner, "optimizer": optimizer, "shard_axes": split}
        table = TableConfig(size, D, name=name, placement=placement, **options)
        features |= {f"{name}/bag": FeatureConfig(table), f"{name}/row": FeatureConfig(table)}
    return EmbeddingEngine(features, mesh=on, batch_axes=batch_axes)


def draw(*, ragged, weighted):
    """Return ids, and weights of the bags."""
    rng, ids, weights = np.random.default_rng(0), {}, {}
    for name, (size, *_, hot) in TABLES.items():
        bags = rng.integers(0, size, (B, hot)).astype(np.int32)
        scales = rng.random((B, hot)).astype(np.float32) if weighted else None
        ids |= {f"{name}/row": bags[:, 0], f"{name}/bag": bags}
        weights |= {f"{name}/row": None, f"{name}/bag": scales}
        if ragged:
            ids[f"{name}/bag"] = RaggedIds(bags.ravel(), np.arange(B + 1) * hot)
            weights[f"{name}/bag"] = scales.ravel() if weighted else None
    return ids, weights


def equations(jaxpr):
    """Yield all equations of a program, of its branches, loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from equations(getattr(value, "jaxpr", value))


def of_ids(jaxpr):
    """Return the operations that sort, or that read or write a one-dimensional array by index."""
    found = []
    for equation in equations(jaxpr):
        name = str(equation.params.get("target_name", equation.primitive.name))
        indexed = "gather" in name or "scatter" in name
        collective = name in ("all_gather", "reduce_scatter")
        shape = equation.invars[0].aval.shape if equation.invars else ()
        if "sort" in name or (indexed and not collective and len(shape) < 2):
            found.append((name, shape))
    return found


def step_of(engine, ids, weights=None):
    """Return the program of a lookup and an update, whether the ids are placed or not."""
    state = jax.eval_shape(engine.init, jax.random.key(0))

    def step(state, ids, weights):
        activations = engine.lookup(state, ids, weights)
        return activations, engine.update(state, ids, activations, weights)

    return jax.make_jaxpr(step)(state, ids, weights).jaxpr


FORMATS = [(False, True), (True, False), (True, True)]
ON = [(2, None), (4, None), (8, None), ((2, 4), None), ((2, 4), "x")]


@pytest.mark.parametrize(
    ("devices", "batch_axes", "ragged", "weighted", "kernels"),
    [(*on, *form, kernels) for on, form, kernels in itertools.product(ON, FORMATS, KERNELS)],
)
@pytest.mark.quick(1)
def test_only_rows_are_moved(devices, batch_axes, ragged, weighted, kernels, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    engine = make_engine(devices, batch_axes)
    batch = engine.place(*draw(ragged=ragged, weighted=weighted))
    assert of_ids(step_of(engine, batch)) == []
    for view in view_stacks(batch.spec, engine.layout):
        assert view.by_psum == (view.stack.tables[0].name == "small")
        assert not view.is_local


def test_a_sort_would_be_seen():
    engine = make_engine(2, None)
    found = {name for name, _ in of_ids(step_of(engine, *draw(ragged=False, weighted=True)))}
    assert {"sort", "scatter"} <= found
