"""Updates that round at random: the oracle's bits in every arrangement, on every way to a row."""

import itertools

import jax
import numpy as np
import pytest
import rounding_cases as cases
from facade_cases import mesh

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.kernels import cpu

WAYS = [*itertools.product((1, 2, 4, 8), ("mod", "replicated", "div"), ("reference", "native"))]
OTHERS = {
    "rowwise": o.RowWiseAdagrad(0.03),
    "adam": o.Adam(0.003),
    "every row": o.Adam(0.003, lazy_adam=False),
    "each occurrence": o.SGD(0.003, use_gradient_accumulation=False),
    "lion": o.Lion(0.003),
}


@pytest.fixture
def kernels(monkeypatch):
    """Return a function that chooses the kernels of programs traced from now on."""

    def choose(kind):
        if kind == "native" and cpu.load().path is None:
            pytest.skip(f"compiled library: {cpu.load().why_not}")
        monkeypatch.setenv("TPU_EMBED_KERNELS", kind)

    return choose


@pytest.mark.parametrize(("devices", "placement", "kind"), WAYS)
@pytest.mark.quick(1)
def test_tables_have_the_bits_of_the_oracle(devices, placement, kind, kernels):
    """A step that is skipped for a bad gradient changes nothing, and no bit of what follows."""
    kernels(kind)
    made = cases.engine(devices, placement, on_bad_gradient="skip")
    state = made.init(jax.random.key(9))
    wanted = cases.expected(made, state, cases.STEPS)
    state = cases.trained(made, state, 1)
    ids, gradients = cases.batch_of(7)
    gradients["films"][3, 1] = np.nan
    state = made.update_in_place(state, made.place(ids), gradients)
    assert int(state.step) == 1
    state = cases.trained(made, state, cases.STEPS - 1, first=1)
    cases.assert_same(cases.bits_of(made, state), wanted)


@pytest.mark.whole
def test_tables_that_share_no_stack_and_traced_ids_have_the_same_bits():
    made = cases.engine(2, stack_tables=False)
    state = made.init(jax.random.key(9))
    wanted, step = cases.expected(made, state, cases.STEPS), jax.jit(made.update, donate_argnums=0)
    for number in range(cases.STEPS):
        state = step(state, *cases.batch_of(number))
    cases.assert_same(cases.bits_of(made, state), wanted)


@pytest.mark.whole
@pytest.mark.parametrize("rule", OTHERS)
def test_other_rules_have_the_same_bits_on_all_devices_and_kernels(rule, kernels):
    found = []
    for devices, placement, kind in ((1, "mod", "native"), (8, "div", "reference")):
        kernels(kind)
        made = cases.engine(devices, placement, OTHERS[rule])
        state = made.init(jax.random.key(2))
        found.append(cases.bits_of(made, cases.trained(made, state, cases.STEPS)))
    cases.assert_same(*found)


def test_only_the_store_of_a_new_row_differs():
    """Slots, first values, rows that are set and the activations of a batch are as before."""
    values = np.random.default_rng(0).random((23, 40), np.float32)
    before, after, slots = [], [], []
    for rounding in ("stochastic", "nearest"):
        table = TableConfig(23, 40, dtype="bfloat16", name="films", rounding=rounding)
        made = EmbeddingEngine(FeatureConfig(table), o.Adagrad(0.01), mesh=mesh(1))
        state = made.set_rows(made.init(jax.random.key(3)), "films", np.arange(9), values[:9])
        new = made.update(state, made.place(np.arange(23).reshape(23, 1)), values)
        before.append(made.tables(state))
        after.append(np.asarray(made.tables(new)["films"]).astype("f"))
        slots.append(made.slots(new)["films"])
    jax.tree.map(np.testing.assert_array_equal, *before)
    assert slots[0].keys() - slots[1].keys() == {"rounding_seed"}
    np.testing.assert_array_equal(slots[0]["accumulators"], slots[1]["accumulators"])
    one, other = after
    gap = np.maximum(np.abs(other), 2.0**-100) * 2.0**-7
    assert (np.abs(one - other) <= gap).all()
    assert 0.2 < (one != other).mean() < 0.8


def test_the_seed_is_that_of_the_key():
    made = cases.engine()
    seeds = {cases.seed_of(made, made.init(jax.random.key(n))) for n in range(9)}
    assert len(seeds) == 9
    assert cases.seed_of(made, made.init(jax.random.PRNGKey(3))) in seeds


def test_the_stateful_api_has_the_same_bits():
    made = cases.engine(2)
    state = made.init(jax.random.key(4))
    embedding = tpu_embed.TPUEmbedding(cases.features(), o.SGD(cases.LR), mesh=mesh(2), seed=4)
    for step in range(cases.STEPS):
        ids, gradients = cases.batch_of(step)
        embedding.enqueue(ids)
        embedding.dequeue()
        embedding.apply_gradients(gradients)
    wanted = cases.expected(made, state, cases.STEPS)
    tables = embedding.embedding_tables.items()
    found = {config.name: np.asarray(x).view(np.uint16) for config, x in tables}
    cases.assert_same(found, wanted)


def test_tables_that_are_rounded_otherwise_share_no_stack():
    tags = FeatureConfig(TableConfig(7, 5, name="tags", dtype="bfloat16"))
    made = EmbeddingEngine({**cases.features(), "tags": tags}, o.SGD(cases.LR), mesh=mesh(1))
    assert [len(stack.tables) for stack in made.layout.stacks] == [2, 1]
    assert made.describe()["tables"]["films"]["rounding"] == "stochastic"
    assert "bfloat16 (stochastic rounding), mod" in repr(made)


def test_slots_of_the_same_name_are_refused(refused):
    rule = o.CustomOptimizer(lambda g, w, slots, lr, t: (w, slots), slots={"rounding_seed": 0.0})
    refused(r"table 'films': slots .*other names than rounding_seed", cases.engine, optimizer=rule)
