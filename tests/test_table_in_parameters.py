"""The diffs of docs/your-table-in-parameters.md apply, run, and train the same model.

Each program of the page is taken as it stands there. Its first part, up to the loop, makes the
model; then the rows and the network get the first values of the original, and the loop runs.
"""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-table-in-parameters.md"
LOOKUP, ENGINE, LAYER = 0, 1, 2
LOOP = re.compile(r"^losses = ", re.MULTILINE)


@functools.cache
def fences(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


NNX = """\
from flax import nnx


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.rows = nnx.Embed(int(ROWS), DIM, rngs=rngs)
        self.bottom = nnx.List([nnx.Linear(13, 32, rngs=rngs), nnx.Linear(32, DIM, rngs=rngs)])
        self.top = nnx.List([nnx.Linear(DIM + 351, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)])

    def __call__(self, dense, ids):
        rows = self.rows(ids + OFFSETS)
        for layer in self.bottom:
            dense = nnx.relu(layer(dense))
        return self.top[1](nnx.relu(self.top[0](interact(dense, rows))))[:, 0]


layers = Layers(nnx.Rngs(0))
trainer = nnx.Optimizer(layers, optax.adagrad(0.05, 1e-4), wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def step_of_layers(layers, trainer, dense, ids, labels):
    def loss_fn(layers):
        return optax.sigmoid_binary_cross_entropy(layers(dense, ids), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(layers)
    trainer.update(layers, grads)
    return loss


losses = [float(step_of_layers(layers, trainer, *batch)) for batch in batches(50)]
"""
"""The model of the page in nnx, to which the diff of the third route applies."""


def programs():
    """Return the original of the first two routes, and that of the third."""
    (linen,) = (code for code in fences("python") if LOOP.search(code))
    return linen, NNX


def applied(diff, program):
    """Return a program after a diff, each hunk of which has to be found in it once, in order."""
    done, rest = "", program
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or line for line in lines if line[0] != "+")
        new = "".join(line[1:] or line for line in lines if line[0] != "-")
        assert rest.count(old) == 1, hunk
        before, rest = rest.split(old)
        done += before + new
    return done + rest


def changed(diff):
    """Return how many lines a diff adds beside imports."""
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    return len([line for line in added if line and not line.startswith(("import ", "from "))])


def started(program):
    """Run a program up to its loop; return its names, and the loop."""
    at = LOOP.search(program).start()
    names = {"__name__": "__page__"}
    exec(compile(program[:at], str(PAGE), "exec"), names)
    return names, program[at:]


def run(names, loop):
    """Run the loop of a program; return its losses and the table that it has trained."""
    exec(compile(loop, str(PAGE), "exec"), names)
    if "engine" in names:
        table = names["engine"].tables(names["tables"])["table"]
    else:
        layers = names.get("layers")
        table = names["params"]["table"] if layers is None else layers.rows.embedding[...]
    return np.array(names["losses"]), np.asarray(table)


@pytest.fixture(autouse=True)
def promote():
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        yield


@functools.cache
def first_values():
    with jax.numpy_dtype_promotion("standard"):
        names, _ = started(programs()[0])
    return jax.tree.map(np.asarray, names["params"])


@functools.cache
def original():
    return run(*started(programs()[0]))


def copied_to_layers(layers, load):
    """Give an nnx model the first values of the linen one."""
    first = first_values()
    load(layers.rows, first["table"])
    for number, layer in enumerate([*layers.bottom, *layers.top]):
        for name, value in first[f"Dense_{number}"].items():
            getattr(layer, name)[...] = value


def test_the_original_learns():
    losses, table = original()
    assert np.unique(losses).size == 50
    assert losses[-10:].mean() < losses[:10].mean()
    assert abs(table - first_values()["table"]).max() > 1e-3


def test_a_lookup_has_the_bits_of_the_original():
    """A row's gradients are added in the order of the ids, as the dense gradient's scatter does."""
    diff = fences("diff")[LOOKUP]
    assert changed(diff) == 3  # one of which is the optimizer
    found = run(*started(applied(diff, programs()[0])))
    jax.tree.map(np.testing.assert_array_equal, found, original())


def assert_near(found):
    """Compare a run with the original by what float32 leaves open.

    8 devices add up the parts of a batch, in another order than one does. 50 steps let such
    differences grow: losses near 0.7 were up to 1.7e-6 apart, depending on the first values, and
    the numbers of the table, which are below 1, up to 1.5e-7. An Adagrad without optax's epsilon of
    1e-7 is 5e-5 apart.
    """
    (losses, table), (expected_losses, expected_table) = found, original()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(table, expected_table, atol=1e-6)


def test_an_engine_trains_the_same_model():
    diff = fences("diff")[ENGINE]
    assert changed(diff) == 14
    names, loop = started(applied(diff, programs()[0]))
    rest = {name: part for name, part in first_values().items() if name != "table"}
    jax.tree.map(np.testing.assert_array_equal, names["params"], rest)  # it makes the same ones
    first = {"table": first_values()["table"]}
    names["tables"] = names["engine"].load_arrays(names["tables"], first)
    assert_near(run(names, loop))


def test_a_layer_trains_the_same_model():
    diff = fences("diff")[LAYER]
    assert changed(diff) == 3  # one of which is the optimizer
    linen, nnx = programs()
    before, after = linen[: linen.index("class DLRM")], linen[linen.index("def batches") :]
    shared = before + LOOP.split(after)[0]
    names, loop = started(shared + nnx)
    copied_to_layers(names["layers"], lambda rows, table: rows.embedding.set_value(table))
    assert_near(run(names, loop))
    names, loop = started(shared + applied(diff, nnx))
    copied_to_layers(names["layers"], lambda rows, table: rows.load(table))
    assert_near(run(names, loop))


def halves(loop):
    """Return a loop over the first 25 batches, and one over the others."""
    return [loop.replace("batches(50)", f"list(batches(50))[{part}]") for part in (":25", "25:")]


@functools.cache
def first_half():
    """Return what the original has trained after 25 steps, on the host, and its losses."""
    names, loop = started(programs()[0])
    losses, _ = run(names, halves(loop)[0])
    trained = {name: names[name] for name in ("params", "opt_state")}
    return jax.tree.map(np.array, trained), losses


def ported(route, snippet):
    """Run a program after a diff up to its loop, and a snippet of the page on what is trained.

    Args:
      route: which diff.
      snippet: a line of the snippet.
    """
    names, loop = started(applied(fences("diff")[route], programs()[0]))
    names |= first_half()[0]
    (code,) = (code for code in fences("python") if snippet in code)
    exec(compile(code, str(PAGE), "exec"), names)
    return names, halves(loop)[1]


def test_a_lookup_goes_on_with_the_state_of_an_optimizer_to_the_bit():
    names, loop = ported(LOOKUP, "ported_state = ")
    names["opt_state"] = names["ported_state"]
    losses, table = run(names, loop)
    found = np.concatenate([first_half()[1], losses]), table
    jax.tree.map(np.testing.assert_array_equal, found, original())


def test_an_engine_goes_on_with_a_trained_table():
    names, loop = ported(ENGINE, "tables = engine.load_arrays(")
    names |= {"params": names["network"], "opt_state": names["opt_state_of_network"]}
    losses, table = run(names, loop)
    assert_near((np.concatenate([first_half()[1], losses]), table))
