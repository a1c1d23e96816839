"""Several processes make the same maps, rows and bits as one, and refuse batches together."""

import delta_processes
import living_processes
import pytest
from process_cases import assert_same
from process_runs import run

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return a checkpoint of this process, and the bits at once and later."""
    path = tmp_path_factory.mktemp("one") / "step"
    found = living_processes.save(path)
    published = delta_processes.publish("living", path.parent)
    return path, found, published


@pytest.fixture(scope="module")
def two(one, tmp_path_factory):
    """Return what two processes of 4 devices each find."""
    directory = tmp_path_factory.mktemp("two")
    calls = [
        (living_processes.train,),
        (living_processes.train_embedding,),
        (living_processes.refusals,),
        (living_processes.unlike,),
        (living_processes.save, str(directory / "step")),
        (living_processes.restore, str(one[0])),
        (living_processes.restore, str(one[0]), 25),
        (delta_processes.publish, "living", str(directory)),
        (delta_processes.go_on, "living", str(one[0].parent), "by two"),
        (living_processes.train_layers, str(directory)),
    ]
    return run(2, directory, calls), directory / "step"


def test_two_processes_have_the_bits_of_one(two):
    (expected, devices), embedding = living_processes.train(), living_processes.train_embedding()
    for found in two[0]:
        assert_same(found[0][0], expected)
        assert found[0][1] == devices // 2
        assert_same(found[1], embedding)


def test_what_one_process_refuses_leaves_all_maps_as_they_were(two):
    expected = living_processes.refusals()[3]
    for process, found in enumerate(two[0]):
        errors, before, after, later = found[2]
        assert len(errors) == 5
        assert all(errors)
        for _, text in errors[: 3 * process]:
            assert "process 0 refused its part of the batch" in text
        assert_same(after, before)
        assert_same(later, expected)


def test_processes_out_of_step_are_refused(two):
    for found in two[0]:
        assert "admit and place in the same order" in found[3][1]


def test_checkpoints_pass_between_one_process_and_two(one, two):
    at_save, later = one[1]
    for found in two[0]:
        assert_same(found[4], (at_save, later))
        restored, after = found[5]
        assert restored[3] == [3, 3, 3]  # when rows were taken is not kept: now, for all it knows
        assert_same(restored[:3], at_save[:3])
        assert_same(after[:3], later[:3])
    restored, after = living_processes.restore(two[1])
    assert_same(restored[:3], at_save[:3])
    assert_same(after[:3], later[:3])


def test_another_capacity_is_the_same_in_two_processes(one, two):
    expected = living_processes.restore(one[0], 25)
    for found in two[0]:
        assert_same(found[6], expected)


def test_deltas_and_records_of_two_processes_are_those_of_one(one, two):
    deltas, later = ([found[n] for found in two[0]] for n in (7, 8))
    delta_processes.check(one[0].parent, two[1].parent, "living", one[2], deltas, later)


def test_layers_of_keys_have_the_bits_of_one_process(two, tmp_path):
    expected, none, looked_up = living_processes.train_layers(tmp_path)
    assert not none
    for found in two[0]:
        bits, (floats, ragged, named), evaluated = found[9]
        assert_same(bits, expected)
        assert evaluated == looked_up  # placed ahead, between training batches that were, too
        assert "expected ids of an integer dtype, got float64" in floats
        assert "feature 'films': batch size: expected a positive multiple of 4" in ragged
        assert "features: films is missing" in named
