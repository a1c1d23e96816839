"""Top-k over sharded tables, against loops: exact for integers, within bounds for floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh
from search_cases import assert_found, expected, integers

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, retrieval
from tpu_embed import optimizers as o

DIM = 3
SIZES = {"mod": 131, "stacked": 40, "div": 77, "whole": 23, "half": 61}
OPTIONS = {
    "div": {"placement": "div"},
    "whole": {"placement": "replicated"},
    "half": {"dtype": "bfloat16"},
}


@functools.cache
def engine_of(devices, names=tuple(SIZES)):
    tables = {n: TableConfig(SIZES[n], DIM, name=n, **OPTIONS.get(n, {})) for n in names}
    return EmbeddingEngine(jax.tree.map(FeatureConfig, tables), o.SGD(0.5), mesh=mesh(devices))


def loaded(engine):
    """Return an engine, a state whose tables are integers, and these."""
    rows = {n: integers(i, SIZES[n], DIM) for i, n in enumerate(engine.table_configs)}
    return engine, engine.load_arrays(engine.init(jax.random.key(0)), rows), rows


@functools.cache
def made(devices):
    return loaded(engine_of(devices))


SMALL_BLOCKS = {"PRODUCT_NUMBERS": 16, "LEAST_ROWS": 16, "BUNDLE_ROWS": 4}
SMALL_BLOCKS |= {"FEW_BUNDLES": (0, 1), "LEAST_HIDDEN": 2}


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 16 rows in bundles of 4, so that small tables have several of each.

    What a query must not find is hidden in rounds of 2 rows, unless a block's share is more.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name, number in SMALL_BLOCKS.items():
            patched.setattr(f"tpu_embed.retrieval.search.{name}", number)
        yield


def check(world, name, queries, k, *, jit=False, **options):
    """Search a table of integers, and compare with what must be found."""
    engine, state, rows = world

    def search(options):
        return retrieval.top_k(engine, state, name, queries, k, **options)

    found = (jax.jit(search) if jit else search)(options)
    assert_found(found, expected(rows[name], queries, k, **options))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.quick(2)
def test_integers_are_exact(devices, name):
    check(made(devices), name, integers(7, 5, DIM), 9)


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.whole)])
def test_excluded_and_allowed_rows(devices):
    """The ids that would be found are excluded; ids outside the table are ignored."""
    world, queries = made(devices), integers(8, 6, DIM)
    best = expected(world[2]["mod"], queries, 12)[1]
    exclude = np.concatenate([best[:, ::2], np.full((6, 2), -1), np.full((6, 1), 2**40)], axis=1)
    allowed = np.arange(SIZES["mod"]) % 3 > 0
    check(world, "mod", queries, 8, exclude=exclude)
    check(world, "mod", queries, 8, exclude=exclude, allowed=allowed)
    on_device = np.where(exclude < 2**31, exclude, -1).astype(np.int32)
    check(world, "mod", queries, 8, jit=True, exclude=on_device, allowed=allowed)


@pytest.mark.parametrize(("devices", "name"), [(1, "stacked"), (2, "half"), (2, "div"), (8, "mod")])
@pytest.mark.quick(2)
def test_many_excluded_rows(devices, name):
    """Most of the table, many in one block, in any order and several times; some exclude nothing.

    By id the rows of a shard do not stand together, and those of a table may begin anywhere.
    """
    size, queries = SIZES[name], integers(17, 5, DIM)
    exclude = np.random.default_rng(18).integers(-2, size + 2, (5, 3 * size))
    exclude[1], exclude[2], exclude[3, 20:] = -1, np.arange(3 * size) % 20, -1
    check(made(devices), name, queries, 6, exclude=exclude)
    narrow = (exclude % 128).astype(np.int8)  # on the devices, and smaller than row numbers
    check(made(devices), name, queries, 6, jit=True, exclude=narrow)


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.whole)])
def test_cosines(devices):
    """Of each vector only the direction counts; a row of zeros has the score 0."""
    engine, state, rows = made(devices)
    lengths = 10.0 ** np.random.default_rng(19).integers(-30, 30, (SIZES["mod"], 1))
    table, queries = (rows["mod"] * lengths).astype(np.float32), integers(20, 4, DIM) + 0.5
    state, how = engine.load_arrays(state, {"mod": table}), {"score": "cosine", "temperature": 0.25}
    found = retrieval.top_k(engine, state, "mod", queries, SIZES["mod"], **how)
    ids, scores = np.asarray(found.ids), np.asarray(found.scores)
    q, t = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
        for x in (queries.astype(np.float64), table.astype(np.float64))
    )
    wanted = np.take_along_axis(q @ t.T, ids, axis=1) / 0.25
    # A quotient, a square root and D products of numbers up to 1, each of which rounds once.
    np.testing.assert_allclose(scores, wanted, atol=4 * 16 * np.finfo(np.float32).eps)
    assert (np.diff(scores) <= 0).all()
    assert (np.sort(ids) == np.arange(SIZES["mod"])).all()
    zeros = ~table.any(axis=1)[ids]
    assert zeros.any()
    assert not scores[zeros].any()


def test_a_temperature_divides_scores_and_changes_no_id():
    (engine, state, rows), queries = made(2), integers(21, 3, DIM)
    scores, ids = expected(rows["div"], queries, 9)
    search = jax.jit(lambda t: retrieval.top_k(engine, state, "div", queries, 9, temperature=t))
    for temperature in (0.5, 4.0):  # XLA multiplies by 1 / temperature, exact for these
        found = search(temperature)
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_array_equal(found.scores, (scores / temperature).astype(np.float32))


EXCLUDED = [[3, 4] * 12, [-1, 22] * 12], np.tile(np.arange(24), (2, 1)), np.zeros((2, 0), int)


@pytest.mark.parametrize(("k", "exclude"), [(40, None), *((23, ids) for ids in EXCLUDED)])
def test_fewer_rows_than_k(k, exclude):
    """Also where all of them are excluded, or none."""
    check(made(2), "whole", integers(9, 2, DIM), k, exclude=exclude)


@pytest.mark.parametrize("packing", ["lanes", "words"])
@pytest.mark.parametrize("name", ["stacked", "half"])
@pytest.mark.quick(1)
def test_packed_rows(monkeypatch, packing, name):
    """As they lie on TPUs: a block begins at a multiple of 128, which may be before its table."""
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    engine = engine_of.__wrapped__(2, ("mod", "stacked", "half"))
    assert all(stack.packing == packing for stack in engine.layout.stacks)
    check(loaded(engine), name, integers(10, 3, DIM), 7)


def test_replicas_divide_the_queries():
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    table = TableConfig(SIZES["mod"], DIM, name="mod", shard_axes="model")
    engine = EmbeddingEngine(FeatureConfig(table), mesh=grid, batch_axes="data")
    world, queries = loaded(engine), integers(11, 5, DIM)
    check(world, "mod", queries, 4, exclude=np.arange(5)[:, None])
    program = jax.jit(lambda q: retrieval.top_k(*world[:2], "mod", q, 4)).lower(queries)
    # 5 queries are padded to 6, and each of two replicas has the product of 3.
    assert "tensor<3x16xf32>" in program.as_text()


def test_what_is_no_number_is_no_answer():
    """NaN and -inf never are; 0.0 and -0.0 are equal, so that the lower id comes first."""
    engine, state, rows = made(2)
    table = np.abs(rows["mod"]) + 1
    table[5], table[9], table[20], table[30] = np.nan, -np.inf, 0.0, -0.0
    state = engine.load_arrays(state, {"mod": table})
    # Of the first query, row 9 has the score inf, row 20 perhaps -0.0, row 30 0.0.
    queries = np.array([[-1.0, -1, -1], [np.nan, 0, 0], [1.0, 1, 1]], np.float32)
    found = retrieval.top_k(engine, state, "mod", queries, 3)
    assert found.ids[0].tolist() == [9, 20, 30]
    assert found.ids[1].tolist() == [-1, -1, -1]
    assert not {5, 9} & set(found.ids[2].tolist())


def test_zeros_are_equal():
    """With D = 1 a product with -1 is -0.0, which `jax.lax.top_k` would put after 0.0."""
    engine = EmbeddingEngine(FeatureConfig(TableConfig(4, 1, name="t")), mesh=mesh(1))
    rows = np.array([[0.0], [-0.0], [-1.0], [0.0]], np.float32)
    state = engine.load_arrays(engine.init(jax.random.key(0)), {"t": rows})
    for k in (3, 4):
        found = retrieval.top_k(engine, state, "t", -np.ones((1, 1), np.float32), k)
        assert found.ids.tolist() == [[2, 0, 1, 3][:k]]


@pytest.mark.whole
def test_rows_that_come_in_rising_order():
    """Every block is better than all before it, so all bundles matter, and then none."""
    engine, state, _ = made(1)
    rows = {"mod": np.repeat(np.arange(131, dtype=np.float32)[:, None], DIM, axis=1)}
    world = engine, engine.load_arrays(state, rows), rows
    for k in (1, 20):
        check(world, "mod", np.array([[1.0, 0, 0], [-1.0, 0, 0]], np.float32), k)


def test_a_step_that_searches_updates_in_place():
    """Only the ids are used, and the update must still come after the search."""
    table = TableConfig(4096, DIM, name="mod")
    engine = EmbeddingEngine(FeatureConfig(table), o.SGD(0.5), mesh=mesh(2))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, queries):
        ids = retrieval.top_k(engine, state, "mod", queries, 2).ids
        return engine.update(state, batch, jnp.ones((8, DIM))), ids

    state, batch = engine.init(jax.random.key(0)), engine.place(np.arange(8))
    queries = integers(12, 3, DIM)
    engine.check_in_place(step, state, batch, queries)
    wanted = expected(np.asarray(engine.tables(state)["mod"], np.float64), queries, 2)[1]
    np.testing.assert_array_equal(step(state, batch, queries)[1], wanted)


def test_a_second_call_compiles_nothing():
    engine, state, _ = made(2)
    queries, program = jnp.asarray(integers(13, 4, DIM)), retrieval.top_k.__globals__["_search"]
    retrieval.top_k(engine, state, "mod", queries, 3)
    before = program._cache_size()
    retrieval.top_k(engine, state, "mod", queries + 1, 3)
    assert program._cache_size() == before
    retrieval.top_k(engine, state, "mod", queries + 1, 4)
    assert program._cache_size() == before + 1


QUERIES = integers(14, 2, DIM)


REFUSED = {
    r"table: expected one of .*'mod'.*\], got 'films'": {"table": "films"},
    r"shape \[B, 3\].*got \[2, 4\]": {"queries": integers(1, 2, 4)},
    r"top_k: queries: expected shape \[B, 3\]": {"queries": QUERIES[0]},
    "top_k: queries: expected floats, got int64": {"queries": [[1, 2, 3]]},
    "top_k: k: expected an integer >= 1, got 0": {"k": 0},
    "expected an integer >= 1, got 2.0": {"k": 2.0},
    "expected an EmbeddingEngine.*embedding.engine": {"engine": "mine"},
    "top_k: exclude: expected integers": {"exclude": [[1.0], [2.0]]},
    r"top_k: exclude: expected shape \[2, E\]": {"exclude": [1, 2]},
    r"top_k: score: expected 'dot' \| 'cosine', got 'angle'": {"score": "angle"},
    "temperature: expected one number above 0, got 0": {"temperature": 0},
    "top_k: allowed: expected bool": {"allowed": np.ones(131)},
    r"top_k: allowed: expected shape \[131\]": {"allowed": np.ones(3, bool)},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    engine, state, _ = made(1)
    given = {"engine": engine, "state": state, "table": "mod", "queries": QUERIES, "k": 2}
    with pytest.raises((ValueError, TypeError), match=words):
        retrieval.top_k(**given | REFUSED[words])


def test_states_and_calls_that_are_refused():
    engine, other = engine_of(1, ("mod",)), engine_of(1, ("whole",))
    state = engine.init(jax.random.key(0))

    def search(queries=QUERIES, state=state):
        return retrieval.top_k(engine, state, "mod", queries, 2)

    with pytest.raises(ValueError, match="state: expected stacks"):
        search(state=other.init(jax.random.key(0)))
    with pytest.raises(ValueError, match="an array on the host, or on all 1 devices"):
        search(jax.device_put(QUERIES, jax.devices()[1]))
    with pytest.raises(TypeError, match="top_k: expected a search that is not differentiated"):
        jax.grad(lambda q: search(q).scores.sum())(QUERIES)
    engine.update_in_place(state, engine.place({"mod": np.arange(8)}), {"mod": np.ones((8, DIM))})
    with pytest.raises(ValueError, match="donated to an earlier call"):
        search()
    table = TableConfig(100, DIM, name="far", storage=HostStorage(device_rows=32))
    engine = EmbeddingEngine(FeatureConfig(table), o.SGD(0.1), mesh=mesh(1))
    with pytest.raises(ValueError, match=r"top_k: expected tables .*engine.rows\(state, 'far'"):
        retrieval.top_k(engine, engine.init(jax.random.key(0)), "far", QUERIES, 2)


@pytest.mark.parametrize("wrap", [lambda search: search, jax.jit])
def test_a_map_over_queries_is_refused(wrap):
    engine, state, _ = made(1)
    search = wrap(lambda q: retrieval.top_k(engine, state, "mod", q, 2).ids)
    with pytest.raises(TypeError, match=r"top_k: expected a call outside of jax.vmap.*at once"):
        jax.vmap(search)(integers(16, 3, DIM)[:, None])
