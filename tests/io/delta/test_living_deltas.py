"""A server that follows living tables by deltas has what a full export would have, to the bit.

`make test-all` plays 17 cases of 60 actions each. Any others:

    RANDOM_SEEDS=1000:1500 python -m pytest tests/io/delta/test_living_deltas.py -k many
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fresh_cases import World, same

MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "10:27").split(":")))
ACTIONS = {"train": 0.43, "edit": 0.1, "follow": 0.25, "save": 0.09, "kill": 0.08, "move": 0.05}


def play(world, actions):
    for action in world.rng.choice([*ACTIONS], actions, p=[*ACTIONS.values()]):
        getattr(world, action)()
    whole, (features, weights) = world.export(), world.draw(99)
    if world.model.version != whole.version:
        world.follow()
    for name, table in world.model.tables.items():
        if name == "users":
            same(table, whole.tables[name])
            continue
        (keys, rows), (all_keys, all_rows) = world.model.keys(name), whole.keys(name)
        np.testing.assert_array_equal(keys, all_keys)
        for part, array in table.items():
            mine, theirs = np.asarray(array), np.asarray(whole.tables[name][part])
            assert mine[np.append(rows, 0)].tobytes() == theirs[np.append(all_rows, 0)].tobytes()
    same(world.model(features, weights=weights), whole(features, weights=weights))


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many_servers_follow(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lookahead = int(rng.integers(2))
    host = None if rng.random() < 0.5 else 17 + 6 * lookahead
    play(World(tmp_path, seed, int(rng.choice([1, 2, 4, 8])), host, lookahead), 60)
