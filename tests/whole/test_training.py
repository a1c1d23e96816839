"""Twenty steps with every optimizer: the oracle's numbers, and the same bits in any layout.

Each case has every kind of input, duplicates, empty bags, weights of both signs, a table shared by
three features, and a sequence (`training_cases`). `make test` runs some optimizers in some layouts;
the full product is marked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_cases as cases
from training_cases import LayoutCase

from tpu_embed import optimizers as o

OPTIMIZERS = cases.all_optimizers()
# Twenty float32 steps of some twenty roundings, each of at most 2^-24 of its result, and results of
# at most about ten: 20 * 20 * 2^-24 is 2.4e-5, and most of them cancel.
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}
# The oracle rounds its rows to bfloat16 after each update, as the table does. Where float32 and
# float64 stand on two sides of a tie, a row differs by one unit in the last place, at most 2^-7 of
# it; rules that read the row carry that on, at most twice as far.
BFLOAT16 = {"rtol": 2.0**-6, "atol": 2.0**-6}
ONE_BY_ONE = {
    "Adagrad": o.Adagrad(0.1, use_gradient_accumulation=False),
    "Adam": o.Adam(0.1, use_gradient_accumulation=False, weight_decay_factor=0.03),
    "Momentum": o.Momentum(0.1, use_gradient_accumulation=False, clip_weight_max=0.5),
}


def reference(optimizer, dtype):
    """Return (tables, slots) of the oracle; of optax itself for one of its transforms."""
    if isinstance(optimizer, o.TableOptimizer):
        return cases.expected(optimizer, dtype)
    tables, leaves = cases.expected_by_optax(optimizer, dtype)
    names = list(o.as_table_optimizer(optimizer).slot_shapes(cases.D, jnp.float32))
    return tables, {table: dict(zip(names, leaves[table], strict=True)) for table in tables}


def check(optimizer, layouts):
    """Run an optimizer in layouts of one dtype: the oracle's numbers, and one set of bits."""
    first, dtype = layouts[0], layouts[0].dtype
    tables, slots = run = cases.run(optimizer, first)
    tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
    expected_tables, expected_slots = reference(optimizer, dtype)
    for table, rows in tables.items():
        assert rows.dtype == dtype
        got, expected = rows.astype(np.float64), expected_tables[table]
        np.testing.assert_allclose(got, expected, **tolerance, err_msg=f"{table}, {first}")
        assert set(slots[table]) == set(expected_slots[table])
        for slot, expected in expected_slots[table].items():
            words = f"{table}/{slot}, {first}"
            np.testing.assert_allclose(slots[table][slot], expected, **tolerance, err_msg=words)
    for layout in layouts[1:]:
        options = {"err_msg": f"{layout} differs from {first}", "strict": True}
        same = functools.partial(np.testing.assert_array_equal, **options)
        jax.tree.map(same, cases.run(optimizer, layout), run)


@pytest.mark.parametrize("dtype", cases.LEVELS["dtype"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick(2)
def test_some_layouts(name, dtype):
    layouts = LayoutCase(8, "replicated", stacking=False), LayoutCase(2, "div"), LayoutCase()
    check(OPTIMIZERS[name], [dataclasses.replace(layout, dtype=dtype) for layout in layouts])


@pytest.mark.whole
@pytest.mark.parametrize("dtype", cases.LEVELS["dtype"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_product(name, dtype):
    check(OPTIMIZERS[name], [layout for layout in cases.WHOLE if layout.dtype == dtype])


def test_bits_do_not_depend_on_what_surrounds_the_rule():
    """Sums by psum and sums by rows: XLA must not fuse either into the decay and the step."""
    dense = LayoutCase(8, "replicated", stacking=False)
    check(OPTIMIZERS["SGD-2"], [LayoutCase(2, "div"), dense])


@pytest.mark.whole
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_without_accumulation_each_occurrence_updates(name):
    layouts = [LayoutCase(1), LayoutCase(8), LayoutCase(4, "div", stacking=False)]
    check(ONE_BY_ONE[name], layouts)


def test_without_accumulation_a_replicated_table_is_refused():
    check(ONE_BY_ONE["Momentum"], [LayoutCase(2, "div", dtype="bfloat16")])
    with pytest.raises(ValueError, match=r"table 'item': use_gradient_accumulation: .*replicated"):
        cases.make_engine(ONE_BY_ONE["Adam"], LayoutCase(2, "replicated"))
