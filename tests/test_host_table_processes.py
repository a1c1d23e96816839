"""Several processes keep the rows of their own shards, with the bits of one process."""

import delta_processes
import host_table_processes as cases
import numpy as np
import pytest
from process_cases import assert_same
from process_runs import run

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return a directory with checkpoints of this process, and its rows then and later."""
    path = str(tmp_path_factory.mktemp("one"))
    return path, cases.save(path), delta_processes.publish("hosted", path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(one, directory):
    """Return what two processes of 4 devices each find."""
    calls = [
        (cases.train,),
        (cases.on_the_host,),
        (cases.save, str(directory)),
        (cases.restore, str(directory)),
        (cases.restore, one[0]),
        (cases.with_all_shards, str(directory)),
        (cases.shapes_sent,),
        (cases.lose_a_row,),
        (cases.by_key,),
        (cases.by_key, False),
        (delta_processes.publish, "hosted", str(directory)),
        (delta_processes.go_on, "hosted", one[0], "by two"),
        (cases.adopt,),
        (cases.fail_to_set,),
    ]
    return run(2, directory, calls)


@pytest.fixture(scope="module")
def on_devices():
    """Return what one process looks up, and all its rows, with tables on its devices."""
    return cases.train(hosted=False)


def test_two_processes_have_the_bits_of_tables_on_the_devices_of_one(two, on_devices):
    seen, rows = on_devices
    for found in two:
        assert_same(found[0][1], rows)
    for i, expected in enumerate(seen):
        halves = [found[0][0][i] for found in two]
        whole = {name: np.concatenate([one[name] for one in halves]) for name in expected}
        assert_same(whole, expected)


def test_processes_adopt_the_states_of_engines_together(two, on_devices):
    for found in two:
        rows, errors = found[12]
        assert_same(rows, on_devices[1])
        assert "expected no batch placed ahead, got 1" in errors[0]
        assert "adopt: mesh: expected devices of all 2 processes, got of [" in errors[1]
    assert two[0][12][1][0].startswith("adopt .: process 1 failed: adopt: the other engine")


def test_rows_by_key_are_those_of_one_process_or_refused_in_all(two):
    (refused,), expected = cases.by_key(False)
    assert "each key once" in refused
    for found in two:
        for errors, rows in found[8:10]:
            assert_same(rows, expected)
            assert "each key once" in errors[0]
            assert "the same keys and values in every process, got others" in errors[1]


def test_each_process_has_its_part_of_the_rows_at_home(two):
    _, touched, _, rows = cases.on_the_host()
    here, there = (found[1] for found in two)
    assert not np.intersect1d(here[2], there[2]).size
    assert min(here[2].size, there[2].size) > 10
    for found in (here, there):
        assert found[0]["items"]["sent"] > 10
        assert_same(found[1], touched)
        assert_same(found[3], rows)


def test_checkpoints_pass_between_one_process_and_two(one, two, directory):
    for found in two:
        for some in found[2:5]:
            assert_same(some, one[1])
    for hosted in (True, False):
        assert_same(cases.restore(str(directory), hosted=hosted), one[1])


def test_a_process_that_holds_all_shards_has_all_rows_at_home(two, on_devices):
    for found in two:
        assert_same(found[5][0], on_devices[1])
    assert_same(two[0][5][1], two[1][5][1])
    assert two[0][5][1].size > 30
    touched = two[0][1][1].size  # of the same batches
    assert two[0][5][2] == two[1][5][2] <= touched + 3


def test_a_row_that_one_process_has_lost_stops_all(two):
    (first, placed), (second, also) = (found[7] for found in two)
    assert len(first) == 2
    assert "No space left" in first[0]
    assert "process 0 refused its part" in second[-1]
    assert "written at home" in second[-1]
    assert placed == also == 0


def test_rows_that_one_process_cannot_set_are_set_in_none(two):
    for found in two:
        errors, before, after = found[13]
        assert len(errors) == 2
        assert all("No space left" in one for one in errors)
        assert_same(after, before)


def test_all_processes_run_programs_of_the_same_shapes(two):
    shapes, others = (found[6] for found in two)
    assert shapes == others
    assert len({repr(some) for some in shapes}) > 8


def test_deltas_and_records_of_two_processes_are_those_of_one(one, two, directory):
    deltas, later = ([found[n] for found in two] for n in (10, 11))
    delta_processes.check(one[0], directory, "hosted", one[2], deltas, later)
