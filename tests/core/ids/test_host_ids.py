"""Every kind of input becomes the bags that the oracle reads; other input is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import FeatureShape, HostIds, RaggedIds, SparseIds, host_ids

V = 6


def _feature(size: int = V, **options) -> FeatureConfig:
    return FeatureConfig(TableConfig(size, 4), **options)


def _host(feature: FeatureConfig, ids, weights=None) -> HostIds:
    host = host_ids("user/x", feature, "items", ids, weights)
    _check_invariants(host, feature)
    return host


def _check_invariants(host: HostIds, feature: FeatureConfig) -> None:
    form = host.shape
    assert host.ids.dtype == np.int32
    assert all(type(n) is int for n in (form.batch, *form.inner))
    assert form.weighted == (host.weights is not None)
    if host.weights is not None:
        assert host.weights.dtype == np.float32
        assert host.weights.shape == host.ids.shape
    if form.width is None:
        assert host.bags.dtype == np.int32
        assert host.bags.shape == host.ids.shape
        assert (np.diff(host.bags) >= 0).all()
        assert ((host.ids >= 0) & (host.ids < feature.table.vocabulary_size)).all()
    else:
        assert host.bags is None
        assert host.ids.shape == (form.batch, form.bags, form.width)
        assert ((host.ids >= -1) & (host.ids < feature.table.vocabulary_size)).all()


def _bags(host: HostIds) -> list[list[tuple[int, float]]]:
    """Return (id, weight) of each bag in order."""
    bags: list[list[tuple[int, float]]] = [[] for _ in range(host.shape.batch * host.shape.bags)]
    weights = np.ones(host.ids.shape) if host.weights is None else host.weights
    if host.bags is not None:
        for bag, number, weight in zip(host.bags, host.ids, weights, strict=True):
            bags[bag].append((int(number), float(weight)))
        return bags
    shape = (len(bags), host.ids.shape[-1])
    rows = host.ids.reshape(shape), weights.reshape(shape)
    for bag, numbers, factors in zip(bags, *rows, strict=True):
        bag += [(int(n), float(w)) for n, w in zip(numbers, factors, strict=True) if n >= 0]
        assert not factors[numbers < 0].any() or host.weights is None
    return bags


def _agrees(feature: FeatureConfig, ids, weights=None) -> None:
    reading = oracle.read(feature, ids, weights)
    host = _host(feature, ids, weights)
    assert (host.shape.batch, *host.shape.inner) == reading.shape
    assert host.shape.combines == (reading.combiner is not None)
    assert _bags(host) == reading.bags


weight = st.sampled_from([0.0, 0.5, -2.0, 1.0])
entry = st.tuples(st.integers(-3, V + 2), weight)
bags_of = st.lists(st.lists(entry, max_size=4), min_size=1, max_size=4)
policy = st.sampled_from(["drop", "clip"])


@given(bags_of, st.booleans(), st.integers(0, 3), policy)
def test_sparse_and_ragged_agree_with_the_oracle(bags, weighted, length, on_bad_id):
    feature = _feature(max_sequence_length=length, on_bad_id=on_bad_id)
    ids = [[number for number, _ in bag] for bag in bags]
    weights = [[factor for _, factor in bag] for bag in bags] if weighted else None
    ragged = RaggedIds.from_lists(ids, weights=weights)
    sparse = SparseIds.from_lists(ids, weights=weights)
    _agrees(feature, ragged)
    _agrees(feature, sparse)
    assert _bags(_host(feature, ragged)) == _bags(_host(feature, sparse))


@given(bags_of, st.booleans(), st.integers(0, 3), policy, st.sampled_from([np.int8, np.int64]))
def test_dense_agrees_with_the_oracle_and_with_sparse(bags, weighted, length, on_bad_id, dtype):
    feature = _feature(max_sequence_length=length, on_bad_id=on_bad_id)
    width = max(1, *map(len, bags))
    ids = np.full((len(bags), width), -1, dtype)
    weights = np.full(ids.shape, 0.25)
    for row, bag in enumerate(bags):
        for column, (number, factor) in enumerate(bag):
            ids[row, column], weights[row, column] = number, factor
    given_weights = weights if weighted else None
    _agrees(feature, ids, given_weights)
    if not length:
        _agrees(feature, ids[:, :1].reshape(-1))  # one id an example
    here = ids != -1
    sparse = SparseIds(np.argwhere(here), ids[here], ids.shape, weights[here])
    assert _bags(_host(feature, ids, weights)) == _bags(_host(feature, sparse))


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 3), policy, st.data()
)
def test_many_bags_agree_with_the_oracle(b, k, m, h, on_bad_id, data):
    shape, size = (b, k, m, h), b * k * m * h
    numbers = data.draw(st.lists(st.integers(-3, V + 2), min_size=size, max_size=size))
    ids = np.array(numbers, np.int64).reshape(shape)
    weights = np.arange(size, dtype=np.float32).reshape(shape)
    feature = _feature(on_bad_id=on_bad_id, output_shape=(b, k, m))
    _agrees(feature, ids, weights)
    here = ids != -1
    sparse = SparseIds(np.argwhere(here), ids[here], shape, weights[here])
    _agrees(feature, sparse)
    assert _bags(_host(feature, sparse)) == _bags(_host(feature, ids, weights))
    assert _host(feature, ids).shape == FeatureShape(b, (k, m), True, h, False)
    assert _host(feature, sparse).shape == FeatureShape(b, (k, m), True, None, True)


@given(bags_of, st.integers(1, 3), policy)
def test_ragged_output_shapes_agree_with_the_oracle(bags, k, on_bad_id):
    ragged = RaggedIds.from_lists(
        [[number for number, _ in bag] for bag in bags],
        weights=[[factor for _, factor in bag] for bag in bags],
    )
    for shape in [(len(bags), k), (k, len(bags)), (k * len(bags),), (1, len(bags), k)]:
        _agrees(_feature(on_bad_id=on_bad_id, output_shape=shape), ragged)


def test_int32_ids_are_not_copied():
    ids = np.arange(4, dtype=np.int32).reshape(2, 2)
    assert np.shares_memory(_host(_feature(), ids).ids, ids)
    assert np.shares_memory(_host(_feature(), RaggedIds(ids[0], [0, 2])).ids, ids)


def test_inputs_are_not_written_to():
    ids = np.array([[9, -1, 2]])
    weights = np.ones((1, 3), np.float32)
    _host(_feature(on_bad_id="drop"), ids, weights)
    _host(_feature(on_bad_id="clip"), ids, weights)
    assert ids.tolist() == [[9, -1, 2]]
    assert weights.tolist() == [[1.0, 1.0, 1.0]]


def test_arrays_of_jax_are_taken():
    assert _host(_feature(), jnp.array([[1, -1]])).ids.tolist() == [[[1, -1]]]
    ragged = RaggedIds(jnp.array([1, 2]), jnp.array([0, 2]), jnp.array([0.5, 1.0]))
    assert _bags(_host(_feature(), ragged)) == [[(1, 0.5), (2, 1.0)]]


def test_nothing_at_all():
    for shape, dtype in itertools.product([(0,), (0, 3), (2, 0), (0, 2, 3)], [np.int32, np.uint8]):
        _agrees(_feature(), np.zeros(shape, dtype))
    _agrees(_feature(), RaggedIds([], [0]))
    _agrees(_feature(), RaggedIds([], [0, 0, 0]))
    _agrees(_feature(max_sequence_length=2), RaggedIds([], [0, 0, 0]))
    _agrees(_feature(), SparseIds([], [], (3, 2)))
    _agrees(_feature(), SparseIds([], [], (0, 2, 2)))


def test_trailing_empty_rows_and_repeated_ids_are_kept():
    assert _host(_feature(), SparseIds([[0, 0]], [1], (5, 2))).shape.batch == 5
    sparse = SparseIds([[0, 0], [0, 5], [1, 0]], [2, 2, 2], (2, 6))
    assert _bags(_host(_feature(), sparse)) == [[(2, 1.0), (2, 1.0)], [(2, 1.0)]]


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        (np.ones((2, 2)), "float64"),
        (np.ones(2, bool), "bool"),
        (jnp.ones(2, jnp.bfloat16), "bfloat16"),
        (np.array(["a"]), r"<U1; tpu_embed.hash_ids"),
        (np.array(["a"], object), r"objects of str; tpu_embed.hash_ids"),
        (RaggedIds([1.0], [0, 1]), "float64"),
        (SparseIds([[0, 0]], [True], (1, 1)), "bool"),
    ],
)
def test_ids_that_are_not_integers(ids, got):
    says = f"user/x: expected ids of an integer dtype, got {got}"
    with pytest.raises(TypeError, match=says):
        _host(_feature(), ids)


def test_traced_ids_are_refused():
    says = "user/x: expected ids whose values are known, got a tracer; place outside the jitted"
    with pytest.raises(ValueError, match=says):
        jax.jit(lambda ids: _host(_feature(), ids).ids)(np.ones((1, 2), int))


def test_masked_weights_and_indices_are_refused():
    """NumPy drops the mask when it makes a plain array of one."""
    masked = np.ma.masked_array([[1, 2]], mask=[[False, True]])
    for call, what in (
        (lambda: RaggedIds([1, 2], [0, 2], masked[0]), "RaggedIds.weights"),
        (lambda: SparseIds(masked, [1], (2, 3)), "SparseIds.indices"),
        (lambda: _host(_feature(), np.ones((1, 2), int), masked), "weights of user/x"),
        (lambda: _host(_feature(), RaggedIds([1, 2], [0, 2]), masked[0]), "weights of user/x"),
    ):
        with pytest.raises(TypeError, match=f"{what}: expected an array, got a masked"):
            call()


@pytest.mark.parametrize(
    ("options", "ids", "says"),
    [
        ({}, np.int32(3), r"expected ids of rank 1 or more, got rank 0"),
        ({}, 3, r"expected an array of ids, SparseIds or RaggedIds, got int; .*constructors"),
        ({}, None, r"expected an array of ids, .*got NoneType"),
        ({}, scipy.sparse.csr_array((2, 2), dtype=int), r"expected an array .*got csr_array"),
        ({"max_sequence_length": 2}, np.zeros(3, int), r"expected a sequence's ids as \[B, H\]"),
        ({"max_sequence_length": 2}, SparseIds([], [], (2, 2, 2)), "expected a sequence's"),
        ({"output_shape": (2, 3)}, np.zeros((2, 4, 3), int), "expected ids that give"),
        ({"output_shape": (3,)}, np.zeros(2, int), r"output_shape \(3,\), got ids that give"),
        ({"output_shape": (2, 2)}, SparseIds([], [], (2, 2)), r"\(2, 2\), got ids that give"),
        ({"output_shape": (3,)}, RaggedIds([], [0, 0, 0]), "product of R or kR for 2 rows"),
        ({"output_shape": (1,)}, RaggedIds([], [0]), r"for 0 rows, got \(1,\), product 1"),
    ],
)
def test_shapes_that_are_refused(options, ids, says):
    with pytest.raises(ValueError, match="user/x: .*" + says):
        _host(_feature(**options), ids)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (SparseIds([0], [1], (2,)), r"SparseIds.dense_shape \(B, H\) or longer, got \(2,\)"),
        (SparseIds([[0, 0]], [[1]], (1, 1)), r"SparseIds.values \[N\], got shape \(1, 1\)"),
        (SparseIds([[0, 0]], [1, 2], (1, 2)), r"SparseIds.indices \[2, 2\] of integers, got int64"),
        (SparseIds([[0, 0, 0]], [1], (1, 2)), r"indices \[1, 2\] .*of shape \(1, 3\)"),
        (SparseIds([[0.0, 0.0]], [1], (1, 2)), r"indices \[1, 2\] of integers, got float64"),
        (SparseIds([[0, 2]], [1], (1, 2)), r"indices inside dense_shape \(1, 2\), got \[0, 2\]"),
        (SparseIds([[0, 0], [-1, 0]], [1, 1], (1, 2)), r"inside dense_shape .*got \[-1, 0\]"),
        (SparseIds([[1, 0], [0, 1]], [1, 2], (2, 2)), "sorted by row, then column, none twice"),
        (
            SparseIds(np.array([[0, 1], [0, 0]], np.uint8), [1, 2], (2, 2)),
            r"sorted .*\[0, 1\] before \[0, 0\]",
        ),
        (SparseIds([[0, 1], [0, 1]], [1, 2], (2, 2)), r"none twice, got \[0, 1\] before \[0, 1\]"),
        (SparseIds([[0, 1, 0], [0, 0, 1]], [1, 2], (2, 2, 2)), r"sorted .*\[0, 1, 0\] before \[0"),
        (RaggedIds([[1]], [0, 1]), r"RaggedIds.values \[N\], got shape \(1, 1\)"),
        (RaggedIds([1], [[0, 1]]), r"RaggedIds.row_splits \[B \+ 1\] of integers, got int64"),
        (RaggedIds([], []), r"row_splits \[B \+ 1\] of integers, got int64 of shape \(0,\)"),
        (RaggedIds([1], [0]), r"row_splits that rise from 0 to 1, got \[0\]"),
        (RaggedIds([1, 2], [1, 2]), r"rise from 0 to 2, got \[1 2\]"),
        (RaggedIds([1, 2], [0, 1]), r"rise from 0 to 2, got \[0 1\]"),
        (RaggedIds([1, 2], np.array([0, 2, 1, 2], np.uint8)), r"rise from 0 to 2, got \[0 2 1 2\]"),
    ],
)
def test_containers_that_are_refused(ids, says):
    with pytest.raises(ValueError, match="user/x: expected .*" + says):
        _host(_feature(), ids)


def test_more_bags_than_int32_can_number():
    with pytest.raises(ValueError, match=r"at most 2147483647 bags in a batch, got 65536 x 65536"):
        _host(_feature(), SparseIds([], [], (2**16, 2**16, 1)))
