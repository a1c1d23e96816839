"""What people type by mistake is told to them: what was expected, what was got, what to do."""

import dataclasses
import functools
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tpu_embed
from tpu_embed import FeatureConfig, FixedVocabulary, TableConfig, TPUEmbedding, data, io
from tpu_embed import optimizers as o

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = """
import numpy as np
from tpu_embed import FeatureConfig, TableConfig, optimizers
def workload():
    tables = [TableConfig(1_000_000, 64, name=f"t{i}") for i in range(3)]
    features = [FeatureConfig(table) for table in tables]
    return features, optimizers.Adagrad(0.1), [np.zeros(64, int)] * 3
"""


def small():
    table = TableConfig(10, 2, name="t")
    return tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, o.SGD(0.1))


def command(*given):
    run = [sys.executable, "-m", "tpu_embed", *given]
    return subprocess.run(run, capture_output=True, text=True)


@pytest.mark.whole
def test_the_plan_is_short_and_takes_a_memory(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(WORKLOAD)
    plan = functools.partial(command, "plan", str(path), "--topology", "8", "--memory")
    done = plan("80GiB")
    assert done.returncode == 0
    for words in ("fits: ", "of 80", "t0 and 2 like it", "8 devices, each"):
        assert done.stdout.count(words) == 1
    assert "for example --memory 80GiB" in plan("many").stderr
    done = plan("30 MB")
    assert done.returncode == 1
    verdict = done.stdout.split("does NOT fit", 1)[1].splitlines()
    assert sum(line.startswith("  ") and ": " in line for line in verdict[1:6]) >= 3


@pytest.mark.whole
def test_the_version_is_told():
    assert command("--version").stdout.strip() == f"tpu_embed {tpu_embed.__version__}"


def test_names_are_listed_and_those_of_tensorflow_lead_to_ours():
    assert {"save", "restore", "serving_lookup"} <= set(dir(io))
    assert dir(data) == sorted(data.__all__)
    assert {*tpu_embed.__all__, "io", "__version__"} <= set(dir(tpu_embed))
    assert "serving_embedding_lookup" in tpu_embed._ANCESTORS
    page = (ROOT / "docs/migrating.md").read_text()
    for theirs, ours in tpu_embed._ANCESTORS.items():
        with pytest.raises(AttributeError, match=rf"here it is tpu_embed\.{ours}: see docs/migr"):
            getattr(tpu_embed, theirs)
        assert theirs in page
        found = tpu_embed
        for part in ours.split("."):
            found = getattr(found, part)
        assert callable(found)


TABLE = TableConfig(10, 2)
FEATURE = FeatureConfig(TABLE)
MADE = TPUEmbedding(FEATURE, None)
REPLACE = functools.partial(dataclasses.replace, FEATURE)
ENQUEUE = functools.partial(MADE.enqueue, np.arange(8))


OF_TENSORFLOW = [
    (functools.partial(TableConfig, 10, 2), "layout", 'TableConfig: expected placement="mod"'),
    (REPLACE, "validate_weights_and_indices", 'FeatureConfig: expected on_bad_id="error"'),
    (MADE.build, "per_replica_input_shapes", "build: expected per_replica_batch_size="),
    (ENQUEUE, "device", "TPUEmbedding.enqueue: expected the whole batch"),
]


@pytest.mark.parametrize(("call", "argument", "says"), OF_TENSORFLOW)
def test_arguments_of_tensorflow_lead_to_ours(call, argument, says):
    with pytest.raises(TypeError, match=f"{says}.*got {argument}=, .* docs/migrating.md"):
        call(**{argument: None})
    assert argument in (ROOT / "docs/migrating.md").read_text()
    assert argument not in inspect.signature(call).parameters


def test_two_unnamed_tables_are_two():
    first, second = TableConfig(10, 2), TableConfig(10, 2)
    assert repr(first) != repr(second)
    assert repr(TableConfig(10, 2, name="t")) == repr(TableConfig(10, 2, name="t"))


TOLD = [
    (lambda: small().init(0), r"init: expected a jax PRNG key.*key\(0\)"),
    (lambda: small().init(np.float32([1, 2])), r"init: expected a jax PRNG key.*key\(0\)"),
    (lambda: data.Prefetcher(MADE, []), r"an EmbeddingEngine, got TPUEmbedding; .*\.engine"),
    (lambda: data.Prefetcher(small(), []).set_state({"batches": 2**70}), "a position"),
    (lambda: small().place({"x": np.zeros(8, int)}, spec="x"), "a BatchSpec.*got str"),
    (lambda: FixedVocabulary([7, 6, 5], [3, 1, 3]), "got row 3 for the keys 5 and 7"),
]


@pytest.mark.parametrize(("call", "says"), TOLD)
def test_what_was_given_is_told(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


def test_a_vocabulary_of_many_keys_is_shown_in_a_line():
    many = FixedVocabulary(np.arange(10**6), np.arange(10**6))
    assert repr(many) == "FixedVocabulary(1000000 keys, rows below 1000000)"
