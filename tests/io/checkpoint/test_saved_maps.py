"""What people see of vocabularies: figures of an engine and of a checkpoint, scalars to plot."""

import json
import math
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from living_cases import draw, engine, on_host, simple, train

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, io, metrics, nn
from tpu_embed import __main__ as command
from tpu_embed.io.checkpoint import statistics_of
from tpu_embed.vocabulary import QUANTILES

STEPS = 7


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return an engine with two living tables, its state, and a checkpoint of it."""
    made = engine(1)
    state, _ = train(made, made.init(jax.random.key(0)), STEPS)
    path = tmp_path_factory.mktemp("saved") / "step"
    io.save(path, made, state)
    return made, state, path


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that calls the command, and returns what it prints."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "vocabulary", *map(str, args)])
        command.main()
        return capsys.readouterr().out

    return run


def expected_of(made, name, hottest):
    """Return the figures of a table by loops over its keys."""
    maps, names = made.vocabularies, ("key", "row", "last_seen", "batches_seen")
    scores, totals = maps.scores(name), dict(maps.admitted_counters[name])
    keys, step, capacity = totals.pop("keys"), maps.admitted, maps.capacity(name)
    pairs = zip(*(array.tolist() for array in scores[:4]), strict=True)
    rows = [dict(zip(names, one, strict=True)) for one in pairs]
    ages = sorted(step - row["last_seen"] for row in rows)

    def best(*order):
        return sorted(rows, key=lambda row: (*(-row[field] for field in order), row["row"]))

    waiting = [*zip(scores.waiting_keys.tolist(), scores.waiting_counts.tolist(), strict=True)]
    most = sorted(waiting, key=lambda one: -one[1])[:hottest]
    assert len(rows) == keys
    return {
        "ages": {f"{share:g}": ages[math.ceil(share * keys) - 1] for share in QUANTILES},
        "most_batches": best("batches_seen", "last_seen")[:hottest],
        "seen_last": best("last_seen", "batches_seen")[:hottest],
        "waiting_most": [{"key": key, "count": count} for key, count in most],
        "step": step,
        "capacity": capacity,
        "keys": keys,
        "occupancy": keys / capacity,
        "waiting": len(waiting),
        "totals": totals,
        "per_step": {what: count / step for what, count in totals.items()},
    }


@pytest.mark.parametrize("hottest", [0, 3, 1000])
@pytest.mark.quick(1)
def test_figures_of_an_engine_are_those_of_its_checkpoint_and_of_loops(trained, hottest):
    made, state, path = trained
    scalars = metrics.vocabulary_scalars(made)
    made.place(draw(90))  # what is placed ahead does not show
    found = metrics.vocabulary_statistics(made, hottest=hottest)
    assert metrics.vocabulary_scalars(made) == scalars
    made.vocabularies.rewind(state)
    assert found == {name: expected_of(made, name, hottest) for name in ("items", "tags")}
    assert found == statistics_of(path, hottest=hottest)
    assert found["tags"]["waiting"]
    assert found["items"]["totals"]["expired"]


def test_scalars_are_flat_numbers_of_all_batches_and_of_the_last(trained):
    made, state, path = trained
    found, counted = metrics.vocabulary_scalars(made), metrics.counters(made, state)
    expected = {
        f"vocabularies/{name}/{what}": number
        for name, one in counted["vocabularies"].items()
        for what, number in one.items()
    }
    # What came and went in the last step is not kept.
    io.restore(path, other := engine(1))
    assert metrics.vocabulary_scalars(other) == expected
    for name, last in made.vocabularies.last.items():
        for what in ("admitted", "evicted", "expired"):
            expected[f"vocabularies/{name}/last/{what}"] = getattr(last, what).size
        expected[f"vocabularies/{name}/last/unseen"] = last.unseen
    assert found == expected


def test_an_engine_without_keys_has_no_figures():
    made = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(4, 2)))
    for call in (metrics.vocabulary_scalars, metrics.vocabulary_statistics):
        with pytest.raises(ValueError, match=r"engine: expected a table with vocabulary="):
            call(made)
    made, _ = simple()
    with pytest.raises(ValueError, match="hottest"):
        metrics.vocabulary_statistics(made, hottest=-1)
    assert metrics.vocabulary_statistics(made)["t"]["ages"] == {}


def test_the_command_prints_a_table_or_json(trained, run):
    made, _, path = trained
    assert json.loads(run(path, "--json")) == metrics.vocabulary_statistics(made)
    assert [*json.loads(run(path, "--json", "--table", "tags"))] == ["tags"]
    out = run(path, "--hottest", "2")
    one = metrics.vocabulary_statistics(made, hottest=2)["items"]
    share = f"{100 * one['occupancy']:.1f}"
    assert f"table 'items' at step 7: {one['keys']} of 34 rows have a key ({share} %)" in out
    lines = [line.split() for line in out.splitlines()]
    for what, total in one["totals"].items():
        assert [what, f"{total:,}", f"{one['per_step'][what]:,.3f}"] in lines
    for row in one["most_batches"] + one["seen_last"]:
        assert [str(row[field]) for field in row] in lines
    assert "keys that wait, with the largest counts" in out


def test_what_is_no_checkpoint_with_keys_is_an_error(trained, run, tmp_path):
    made, state, path = trained
    plain = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(4, 2, name="users")))
    io.save(tmp_path / "plain", plain, plain.init(jax.random.key(0)))
    io.save_modules(tmp_path / "model", {"model": nn.Embed(4, 2, rngs=nnx.Rngs(0))})
    (tmp_path / "damaged" / "tables").mkdir(parents=True)
    with io.CheckpointManager(tmp_path / "run", made, in_background=False) as manager:
        manager.save(7, state)
    for said, *args in (
        (r"checkpoint .*nowhere: expected a directory with tables", tmp_path / "nowhere"),
        (r"--table: expected one of \['items', 'tags'\], got 'item'", path, "--table", "item"),
        ("error: --hottest", path, "--hottest", "-1"),
        (r"expected tables with vocabulary=DynamicVocabulary\(…\)", tmp_path / "plain"),
        (r"expected tables with vocabulary=", tmp_path / "model"),
        ("tables.json", tmp_path / "damaged"),
        (r"the checkpoints of a manager: give one of .*run/7", tmp_path / "run"),
    ):
        with pytest.raises(SystemExit, match=said):
            run(*args)
    assert "table 'tags' at step 7" in run(tmp_path / "run" / "7")


def test_a_table_on_the_host_shows_its_keys_at_home(run, tmp_path):
    made, state = on_host(40, 8, admit_after=2)
    state = made.set_rows(state, "t", keys=np.arange(25), values=np.ones((25, 2)))
    state, _ = made.admit(state, made.place({"x": np.array([3, 99])}))
    io.save(tmp_path / "saved", made, state)
    found = json.loads(run(tmp_path / "saved", "--json"))
    assert found == metrics.vocabulary_statistics(made)
    assert (found["t"]["keys"], found["t"]["waiting"]) == (25, 1)
    hottest = {"key": 3, "row": 3, "batches_seen": 2, "last_seen": 2}
    assert found["t"]["most_batches"][0] == hottest
