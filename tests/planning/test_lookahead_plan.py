"""What a plan says of batches that wait for their update, beside engines that place them."""

import json
import sys

import jax
import numpy as np
import pytest
from living_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, planning
from tpu_embed import optimizers as o
from tpu_embed.__main__ import main

IDS, AHEAD = 16, 2
RULE = o.Adagrad(0.1)


def on_host(rows):
    storage = HostStorage(device_rows=rows)
    return {"x": FeatureConfig(TableConfig(2**40, 4, name="items", storage=storage))}


def living(rows):
    words = DynamicVocabulary()
    return {"x": FeatureConfig(TableConfig(rows, 4, name="items", vocabulary=words))}


def batch(number):
    """Return a batch that shares no id with those of other numbers."""
    return {"x": IDS * number + np.arange(IDS).reshape(8, 2)}


def planned(features, ids=None, target=2, **options):
    ids = batch(0) if ids is None else ids
    return planning.plan(features, RULE, target, ids, lookahead=AHEAD, **options)


def engine(features, devices=2):
    return tpu_embed.EmbeddingEngine(features, RULE, mesh=mesh(devices), lookahead=AHEAD)


def place_some(made, count=AHEAD + 3):
    """Place batches that share no row, each ahead of the ones before it."""
    for number in range(count):
        made.place(batch(number))
    return made.vocabularies.counters["items"]["unseen"]


def test_rows_on_the_devices_are_those_that_place_needs():
    needed = planned(on_host(1000)).tables[0].lookahead_rows
    assert needed == (AHEAD + 1) * IDS
    place_some(engine(on_host(needed)))
    with pytest.raises(ValueError, match=rf"HostStorage\(device_rows={needed}\)"):
        place_some(engine(on_host(needed - 1)))
    assert "items: 3 batches" not in planned(on_host(needed)).explain()
    said = " ".join(planned(on_host(needed - 1)).explain().split())
    assert f"items: 3 batches may have {needed} rows, and {needed - 1} have room" in said
    assert f"HostStorage(device_rows={needed}) has room for all" in said


def test_rows_of_a_living_vocabulary_are_those_that_all_keys_get():
    needed = planned(living(1000)).tables[0].lookahead_rows
    assert place_some(engine(living(needed))) == 0
    assert place_some(engine(living(needed - 1))) > 0
    said = " ".join(planned(living(needed - 1)).explain().split())
    assert f"a capacity of {needed} has room for all" in said


def test_of_uniform_ids_some_are_in_several_batches():
    shapes = {"x": jax.ShapeDtypeStruct((8, 2), np.int32)}
    tables = {"large": 2**40, "small": 20}
    found = {}
    for name, size in tables.items():
        storage = HostStorage(device_rows=20)
        table = TableConfig(size, 4, name="items", storage=storage)
        found[name] = planned({"x": FeatureConfig(table)}, shapes).tables[0].lookahead_rows
    assert found["large"] == (AHEAD + 1) * IDS
    assert IDS < found["small"] < 20
    few = TableConfig(20, 4, name="items", storage=HostStorage(device_rows=20))
    assert planned({"x": FeatureConfig(few)}).tables[0].lookahead_rows == 20


@pytest.mark.parametrize("make", [on_host, living])
def test_batches_ahead_take_the_bytes_of_placed_ones(make):
    """Their ids, and their activations, which a pipelined loop has looked up."""
    found, made = planned(make(100), target=mesh(1)), engine(make(100), devices=1)
    state, placed = made.init(jax.random.key(0)), []
    for number in range(AHEAD + 1):
        one = made.place(batch(number), spec=found.spec)
        state, one = made.admit(state, one)
        placed.append((one.packed, made.lookup(state, one)["x"]))
    waiting = sum(array.nbytes for pair in placed[1:] for array in pair)  # the first is trained on
    assert found.passing["ahead"] == waiting > 0
    alone = planning.plan(make(100), RULE, mesh(1), batch(0))
    assert "ahead" not in alone.passing
    assert found.bytes_per_device == alone.bytes_per_device + waiting


def test_a_remedy_leaves_the_rows_of_batches_ahead_on_the_devices():
    table = TableConfig(2**22, 64, name="items")
    ids = {"x": np.arange(2**15).reshape(-1, 2)}
    for ahead in (0, 40):
        options = {"memory": 2**27, "lookahead": ahead}
        found = planning.plan({"x": FeatureConfig(table)}, RULE, "v5e:2x2", ids, **options)
        (remedy,) = [one for one in found.remedies if "HostStorage" in one]
        rows = int(remedy.split("device_rows=")[1].split(")")[0])
        assert rows >= (ahead + 2) * 2**15
        assert ("would fit" in remedy) == (ahead == 0)


CONFIG = """
import numpy as np
import tpu_embed

def workload():
    storage = tpu_embed.HostStorage(device_rows=20)
    table = tpu_embed.TableConfig(2**40, 4, name="items", storage=storage)
    feature_config = {"x": tpu_embed.FeatureConfig(table)}
    return feature_config, tpu_embed.optimizers.SGD(0.1), {"x": np.arange(16).reshape(8, 2)}
"""


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)

    def run(lookahead):
        options = ["--topology", "2", "--json", "--lookahead", lookahead]
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "plan", str(path), *options])
        main()

    run("1")
    found = json.loads(capsys.readouterr().out)
    assert (found["lookahead"], found["tables"][0]["lookahead_rows"]) == (1, 32)
    assert found["passing"]["ahead"] > 0
    with pytest.raises(SystemExit, match="lookahead: expected at most 65536, got 65537; so many"):
        run("65537")
    with pytest.raises(SystemExit, match="lookahead: expected an integer >= 0"):
        run("-1")
