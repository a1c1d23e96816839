"""Every error has one wording: what is wrong, what was expected, and what was got."""

import ast
import contextlib
import gc
import weakref
from pathlib import Path

import optax
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import optimizers as o

PACKAGE = Path(tpu_embed.__file__).parent
KINDS = ("ValueError", "TypeError", "RuntimeError")
WORDINGS = ("message", "error", "_error")
"""`_checks.message`, and what is made of it."""


def _unworded(source):
    """Return the lines of those `raise`s whose message is put together by hand."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        kind = ast.unparse(node.exc.func).split(".")[-1]
        text = node.exc.args[0] if node.exc.args else None
        worded = isinstance(text, ast.Call) and ast.unparse(text.func).split(".")[-1] in WORDINGS
        handed_on = isinstance(text, ast.Name) or node.cause is not None
        if kind in KINDS and not worded and not handed_on:
            found.append(node.lineno)
    return found


def test_errors_have_one_wording():
    files = {path: _unworded(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {path: lines for path, lines in files.items() if lines}


def test_another_wording_is_found():
    source = "raise ValueError('no')\nraise ValueError(message('x', expected='a', got='b'))\n"
    assert _unworded(source + "raise ValueError(f'{x}')") == [1, 3]


EACH = o.SGD(0.1, use_gradient_accumulation=False)
AXES = r"expected different axes of the mesh \('d',\), got"
NORM = optax.clip_by_global_norm(1.0)
REFUSED = [  # what is said; options of the table and of the engine
    (r"^EmbeddingEngine: optimizer: .*\.optimizers, .* got 'adam'", {}, {"optimizer": "adam"}),
    (r"^table 't': optimizer: expected one of .*\.optimizers, .* got 3", {"optimizer": 3}, {}),
    (r"optimizer 'clip_by_global_norm': expected a row-separable", {"optimizer": NORM}, {}),
    (r"got .*SGD.*; make one: SGD\(", {}, {"optimizer": o.SGD}),
    (r"True for a replicated table, got", {"placement": "replicated", "optimizer": EACH}, {}),
    (rf"^table 't': shard_axes: {AXES} \('rows',\)", {"shard_axes": "rows"}, {}),
    (rf"^batch_axes: {AXES} \('rows',\)", {}, {"batch_axes": "rows"}),
    (rf"^batch_axes: {AXES} \(0,\)", {}, {"batch_axes": 0}),
    (r"^sum_blocks: expected an integer >= 1, got 0", {}, {"sum_blocks": 0}),
    (r"^mesh: expected a jax\.sharding\.Mesh or None, got str", {}, {"mesh": "d"}),
]


@pytest.mark.parametrize(("said", "of_table", "options"), REFUSED)
def test_what_an_engine_refuses(said, of_table, options):
    table = tpu_embed.TableConfig(4, 2, name="t", **of_table)
    with pytest.raises(ValueError, match=said):
        tpu_embed.EmbeddingEngine([tpu_embed.FeatureConfig(table)], **{"mesh": mesh(2)} | options)


def test_two_tables_of_one_name_are_refused():
    features = [tpu_embed.FeatureConfig(tpu_embed.TableConfig(4, 2, name="t")) for _ in range(2)]
    said = "^feature_config: expected a name of its own .* got 't' for tables 0, 1; rename one"
    with pytest.raises(ValueError, match=said):
        tpu_embed.EmbeddingEngine(features)


def test_a_refusal_keeps_nothing_alive():
    class Held:
        pass

    def refused(held):
        tpu_embed.TableConfig(0, held and 2, name="t")

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            refused(held)
        del held
        assert gone() is None
    finally:
        gc.enable()
