"""A call on dynamic vocabularies that fails or is cut short: maps, queue and state still agree."""

import contextlib
import functools
import threading
from unittest import mock

import numpy as np
import pytest
from living_cases import initial_row, mesh

from tpu_embed import DynamicVocabulary, FeatureConfig, TableConfig, TPUEmbedding, optimizers
from tpu_embed.core.place import Intake

TABLE = TableConfig(8, 2, name="t", vocabulary=DynamicVocabulary())
ERRORS = [ZeroDivisionError, KeyboardInterrupt]


def embedding(**options):
    return TPUEmbedding(FeatureConfig(TABLE), optimizers.SGD(1.0), mesh=mesh(1), **options)


def steps(made):
    """Return how many batches wait, were placed, and were admitted."""
    return made.waiting, made.engine.vocabularies.placed, made.engine.vocabularies.admitted


@contextlib.contextmanager
def failing(holder, name, error, *, after):
    """Make a function raise, before or after it has done its work, which ends the block."""
    function = getattr(holder, name)

    def fail(*args, **kwargs):
        if after:
            function(*args, **kwargs)
        raise error

    with pytest.raises(error), mock.patch.object(holder, name, fail):
        yield


def assert_trains_on(made, *batches):
    """Dequeue these batches, whose keys are all new, and update by zero."""
    for keys in batches:
        expected = [initial_row(TABLE, key, seed=0) for key in keys]
        np.testing.assert_array_equal(made.dequeue(), expected)
        made.apply_gradients(np.zeros((len(keys), 2), np.float32))
    assert made.waiting == 0
    assert made.engine.vocabularies.placed == made.engine.vocabularies.admitted


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.quick(2)
def test_a_batch_whose_first_lookup_fails_stays_if_it_was_admitted(error, after):
    made = embedding(pipeline_execution_with_tensor_core=True)
    with failing(made.engine, "lookup", error, after=after):
        made.enqueue(np.array([1, 2]))
    assert steps(made) == (1, 1, 1)
    made.enqueue(np.array([3, 4]))
    assert_trains_on(made, [1, 2], [3, 4])


@pytest.mark.parametrize("error", ERRORS)
def test_a_batch_that_cannot_be_admitted_is_not_enqueued(error):
    made = embedding(pipeline_execution_with_tensor_core=True)
    cannot = functools.partial(failing, made.engine, "prepare_admit", error)
    with cannot(after=False):
        made.enqueue(np.array([1, 2]))
    assert steps(made) == (0, 0, 0)
    assert made.describe()["per_replica_batch_size"] is None
    made.enqueue(np.array([3, 4, 5]))
    assert_trains_on(made, [3, 4, 5])
    # A batch that the caller has placed is still the caller's.
    placed = made.engine.place(np.array([1, 2, 1]))
    with cannot(after=False):
        made.enqueue(placed)
    assert steps(made) == (0, 2, 1)
    made.enqueue(placed)
    assert_trains_on(made, [1, 2, 1])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_admitted_batches_whose_lookup_fails_are_dequeued_later(error, pipelined):
    made = embedding(pipeline_execution_with_tensor_core=pipelined)
    for keys in ([1, 2], [3, 4]):
        made.enqueue(np.array(keys))
    with failing(made.engine, "lookup", error, after=True):
        made.dequeue()
    assert steps(made) == (2, 2, 1 + pipelined)
    assert_trains_on(made, [1, 2], [3, 4])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.quick(2)
def test_an_enqueue_that_is_interrupted_while_it_places_leaves_the_maps(error, after, training):
    made = embedding()
    made.enqueue(np.array([1, 2]))
    with failing(Intake, "place_now", error, after=after):
        made.enqueue(np.array([3, 4]), training=training)
    assert steps(made) == (1, 1, 0)
    # If the turn to place were still taken, this would wait for ever.
    thread = threading.Thread(target=made.enqueue, args=(np.array([5, 6]),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert_trains_on(made, [1, 2], [5, 6])


def test_batches_that_others_have_placed_are_not_undone():
    made = embedding()
    ahead = [made.engine.place(np.array(keys)) for keys in ([1, 2], [3, 4])]
    with failing(Intake, "place_now", KeyboardInterrupt, after=True):
        made.enqueue(np.array([5, 6]))
    assert steps(made) == (0, 2, 0)
    with pytest.raises(ValueError, match="the batch of step 1, got that of step 3"):
        made.enqueue(np.array([5, 6]))
    for batch in ahead:
        made.enqueue(batch)
    assert_trains_on(made, [1, 2], [3, 4])


def test_a_lookup_that_is_refused_undoes_no_training_batch(monkeypatch):
    made, place_ids = embedding(), Intake.place_ids

    def beside_another(intake, *given, **options):
        if not options["training"]:  # another thread's batch comes first
            place_ids(intake, np.array([3, 4]), training=True)
        return place_ids(intake, *given, **options)

    monkeypatch.setattr(Intake, "place_ids", beside_another)
    with pytest.raises(TypeError):
        made.enqueue(np.array([0.5, 1.5]), training=False)
    assert steps(made) == (0, 1, 0)
