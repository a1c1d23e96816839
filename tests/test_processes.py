"""Several processes train, refuse, save and restore exactly as one process does."""

import itertools
import json
import shutil
import time

import numpy as np
import process_cases
import pytest
import search_processes
from process_cases import assert_same
from process_runs import run, start
from search_cases import assert_found, expected

from tpu_embed.io import restore


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a directory with a checkpoint of this process, and its bits at once and later."""
    directory = tmp_path_factory.mktemp("checkpoints")
    process_cases.save_all(directory, [8], ["mod"])
    (bits,) = process_cases.restore_all(directory, ["1-8-mod"], [8], ["mod"]).values()
    return directory, bits


@pytest.fixture(scope="module")
def two(saved, tmp_path_factory):
    """Return what two processes of 4 devices each find."""
    path = str(saved[0])
    calls = {
        "train": (process_cases.train, 8),
        "train_embedding": (process_cases.train_embedding, 8),
        "train_weighted": (process_cases.train_weighted, 4),
        "refusals": (process_cases.refusals, 8),
        "outliers": (process_cases.outliers,),
        "living": (process_cases.train_living,),
        "hosted": (process_cases.train_hosted,),
        "search": (search_processes.search,),
        "save": (process_cases.save_all, path, [8], ["mod"]),
        "restore": (process_cases.restore_all, path, ["1-8-mod"], [8], ["mod"]),
        "restore on 2": (process_cases.restore_all, path, ["2-8-mod"], [2], ["div"], 0),
        "unequal": (process_cases.unequal, str(tmp_path_factory.mktemp("unequal"))),
        "faults": (process_cases.faults, str(tmp_path_factory.mktemp("faults"))),
    }
    found = run(2, tmp_path_factory.mktemp("two"), list(calls.values()))
    return [dict(zip(calls, one, strict=True)) for one in found]


def test_both_apis_and_several_blocks_on_each_device_have_the_bits_of_one_process(two):
    """One process gathers the gradients of weighted bags where two exchange their sums."""
    trained, embedding = process_cases.train(8), process_cases.train_embedding(8)
    weighted, everything = process_cases.train_weighted(4)
    for found in two:
        assert_same((found["train"], found["train_embedding"]), (trained, embedding))
        assert_same(found["train_weighted"][0], weighted)
    # Placed parts touch the rows of their own features.
    parts = [found["train_weighted"][1] for found in two]
    assert all(placed == given for placed, given in parts)
    (one, _), (other, _) = parts
    assert {name: sorted({*one[name], *other[name]}) for name in one} == everything[1]
    assert one != other


def test_living_vocabularies_and_tables_on_the_host_have_the_bits_of_one_process(two):
    living, (rows, brought) = process_cases.train_living(), process_cases.train_hosted()
    for found in two:
        assert_same((found["living"], found["hosted"][0]), (living, rows))
    assert living[3]["t"]["evicted"] > 0
    # Every row is at home in one of the two.
    assert sum(found["hosted"][1] for found in two) == brought > 0


def test_a_search_over_the_devices_of_two_processes_is_exact(two):
    case = search_processes
    wanted = expected(case.ROWS, case.QUERIES, case.K, case.EXCLUDE)
    # Keys have taken rows in their order, so that equal scores are ordered by key, too.
    scores, places = expected(case.ROWS[: len(case.KEYS)], case.QUERIES, case.K)
    for found in two:
        items, of_words, keys, errors = found["search"]
        assert_found(items, wanted)
        np.testing.assert_array_equal(of_words, scores)
        np.testing.assert_array_equal(keys.filled(0), case.KEYS[places])
        assert "top_k: expected the same arguments in every process, got others" in errors[0][1]
        assert "queries: expected an array on the host, or on all 8 devices" in errors[1][1]
        assert "queries" in errors[2][1], "one process refuses them, and both raise"


def test_one_refuses_all_refuse(two):
    """Every process raises a refusal, which names the one whose part it was; nothing changes."""
    kinds = [f"{kind}Error" for kind in "Value Type Value Value Type Value Value".split()]
    for process, seen in enumerate(found["refusals"] for found in two):
        assert [one and one[0] for one in seen] == [*kinds, None, None]
        ours = [one[1] for one in seen if one and "process 1 refused its part" in one[1]]
        assert len(ours) == (0 if process else 5)
    first, second = (found["refusals"][0][1] for found in two)
    assert "got id 103" in first
    assert "id 103 at example 0" in second


def test_processes_leave_the_spec_of_an_outlier_together(two):
    """Each process sees its own outlier alone; what the others need is known by agreement."""
    rooms, others = (found["outliers"] for found in two)
    assert rooms == others
    ids = [sizes[0] for sizes in rooms]
    assert ids[0] > 20_000
    assert ids[140] > 25_000
    assert max(ids[128:140] + ids[141:]) < 100
    assert len(set(rooms)) <= 4


def test_what_files_do_to_one_all_are_told(two):
    """Nothing hangs, nothing is left, and the next save and restore are whole."""
    for process, found in enumerate(two):
        seen, left, restored, state = found["faults"]
        told = [one[1] for one in seen]
        assert [one[0] for one in seen] == ["OSError"] * 7 + ["ValueError"] * 4, seen
        assert all("no space left" in one for one in told[:7])
        assert all("damaged" in one for one in told[7:9])
        assert all(": expected the same in every process, got " in one for one in told[9:])
        assert "other 0 in process 0, " in told[9]
        assert "steps [3] in process 0, steps [1] in process 1" in told[10]
        assert [": process 1 failed: " in one for one in told[:9]] == [not process] * 9
        assert left == []
        assert_same(restored, state)


def test_saved_by_one_or_two_restored_by_two_and_by_one(saved, two):
    directory, bits = saved
    for found in two:
        assert_same(found["restore"]["1-8-mod", 8, "mod"], bits)
        assert_same(found["restore on 2"]["2-8-mod", 2, "div"], (bits[0], bits[0]))
        assert_same(*found["unequal"])  # numbers of shards
    again = process_cases.restore_all(directory, ["2-8-mod"], [8], ["mod"])
    assert_same(again["2-8-mod", 8, "mod"], bits)


def test_a_chunk_in_the_place_of_another_process_is_refused_by_name(saved, two, tmp_path):
    """Each process keeps the checksums of its own chunks; who restores asks for all of them."""
    root = shutil.copytree(saved[0] / "2-8-mod", tmp_path / "copy")
    for number in (0, 1):
        sums = json.loads((root / f"tables/checksums.{number}.json").read_text())["value"]
        assert sorted(sums["films/table"]) == [f"c.0.{number}.0", "zarr.json"]
    first, second = (root / f"tables/films/table/c.0.{number}.0" for number in (0, 1))
    shutil.copy(second, first)
    with pytest.raises(ValueError, match=r"'films': .*/c\.0\.0\.0: expected the file of this"):
        restore(root, process_cases.make_engine(8, "mod"))


ENDS_WITHIN = 150
"""Seconds for processes to start, and to end once one has left; JAX lets them wait for 300 more."""


def test_interrupted_while_it_waits_it_ends_and_so_do_the_others(tmp_path):
    """It is out of step then, and says so; the other one hears who has left, and why."""
    ended, _ = start(2, tmp_path, [(process_cases.interrupt,)], ENDS_WITHIN)
    (first, said), (second, heard) = ended
    assert (first, second) == (1, 1)
    assert "interrupted" in said
    assert "expected calls one after the other, each to its end, got one that was int" in said
    assert "got process 0 left: RuntimeError: place: " in heard


@pytest.mark.whole
@pytest.mark.parametrize("where", ["place", "admit", "save", "device"])
@pytest.mark.parametrize("how", ["raise", "exit", "kill", "interrupt"])
@pytest.mark.parametrize("count", [2, 4])
def test_one_ends_and_all_end_with_the_reason(count, how, where, tmp_path):
    leaver = count - 1
    call = process_cases.leave, leaver, how, where, str(tmp_path)
    ended, _ = start(count, tmp_path, [call], ENDS_WITHIN)
    now, (status, said) = time.time(), ended.pop(leaver)
    left = float(said.partition("left at ")[2].split()[0])
    assert now - left < 35  # seconds until all have ended
    # JAX aborts a process that waits at its exit for one whose device waits for it.
    assert status in ({"raise": 1, "exit": 3, "kill": -9, "interrupt": -2}[how], -6)
    reasons = {"raise": "ValueError: the data source is gone", "exit": "it has ended"}
    reasons["interrupt"] = "KeyboardInterrupt"
    for other, heard in ended:
        assert other != 0
        if where != "device" and how in reasons:
            assert f"got process {leaver} left: {reasons[how]}; start all of them again" in heard


PLACEMENTS = ["mod", "div", "replicated"]
WAYS = {1: ([1, 2, 8], PLACEMENTS), 2: ([2, 8], PLACEMENTS), 4: ([8], ["mod"])}
"""Processes -> numbers of devices, and placements."""


@pytest.mark.whole
def test_every_way_to_save_and_to_restore(tmp_path):
    """Each to every other: bits at once, and after 10 steps more."""
    names = []
    for processes, (numbers, placements) in WAYS.items():
        run(processes, tmp_path, [(process_cases.save_all, str(tmp_path), numbers, placements)])
        names += [f"{processes}-{n}-{one}" for n, one in itertools.product(numbers, placements)]
    first = None
    for processes, (numbers, placements) in WAYS.items():
        calls = [(process_cases.restore_all, str(tmp_path), names, numbers, placements)]
        for (restored,) in run(processes, tmp_path, calls):
            assert len(restored) == len(names) * len(numbers) * len(placements)
            for bits in restored.values():
                first = bits if first is None else first
                assert_same(bits, first)


@pytest.mark.whole
def test_four_processes_train_as_one(tmp_path):
    """Rounded, too: what processes send each other is what one device rounds."""
    cases = process_cases
    expected = cases.train(8), cases.guarded(8), cases.train_rounded(1)
    calls = [(cases.train, 8), (cases.guarded, 8), (cases.train_rounded, 4)]
    for found in run(4, tmp_path, calls):
        assert_same(tuple(found), expected)
    assert sum(expected[1][2]) == 1
