"""The oracle itself, against numbers computed by hand."""

from types import SimpleNamespace

import numpy as np
import oracle
import oracle_bounds
import pytest

TABLE = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])


def _feature(**options):
    table = {"vocabulary_size": 3, "dim": 2, "combiner": "sum", "trainable": True}
    table |= {"quantization_config": None} | options.pop("table", {})
    feature = {"max_sequence_length": 0, "output_shape": None, "on_bad_id": "drop"} | options
    return SimpleNamespace(table=Config(**table), **feature)


class Config(SimpleNamespace):
    __hash__ = object.__hash__


def _ragged(values, splits, weights=None):
    return SimpleNamespace(values=values, row_splits=splits, weights=weights)


def _sparse(indices, values, shape, weights=None):
    return SimpleNamespace(indices=indices, values=values, dense_shape=shape, weights=weights)


@pytest.mark.parametrize(("combiner", "divisor"), [("sum", 1), ("mean", 3 - 4), ("sqrtn", 5)])
def test_combiners_in_every_form(combiner, divisor):
    feature = _feature(table={"combiner": combiner})
    weights = [3.0, -4.0]
    for ids, beside in [
        (_ragged([1, 2], [0, 2, 2], weights), None),
        (_sparse([[0, 0], [0, 3]], [1, 2], (2, 4)), SimpleNamespace(values=weights)),
        (np.array([[1, -1, 2], [-1, -1, -1]]), np.array([[3.0, 9.0, -4.0], [1.0, 1.0, 1.0]])),
    ]:
        found = oracle.lookup(TABLE, feature, ids, beside)[:, 0]
        np.testing.assert_allclose(found, [(3 * 2.0 - 4 * 4.0) / divisor, 0.0])


def _both(values, weights=None):
    """Return one bag of ids, and an empty one, as ragged and as sparse ids."""
    places = [[0, place] for place in range(len(values))]
    yield _ragged(values, [0, len(values), len(values)], weights)
    yield _sparse(places, values, (2, len(values)), weights)


SEQUENCE = {"max_sequence_length": 2}
GRID = SimpleNamespace(num_buckets=4, lower=0.0, upper=3.0)


LOOKUPS = [
    # Zero weights give a zero row.
    *(({"table": {"combiner": "mean"}}, ids, [0.0] * 2) for ids in _both([0, 1], [0.0, 0.0])),
    *(({"table": {"combiner": "sqrtn"}}, ids, [0.0] * 2) for ids in _both([0, 1], [0.0, 0.0])),
    # A sequence keeps positions.
    *((SEQUENCE, ids, [[0.0, 1.0], [0.0, 0.0]]) for ids in _both([9, 1, 2], [1.0, 0.5, 1.0])),
    (SEQUENCE, np.array([[9, 1, 2], [-1, -1, -1]]), [[0.0, 2.0], [0.0, 0.0]]),
    ({"output_shape": (1, 2)}, _ragged([0, 1, 2, 2], [0, 3, 4]), [[7.0, 4.0]]),
    ({"output_shape": (2, 2)}, _ragged([0, 1, 2, 2], [0, 3, 4]), [[1.0, 2.0], [4.0, 0.0]]),
    ({}, np.array([1, -1, 7, -9]), [2.0, 0.0, 0.0, 0.0]),
    ({"on_bad_id": "clip"}, np.array([1, -1, 7, -9]), [2.0, 0.0, 4.0, 1.0]),
    # Rows are rounded before they are combined.
    ({"table": {"quantization_config": GRID}}, np.array([[0, 1], [2, -1]]), [3.0, 3.0]),
]


@pytest.mark.parametrize(("options", "ids", "expected"), LOOKUPS)
def test_lookups(options, ids, expected):
    assert oracle.lookup(TABLE, _feature(**options), ids)[..., 0].tolist() == expected


def test_a_bad_id_is_an_error():
    with pytest.raises(ValueError, match="bad id 7"):
        oracle.lookup(TABLE, _feature(on_bad_id="error"), np.array([1, 7]))


def test_row_gradients_come_in_batch_order():
    one, two = _feature(table={"combiner": "mean"}), _feature()
    features = [(one, np.array([[0, 1], [2, -1]])), (two, _ragged([1, 0], [0, 1, 2]), [2.0, 3.0])]
    gradients = [np.array([[1.0, 1.0], [5.0, 5.0]]), None]
    found = oracle.row_gradients(features, gradients)
    places = [("ab"[o.table is two.table], o.row, o.example) for o in found]
    assert places == [("a", 0, 0), ("a", 1, 0), ("b", 1, 0), ("a", 2, 1), ("b", 0, 1)]
    assert [o.gradient[0] for o in found] == [0.5, 0.5, 0.0, 5.0, 0.0]
    fixed = _feature(table={"trainable": False})
    assert oracle.row_gradients([(fixed, np.array([0]))], [np.ones((1, 2))]) == []
    sums = oracle.summed((o.row, o.gradient) for o in [*found, *found] if o.table is one.table)
    assert {row: total[0] for row, total in sums.items()} == {0: 1.0, 1: 1.0, 2: 10.0}


def _descent(name, hyper, row, slots, gradient, t, lr):
    count = slots["count"] + 1
    return row - lr * gradient * (1 - row), {"count": count}


ONE_BY_ONE = {"use_gradient_accumulation": False}
HYPERS = [({}, [1, 1, 0]), (ONE_BY_ONE, [2, 1, 0]), ({"lazy_adam": False}, [1, 1, 1])]


@pytest.mark.parametrize(("hyper", "counts"), HYPERS)
def test_train_step_applies_the_rule_to_touched_rows(hyper, counts):
    feature = _feature()
    tables, slots = oracle.train_step(
        {feature.table: np.zeros((3, 2))},
        {feature.table: {"count": np.zeros(3)}},
        [(feature, np.array([[0, 1], [0, -1]]))],
        [np.ones((2, 2))],
        optimizers={feature.table: ("descent", hyper, 0.5)},
        step=1,
        apply=_descent,
    )
    assert slots[feature.table]["count"].tolist() == counts
    # Row 0 is looked up twice: 0 - .5·2 at once, or 0 - .5 and then -.5 - .5·1.5 one by one.
    expected = [-1.25 if hyper is ONE_BY_ONE else -1.0, -0.5, 0.0]
    assert tables[feature.table][:, 0].tolist() == expected


def test_nan_is_outside_of_every_interval():
    bounds = oracle_bounds.Interval(np.zeros(2), np.ones(2))
    assert oracle_bounds.outside([0.5, np.nan], bounds).tolist() == [[1]]
