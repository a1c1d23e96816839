"""What people see of vocabularies: figures of an engine and of a checkpoint, scalars to plot."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from living_cases import draw, engine, mesh, simple, train

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, TableConfig, io, metrics, nn
from tpu_embed import __main__ as command
from tpu_embed import optimizers as o
from tpu_embed.io.checkpoint import explain, statistics_of
from tpu_embed.vocabulary import QUANTILES, DynamicVocabulary

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
    def run(*args):
        """Return what the command prints."""
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "vocabulary", *map(str, args)])
        command.main()
        return capsys.readouterr().out

    return run


def expected_of(made, name, hottest):
    """Return the figures of a table by loops over its keys."""
    maps, found = made.vocabularies, {}
    scores, totals = maps.scores(name), dict(maps.admitted_counters[name])
    keys, step = totals.pop("keys"), maps.admitted
    pairs = zip(*(array.tolist() for array in scores[:4]), strict=True)
    rows = [
        dict(zip(("key", "row", "last_seen", "batches_seen"), one, strict=True)) for one in pairs
    ]
    ages = sorted(step - row["last_seen"] for row in rows)
    found["ages"] = {
        f"{share:g}": next(age for i, age in enumerate(ages) if i + 1 >= share * keys)
        for share in QUANTILES
    }
    for title, order in (
        ("most_batches", ("batches_seen", "last_seen")),
        ("seen_last", ("last_seen", "batches_seen")),
    ):
        best = sorted(rows, key=lambda row, o=order: (*(-row[field] for field in o), row["row"]))
        found[title] = best[:hottest]
    waiting = [*zip(scores.waiting_keys.tolist(), scores.waiting_counts.tolist(), strict=True)]
    best = sorted(waiting, key=lambda one: -one[1])[:hottest]
    found["waiting_most"] = [{"key": key, "count": count} for key, count in best]
    assert len(rows) == keys
    return found | {
        "step": step,
        "capacity": maps.capacity(name),
        "keys": keys,
        "occupancy": keys / maps.capacity(name),
        "waiting": len(waiting),
        "totals": totals,
        "per_step": {what: count / step for what, count in totals.items()},
    }


@pytest.mark.parametrize("hottest", [0, 3, 1000])
@pytest.mark.quick(1)
def test_figures_of_an_engine_are_those_of_its_checkpoint_and_of_loops(trained, hottest):
    made, _, path = trained
    found = metrics.vocabulary_statistics(made, hottest=hottest)
    assert found == {name: expected_of(made, name, hottest) for name in ("items", "tags")}
    assert found == statistics_of(path, hottest=hottest)
    assert found["tags"]["waiting"]
    assert found["items"]["totals"]["expired"]


def test_batches_that_are_placed_ahead_do_not_show(trained):
    made, state, _ = trained
    before = metrics.vocabulary_statistics(made), metrics.vocabulary_scalars(made)
    made.place(draw(90))
    assert (metrics.vocabulary_statistics(made), metrics.vocabulary_scalars(made)) == before
    made.vocabularies.rewind(state)


def test_scalars_are_flat_numbers_of_all_batches_and_of_the_last(trained):
    made, state, path = trained
    found, counted = metrics.vocabulary_scalars(made), metrics.counters(made, state)
    for name, one in counted["vocabularies"].items():
        last = made.vocabularies.last[name]
        for what, number in one.items():
            assert found.pop(f"vocabularies/{name}/{what}") == number
        for what in ("admitted", "evicted", "expired"):
            assert found.pop(f"vocabularies/{name}/last/{what}") == getattr(last, what).size
        assert found.pop(f"vocabularies/{name}/last/unseen") == last.unseen
    assert found == {}
    # What came and went in the last step is not kept.
    other = engine(1)
    io.restore(path, other)
    assert sorted(metrics.vocabulary_scalars(other)) == sorted(
        f"vocabularies/{name}/{what}"
        for name, one in counted["vocabularies"].items()
        for what in one
    )


def test_scalars_of_the_steps_add_up_to_the_totals():
    made, sums = engine(1), {}
    state = made.init(jax.random.key(0))
    for step in range(4):
        state, _ = train(made, state, 1, step)
        found = metrics.vocabulary_scalars(made)
        for tag, number in found.items():
            if "/last/" in tag:
                sums[tag.replace("/last", "")] = sums.get(tag.replace("/last", ""), 0) + number
    assert sums.items() <= found.items()
    assert sums["vocabularies/items/admitted"] > 0


def test_an_engine_without_keys_has_no_figures():
    made = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(4, 2)))
    for call in (metrics.vocabulary_scalars, metrics.vocabulary_statistics):
        with pytest.raises(ValueError, match=r"engine: expected a table with vocabulary="):
            call(made)
    made, _ = simple()
    with pytest.raises(ValueError, match="hottest"):
        metrics.vocabulary_statistics(made, hottest=-1)
    assert metrics.vocabulary_statistics(made)["t"]["ages"] == {}


def test_the_command_prints_json_with_all_figures(trained, run):
    made, _, path = trained
    assert json.loads(run(path, "--json")) == metrics.vocabulary_statistics(made)
    assert [*json.loads(run(path, "--json", "--table", "tags"))] == ["tags"]


def test_the_command_prints_a_table(trained, run):
    made, _, path = trained
    out = run(path, "--hottest", "2")
    one = metrics.vocabulary_statistics(made, hottest=2)["items"]
    share = f"{100 * one['occupancy']:.1f}"
    assert f"table 'items' at step 7: {one['keys']} of 34 rows have a key ({share} %)" in out
    lines = [line.split() for line in out.splitlines()]
    for what, total in one["totals"].items():
        assert [what, f"{total:,}", f"{one['per_step'][what]:,.3f}"] in lines
    for title in ("most_batches", "seen_last"):
        for row in one[title]:
            assert [str(row[field]) for field in row] in lines
    assert "keys that wait, with the largest counts" in out
    assert out == explain(metrics.vocabulary_statistics(made, hottest=2)) + "\n"


def test_the_command_runs_as_a_program(trained):
    _, _, path = trained
    python = [sys.executable, "-m", "tpu_embed", "vocabulary", str(path), "--table", "items"]
    done = subprocess.run(python, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("table 'items' at step 7")


def test_what_is_no_checkpoint_with_keys_is_an_error(trained, run, tmp_path):
    _, _, path = trained

    def refused(said, *args):
        with pytest.raises(SystemExit, match=said):
            run(*args)

    refused(r"error: checkpoint .*nowhere: expected a directory with tables", tmp_path / "nowhere")
    refused(
        r"error: --table: expected one of \['items', 'tags'\], got 'item'; did you mean",
        path,
        "--table",
        "item",
    )
    refused("error: --hottest", path, "--hottest", "-1")
    plain = tpu_embed.EmbeddingEngine(FeatureConfig(TableConfig(4, 2, name="users")))
    io.save(tmp_path / "plain", plain, plain.init(jax.random.key(0)))
    refused(r"expected tables with vocabulary=DynamicVocabulary\(…\)", tmp_path / "plain")
    model = nn.Embed(4, 2, rngs=nnx.Rngs(0))
    io.save_modules(tmp_path / "model", {"model": model})
    refused(r"expected tables with vocabulary=", tmp_path / "model")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "tables").mkdir()
    refused("tables.json", damaged)


def test_a_managers_directory_names_its_checkpoints(trained, run, tmp_path):
    made, state, _ = trained
    with io.CheckpointManager(tmp_path / "run", made, in_background=False) as manager:
        manager.save(7, state)
    with pytest.raises(SystemExit, match=r"the checkpoints of a manager: give one of .*run/7"):
        run(tmp_path / "run")
    assert "table 'tags' at step 7" in run(tmp_path / "run" / "7")


def test_a_table_on_the_host_shows_its_keys_at_home(run, tmp_path):
    words = DynamicVocabulary(admit_after=2)
    storage = HostStorage(device_rows=8)
    table = TableConfig(40, 2, name="words", vocabulary=words, storage=storage)
    made = tpu_embed.EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.1), mesh=mesh(1))
    state = made.init(jax.random.key(0))
    state = made.set_rows(state, "words", keys=np.arange(25), values=np.ones((25, 2)))
    state, _ = made.admit(state, made.place(np.array([3, 99])))
    io.save(tmp_path / "saved", made, state)
    found = json.loads(run(tmp_path / "saved", "--json"))
    assert found == metrics.vocabulary_statistics(made)
    assert (found["words"]["keys"], found["words"]["waiting"]) == (25, 1)
    assert found["words"]["most_batches"][0] == {
        "key": 3,
        "row": 3,
        "batches_seen": 2,
        "last_seen": 2,
    }
