"""Ctrl-C anywhere in `set_rows`: it has happened, or nothing of it, and it can be called again."""

from pathlib import Path

import jax
import numpy as np
import pytest
from interrupt_cases import Interrupt, ends_within, from_a_signal
from living_cases import KEY, ids, mesh, on_host, simple, train_once

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.storage import HostRows

FILES = """
storage/homes storage/host_rows core/layout/arrivals core/engine/admitter
core/state/new_rows core/engine/logical_rows processes/messages
core/rows/devices vocabulary/vocabularies vocabulary/timeline vocabulary/table_maps vocabulary/map
"""
IN_SET_ROWS = {f"{Path(tpu_embed.__file__).parent}/{name}.py" for name in FILES.split()}
ROWS = 40
STRIDES = [17, pytest.param(1, marks=pytest.mark.whole)]
VALUES = np.array([[5.0, 6], [7, 8]], np.float32)


def by_id():
    """Return an engine of a table of ids on the host, and its first state."""
    drawn, storage = jax.nn.initializers.normal(), HostStorage(device_rows=6)
    feature = FeatureConfig(TableConfig(ROWS, 2, drawn, name="items", storage=storage))
    made = tpu_embed.EmbeddingEngine(feature, o.Adagrad(0.5), mesh=mesh(1), lookahead=0)
    return made, made.init(jax.random.key(0))


def is_in_set_rows(code):
    return code.co_filename in IN_SET_ROWS


def sweep(stride, begin, call, check):
    """Interrupt a call at its points, one after the other, until it has no more of them.

    Args:
      stride: of the points.
      begin: returns what the others get, anew for each point.
      call: calls `set_rows`.
      check: checks what an interrupted call has left, and repeats it.
    """
    assert all(Path(name).is_file() for name in IN_SET_ROWS)
    for at in range(1, 20_000, stride):
        given = begin()
        with ends_within(60):
            with Interrupt(is_in_set_rows, at, from_a_signal, only_signals=True) as interrupt:
                call(*given)
            if interrupt.seen < at:
                break
            check(*given)
    assert at > 50


def content(made, state):
    """Return all keys with their rows and slots, wherever these are."""
    keys = np.sort(made.vocabularies.keys("t")[0])
    slots = (None, "accumulators") if made.storage else (None,)
    return keys, [made.rows(state, "t", keys=keys, slot=slot) for slot in slots]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("make", [simple, on_host])
def test_of_keys(make, stride):
    """If the step is admitted, its state is lost, because it was not returned."""
    made, first = make(4)
    undone = []

    def begin():
        made.vocabularies.rewind(first)
        state = made.init(jax.random.key(KEY))
        for keys in ((1, 2), (3, 3)):
            state = train_once(made, state, *keys)
        return state, content(made, state), made.vocabularies.admitted

    def call(state, *_):
        return made.set_rows(state, "t", keys=[2, 9], values=VALUES)

    def check(state, before, admitted):
        maps = made.vocabularies
        assert maps.placed == maps.admitted
        if maps.admitted == admitted:
            undone.append(state)
            jax.tree.map(np.testing.assert_array_equal, content(made, state), before)
            state = call(state)
            jax.tree.map(np.testing.assert_array_equal, content(made, state), after)
            made.place(ids(1, 2))  # no turn is left behind that it would wait for

    after = content(made, call(*begin()))
    sweep(stride, begin, call, check)
    assert len(undone) > 3


@pytest.mark.parametrize("stride", STRIDES)
def test_of_ids_on_the_host(stride):
    """Some of the rows are on the devices, some at home, and some were never touched."""
    made, first = by_id()
    given, values, lost = [1, 5, 9], np.arange(1.0, 7).reshape(3, 2), []

    def rows(state):
        return [made.rows(state, "items", np.arange(ROWS), slot=s) for s in (None, "accumulators")]

    def begin():
        made.vocabularies.rewind(first)
        state = made.init(jax.random.key(0))
        for some in ((1, 2, 3, 4), (5, 6, 7, 8)):
            state, batch = made.admit(state, made.place(np.array(some)))
            state = made.update_in_place(state, batch, made.lookup(state, batch))
        return state, rows(state), made.touched("items").tolist()

    def call(state, *_):
        return made.set_rows(state, "items", given, values)

    def check(state, before, touched):
        if made.touched("items").tolist() == touched:
            jax.tree.map(np.testing.assert_array_equal, rows(state), before)
        else:
            lost.append(state)
        state = call(state)
        expected = before[0].copy()
        expected[given] = values
        np.testing.assert_array_equal(rows(state)[0], expected)

    sweep(stride, begin, call, check)
    # Only on the way out of the call, when all is written, is a state lost that was not returned.
    assert len(lost) <= 2


@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_written_at_home_is_undone_if_another_process_fails(keyed, monkeypatch, refused):
    """The error of another process comes after the rows of this one were written."""
    made, state = on_host(4) if keyed else by_id()
    rows, keys = (None, [1, 2, 3]) if keyed else ([1, 2, 3], None)
    if keyed:
        state = train_once(made, train_once(made, state, 1, 2), 3, 4)
    (name,) = made.table_configs

    def read():
        return made.rows(state, name, rows, keys=keys)

    def call():
        return made.set_rows(state, name, rows, np.ones((3, 2)), keys=keys)

    before, written, write = read(), [], HostRows.write

    def refuse(what, path, function):
        found, count = function(), len(written)
        if count and "set_rows" in what:
            raise OSError("process 1 failed: disk gone")
        return found

    def watched(*given):
        write(*given)
        written.append(1)

    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "write", watched)
        patched.setattr("tpu_embed.core.engine.logical_rows.raise_on_all", refuse)
        refused("disk gone", call, error=OSError)
    np.testing.assert_array_equal(read(), before)
    state = call()
    np.testing.assert_array_equal(read(), np.ones((3, 2)))
