"""What is known of each event stands where its row stands."""

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.data import EventValues, Prefetcher, place_values
from tpu_embed.optimizers import SGD

V = 50


def engine_of(devices, longest=0, keep="first"):
    """Return an engine with one jagged feature, and a state whose row i holds i and -i."""
    history = FeatureConfig(TableConfig(V, 2, name="items"), longest, jagged=True, keep=keep)
    config = {"history": history, "user": FeatureConfig(TableConfig(4, 2, name="users"))}
    engine = EmbeddingEngine(config, SGD(0.1), mesh=mesh(devices))
    state = engine.init(jax.random.key(0))
    rows = np.arange(V, dtype=np.float32)[:, None] * np.float32([1, -1])
    return engine, engine.load_arrays(state, {"items": rows})


def draw(rng):
    """Return 16 histories of random lengths, of which some are empty."""
    lengths = rng.integers(0, 8, 16) * rng.integers(0, 2, 16)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return RaggedIds(rng.integers(0, V, splits[-1]), splits)


def place(engine, history):
    size = len(history.row_splits) - 1
    return engine.place({"history": history, "user": np.zeros(size, np.int64)})


def values_of(history):
    """Return the rows of the ids as the values: what a lookup gives, too."""
    return np.asarray(history.values)[:, None] * np.float32([1, -1])


def assert_as_rows(placed, rows):
    np.testing.assert_array_equal(placed.values, rows.values)
    np.testing.assert_array_equal(placed.row_splits, rows.row_splits)
    assert placed.values.sharding.is_equivalent_to(rows.values.sharding, 3)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("longest", "keep"), [(0, "first"), (3, "first"), (3, "last")])
@pytest.mark.quick(3)
def test_values_stand_where_rows_stand(devices, longest, keep):
    engine, state = engine_of(devices, longest, keep)
    rng = np.random.default_rng([devices, longest])
    for _ in range(3):
        ids = draw(rng)
        batch = place(engine, ids)
        placed = place_values(engine, batch, "history", values_of(ids), ids.row_splits)
        assert_as_rows(placed, engine.lookup(state, batch)["history"])


def test_dtypes_and_shapes_are_kept_and_batches_of_others_refused():
    engine, _ = engine_of(1)
    ids = draw(np.random.default_rng(3))
    batch = place(engine, ids)
    for values in (np.arange(len(ids.values), dtype=np.uint8), np.zeros([len(ids.values), 2, 0])):
        placed = place_values(engine, batch, "history", values, ids.row_splits)
        assert placed.values.dtype == jax.numpy.asarray(values).dtype
        assert placed.values.shape[2:] == values.shape[1:]
    with pytest.raises(ValueError, match="expected a Batch of this engine's place"):
        place_values(engine_of(8)[0], batch, "history", values, ids.row_splits)


REFUSED = [
    ({"values": np.array([1, 2**40])}, "fit int32, got 1 to 1099511627776; give times in sec"),
    ({"feature": "user"}, "feature: expected a jagged feature among .'history'., got 'user'"),
    ({"feature": "historie"}, "did you mean.*history"),
    ({"row_splits": [0, 1, 2]}, r"expected \[9\], for the 8 examples of this process, got sh"),
    ({"values": np.zeros(3)}, r"values: expected \[2, …\], one per event, got shape \(3,\)"),
    ({"values": 1.0}, r"values: expected \[2, …\], one per event, got shape \(\)"),
    ({"row_splits": [0, 2, 1, *[2] * 6]}, r"expected numbers that rise from 0, got \[0 2 1"),
    ({"values": np.zeros(99), "row_splits": [*[0] * 8, 99]}, "at most . events on a device"),
    ({"row_splits": np.zeros(9)}, "expected integers, got float64"),
]


def test_what_does_not_fit_is_refused():
    engine, _ = engine_of(1)
    ids = RaggedIds(np.array([1, 2]), np.array([0, 0, 1, 1, 2, 2, 2, 2, 2]))
    batch = place(engine, ids)
    given = {"feature": "history", "values": np.zeros(2), "row_splits": ids.row_splits}
    for changed, words in REFUSED:
        with pytest.raises((ValueError, TypeError), match=words):
            place_values(engine, batch, **(given | changed))


# -- in the items of a source --------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 8])
def test_values_of_an_item_are_placed_with_its_features(devices):
    """With the item's own row splits, weights, and in batches that are only looked up."""
    engine, state = engine_of(devices, 3, "last")
    history = draw(np.random.default_rng(1))
    features = {"history": history, "user": np.zeros(16, np.int64)}
    known, with_splits = (
        {"of": [EventValues("history", values_of(history), splits), "Monday"], "price": 0.5}
        for splits in (None, history.row_splits)
    )
    sources = [
        ((features, known), {}),
        ((features, None, with_splits), {"weighted": True}),
        (({"history": history}, known), {"training": False}),
    ]
    for item, options in sources:
        ((batch, found),) = Prefetcher(engine, [item], **options)
        rows, (placed, day) = engine.lookup(state, batch)["history"], found["of"]
        assert_as_rows(placed, rows)
        assert (day, found["price"]) == ("Monday", 0.5)
    assert isinstance(known["of"][0], EventValues)  # the source keeps its item


def test_values_of_an_item_that_do_not_fit_are_refused_with_the_number_of_the_batch():
    engine, _ = engine_of(1)
    history = draw(np.random.default_rng(3))
    fits = {"history": history, "user": np.zeros(16, np.int64)}
    for words, ids, values in (
        ("values: expected .*, one per event, got shape .99,", history, np.zeros(99)),
        ("'history': expected RaggedIds, which have some, got nd", np.full((16, 2), 1), [0.0]),
    ):
        source = [(fits,), (fits | {"history": ids}, EventValues("history", values))]
        with Prefetcher(engine, source) as batches:
            next(batches)
            with pytest.raises(ValueError, match=words) as refused:
                next(batches)
        assert refused.value.__notes__ == ["This was batch 2 of the source."]
