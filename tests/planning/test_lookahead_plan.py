"""What a plan says of batches that wait for their update, beside engines that place them."""

import jax
import numpy as np
import pytest
from living_cases import mesh

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig, planning
from tpu_embed import optimizers as o

IDS, AHEAD = 16, 2
RULE = o.Adagrad(0.1)


def on_host(rows, size=2**40):
    storage = HostStorage(device_rows=rows)
    return {"x": FeatureConfig(TableConfig(size, 4, name="items", storage=storage))}


def living(rows):
    table = TableConfig(rows, 4, name="items", vocabulary=DynamicVocabulary())
    return {"x": FeatureConfig(table)}


def batch(number):
    """Return a batch that shares no id with those of other numbers."""
    return {"x": IDS * number + np.arange(IDS).reshape(8, 2)}


def planned(features, ids=None, target=2, **options):
    ids = batch(0) if ids is None else ids
    return planning.plan(features, RULE, target, ids, lookahead=AHEAD, **options)


def engine(features, devices=2):
    return tpu_embed.EmbeddingEngine(features, RULE, mesh=mesh(devices), lookahead=AHEAD)


def place_some(made):
    """Place batches that share no row, each ahead of the ones before it."""
    for number in range(AHEAD + 3):
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
    shapes, found = {"x": jax.ShapeDtypeStruct((8, 2), np.int32)}, {}
    for size in (2**40, 20):
        features = on_host(20, size)
        found[size] = planned(features, shapes).tables[0].lookahead_rows
    assert found[2**40] == (AHEAD + 1) * IDS
    assert IDS < found[20] < 20
    assert planned(features).tables[0].lookahead_rows == 20


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
