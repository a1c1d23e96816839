"""Random requests: an engine, ids in a jit, `serving_lookup` and an export look up the same rows.

Engine and `serving_lookup` have the same bits. Ids in a jit and exports have gains that a program
made, which the host rounds once.

A case is a request; 40 in turn are asked of one world (`random_requests`), which is what compiles.
`make test` has 20 of a world whose features have every trait. Others:

    RANDOM_SEEDS=0:2000 python -m pytest tests/io/serving/test_random_requests.py -k many
"""

import functools
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from random_requests import PLAIN, World, dense, draw, draw_rows, written

from tpu_embed import Jagged

REQUESTS = 40
"""Of each world."""
CHOSEN = 2738
"""A world whose features had every kind of ids, weights and last ids when it was drawn."""
MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:40").split(":")))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Let `serving_lookup` round numbers of ids up so far that one program does for all."""
    monkeypatch.setattr("tpu_embed.io.serving.lookup._power_of_two", lambda n: 64)


@functools.lru_cache(1)
def world_of(seed):
    with tempfile.TemporaryDirectory() as root:
        return World(draw(seed), Path(root))


def same(found, expected, *, bits):
    """Compare activations by path; a `Jagged` may have more room than it needs."""
    for path, one in expected.items():
        got, end = found[path], None
        if isinstance(one, Jagged):
            np.testing.assert_array_equal(got.row_splits, one.row_splits, path)
            end = int(one.row_splits[0, -1])
            got, one = got.values[0], one.values[0]
        assert got.dtype == one.dtype
        if bits:
            np.testing.assert_array_equal(got[:end], one[:end], path, strict=True)
        else:
            np.testing.assert_allclose(got[:end], one[:end], 2e-6, 2e-6, err_msg=path)


def check_case(seed):
    number, request = divmod(seed, REQUESTS)
    try:
        world, rng = world_of(number), np.random.default_rng([number, request])
        check_arrays(world, rng)
        check_every_form(world, rng)
    except Exception as error:
        seeds, file = f"RANDOM_SEEDS={seed}:{seed + 1}", "tests/io/serving/test_random_requests.py"
        error.add_note(f"run it alone: {seeds} python -m pytest {file} -k many")
        raise


def check_arrays(world, rng):
    """Compare what is looked up by row number in arrays, placed and inside a jit."""
    ids, weights = {}, {}
    for path, feature in world.drawn.of(PLAIN).items():
        form = world.drawn.forms[path]._replace(given="dense")
        rows = draw_rows(rng, feature, form)
        scales = dense(rows.weights, form, form.width, 0.5)
        ids[path] = dense(rows.ids, form, form.width)
        weights[path] = None if form.weights == "none" else scales
    _, engine, state = world.engines[0]
    placed = engine.lookup(state, engine.place(ids, weights))
    for found in (
        world.traced(ids, weights),
        world.traced_serving(ids, weights),
        world.program(ids, weights),
    ):
        same(found, placed, bits=False)


def check_every_form(world, rng):
    """Compare what is looked up outside of a jit, in the form of each feature; then bad ids."""
    features, ids, weights = world.drawn.features, {}, {}
    for path, form in world.drawn.forms.items():
        ids[path], weights[path] = written(draw_rows(rng, features[path], form), form)
    placed = {}
    for names, engine, state in world.engines:
        some = world.drawn.of(names)
        given = ({path: leaves[path] for path in some} for leaves in (ids, weights))
        placed |= engine.lookup(state, engine.place(*given, training=False))
    same(world.served(ids, weights), placed, bits=True)
    same(world.model(ids, weights=weights), placed, bits=False)
    for path, feature in features.items():
        if feature.on_bad_id == "error" and feature.table.vocabulary is None:
            check_bad_id(world, path, (ids, weights), rng)


def check_bad_id(world, path, leaves, rng):
    """Check that a bad id of a feature is named by all."""
    feature, form = world.drawn.features[path], world.drawn.forms[path]
    rows, size = draw_rows(rng, feature, form), feature.table.vocabulary_size
    rows.ids[-1], rows.weights[-1] = [size + 3], [0.5]
    ids, weights = ({**x, path: y} for x, y in zip(leaves, written(rows, form), strict=True))
    text = re.escape(f"feature {path!r}: expected ids in [0, {size}) of table")
    calls = [lambda: world.served(ids, weights), lambda: world.model(ids, weights=weights)]
    for names, engine, _ in world.engines:
        if feature.table.name in names:
            mine = [{one: given[one] for one in world.drawn.of(names)} for given in (ids, weights)]
            calls.append(functools.partial(engine.place, *mine, training=False))
    for call in calls:
        with pytest.raises(ValueError, match=f"{text}.* got id {size + 3} at"):
            call()


@pytest.mark.parametrize("request_number", range(20))
def test_chosen(request_number):
    check_case(CHOSEN * REQUESTS + request_number)


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed):
    check_case(seed)
