"""grain's loaders with `Place` as their last operation, and with `Prefetcher` around them."""

import functools
import json
import subprocess
import sys

import absl.flags
import grain
import numpy as np
import pytest
from data_cases import SIZE, engine

from tpu_embed.data import Place, Prefetcher

RECORDS = 10 * SIZE


@pytest.fixture
def flags():
    """Let grain start worker processes: it reads its flags, which a program with absl parses."""
    absl.flags.FLAGS.mark_as_parsed()


class Source:
    """Records of a user, an item and a label."""

    def __len__(self):
        return RECORDS

    def __repr__(self):
        return "Source()"  # grain compares it with that of the position

    def __getitem__(self, index):
        return {"x": np.int32(index % 64)}, np.float32(index)


def loader(*operations, worker_count=0):
    options = {"shuffle": True, "num_epochs": 1, "seed": 3}
    sampler = grain.samplers.IndexSampler(RECORDS, grain.sharding.NoSharding(), **options)
    operations = [grain.transforms.Batch(SIZE, drop_remainder=True), *operations]
    options = {"operations": operations, "worker_count": worker_count}
    return grain.DataLoader(data_source=Source(), sampler=sampler, **options)


def dataset():
    """Return the same kind of pipeline by grain's other API."""
    records = grain.MapDataset.source(Source()).shuffle(seed=5)
    return records.batch(SIZE, drop_remainder=True).to_iter_dataset()


def host(items):
    """Return the bits of batches and what came with them."""
    return [(np.asarray(one.packed).tobytes(), np.asarray(label).tobytes()) for one, label in items]


PIPELINES = {
    "Place in a DataLoader": lambda: loader(Place(engine())),
    "Prefetcher of a DataLoader": lambda: Prefetcher(engine(), loader()),
    "Place in a dataset": lambda: dataset().map(Place(engine())),
    "Prefetcher of a dataset": lambda: Prefetcher(engine(), dataset()),
}


@functools.cache
def everything(name):
    """Return the bits of a whole epoch, as grain gives it and `place` places it."""
    plain = dataset() if "dataset" in name else loader()
    return host((engine().place(features), label) for features, label in plain)


def begun(name):
    """Return a pipeline that has a position: a prefetcher, or an iterator of grain."""
    made = PIPELINES[name]()
    return made if isinstance(made, Prefetcher) else iter(made)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("taken", [0, 1, 4, 10])
@pytest.mark.quick(8)
def test_all_come_in_order_and_a_position_is_what_was_taken(name, taken):
    """Through JSON; also where more was placed ahead."""
    batches = begun(name)
    for _ in range(taken):
        next(batches)
    position = batches.get_state()
    if isinstance(batches, Prefetcher):
        assert position["batches"] == taken
        position = json.loads(json.dumps(position))
        batches.close()
    again = begun(name)
    again.set_state(position)
    assert len(everything(name)) == 10
    assert host(again) == everything(name)[taken:]


@pytest.mark.usefixtures("flags")
def test_worker_processes_cannot_place():
    with pytest.raises(Exception, match="run in the process that has the devices") as raised:
        next(iter(loader(Place(engine()), worker_count=1)))
    assert "use worker_count=0, or no Place and tpu_embed.data.Prefetcher" in str(raised.value)


@pytest.mark.usefixtures("flags")
@pytest.mark.whole
def test_prefetcher_of_a_worker_process():
    """It reads and batches; this process places."""
    found = host(Prefetcher(engine(), loader(worker_count=1)))
    assert found == everything("Prefetcher of a DataLoader")


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="is missing: expected 1 entries"):
        next(iter(dataset().map(lambda item: {"y": item[0]["x"]}).map(Place(engine()))))
    with pytest.raises(TypeError, match=r"expected a tuple \(features, weights, …\)"):
        next(iter(dataset().map(lambda item: item[0]).map(Place(engine(), weighted=True))))


WITHOUT_GRAIN = """
import sys
sys.modules["grain"] = None
import tpu_embed.data
assert tpu_embed.data.Prefetcher
tpu_embed.data.Place
"""


def test_without_grain():
    """Everything else works, and `Place` says what to install."""
    python = [sys.executable, "-c", WITHOUT_GRAIN]
    found = subprocess.run(python, capture_output=True, text=True, timeout=120).stderr
    assert "ImportError: " in found
    assert "expected grain, got " in found
    assert 'pip install "tpu-embed[grain]"' in found
