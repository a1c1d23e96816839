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
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
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


@pytest.mark.parametrize("path", FILES, ids=str)
def test_errors_have_one_wording(path):
    assert _unworded((PACKAGE / path).read_text()) == []


def test_another_wording_is_found():
    source = "raise ValueError('no')\nraise ValueError(message('x', expected='a', got='b'))\n"
    assert _unworded(source + "raise ValueError(f'{x}')") == [1, 3]


def _engine(*tables, optimizer=None, **options):
    features = [tpu_embed.FeatureConfig(table) for table in tables]
    return tpu_embed.EmbeddingEngine(features, optimizer, mesh=mesh(2), **options)


def _table(**options):
    return tpu_embed.TableConfig(**{"vocabulary_size": 4, "dim": 2, "name": "t"} | options)


EACH = o.SGD(0.1, use_gradient_accumulation=False)

CONSTRUCTIONS = {
    "no optimizer": (
        lambda: _engine(_table(), optimizer="adam"),
        r"^EmbeddingEngine: optimizer: expected one of tpu_embed\.optimizers, .* got 'adam'",
    ),
    "a table's": (
        lambda: _engine(_table(optimizer=3)),
        r"^table 't': optimizer: expected one of tpu_embed\.optimizers, .* got 3",
    ),
    "a global norm": (
        lambda: _engine(_table(optimizer=optax.clip_by_global_norm(1.0))),
        r"^table 't': optimizer 'clip_by_global_norm': expected a row-separable transform, got ",
    ),
    "a class": (lambda: _engine(_table(), optimizer=o.SGD), r"got .*SGD.*; make one: SGD\("),
    "two tables of one name": (
        lambda: _engine(_table(), _table()),
        r"^feature_config: expected a name of its own .* got 't' for tables 0, 1; rename one",
    ),
    "replicated, each by itself": (
        lambda: _engine(_table(placement="replicated", optimizer=EACH)),
        r"^table 't': use_gradient_accumulation: expected True for a replicated table, got False; ",
    ),
    "shard axes": (
        lambda: _engine(_table(shard_axes="rows")),
        r"^table 't': shard_axes: expected different axes of the mesh \('d',\), got \('rows',\)",
    ),
    "batch axes": (
        lambda: _engine(_table(), batch_axes="rows"),
        r"^batch_axes: expected different axes of the mesh \('d',\), got \('rows',\)",
    ),
    "a batch axis that is no name": (
        lambda: _engine(_table(), batch_axes=0),  # type: ignore[arg-type]
        r"^batch_axes: expected different axes of the mesh \('d',\), got \(0,\)",
    ),
    "blocks": (
        lambda: _engine(_table(), sum_blocks=0),
        r"^sum_blocks: expected an integer >= 1, got 0",
    ),
    "no mesh": (
        lambda: tpu_embed.EmbeddingEngine([tpu_embed.FeatureConfig(_table())], mesh="d"),  # type: ignore[arg-type]
        r"^mesh: expected a jax\.sharding\.Mesh or None, got str",
    ),
}


@pytest.mark.parametrize(("make", "said"), CONSTRUCTIONS.values(), ids=list(CONSTRUCTIONS))
def test_what_an_engine_refuses(make, said):
    with pytest.raises(ValueError, match=said):
        make()


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
