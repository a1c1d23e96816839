"""Which shard has which row: ids, ranges and arrays are cut into the rows of shards."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed.core.rows import Grid
from tpu_embed.core.rows.devices import below

grids = st.builds(Grid, st.integers(1, 8), st.integers(1, 9), st.booleans())


def place(grid, row):
    """Return the shard of a row, and its place there."""
    if grid.alternate:
        return row % grid.shards, row // grid.shards
    return row // grid.size, row % grid.size


@given(grids, st.data())
def test_every_id_is_cut_out_once(grid, data):
    size = grid.shards * grid.size
    if data.draw(st.booleans()):
        start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 5))
        ids = range(start, data.draw(st.integers(start, size)), step)
    else:
        ids = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True)), np.int64)
    found = {}
    for shard, local, at in grid.cut(ids):
        rows, places = (np.arange(max(size, len(ids)))[some] for some in (local, at))
        assert (np.diff(rows) > 0).all()
        found |= {int(i): (shard, int(row)) for i, row in zip(places, rows, strict=False)}
    assert found == {i: place(grid, int(row)) for i, row in enumerate(ids)}


@given(grids, st.data())
def test_ids_of_shards(grid, data):
    shards = sorted(data.draw(st.sets(st.integers(0, grid.shards - 1), min_size=1)))
    first = data.draw(st.integers(0, grid.size - 1))
    last = data.draw(st.integers(first, grid.size))
    size = grid.shards * grid.size
    places = {row: place(grid, row) for row in range(size)}
    wanted = [row for row, (s, at) in places.items() if s in shards and first <= at < last]
    found = grid.ids(shards, first, last)
    assert list(map(int, found)) == wanted
    limit = data.draw(st.integers(0, size))
    assert [int(row) for row in below(found, limit)] == [row for row in wanted if row < limit]
