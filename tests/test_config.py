"""Configs: what is accepted, how it is stored, and what is refused."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import FeatureConfig, QuantizationConfig, TableConfig


def test_table_defaults_are_those_of_the_semantics():
    none = "initializer optimizer name shard_axes quantization_config vocabulary storage".split()
    words = {"combiner": "mean", "dtype": "float32", "placement": "mod", "rounding": "nearest"}
    expected = dict.fromkeys(none) | {"vocabulary_size": 10, "dim": 4, "trainable": True} | words
    assert dataclasses.asdict(TableConfig(10, 4)) == expected


def test_tables_and_features_compare_and_hash_by_identity():
    table = TableConfig(10, 4, name="t")
    features = FeatureConfig(table), FeatureConfig(table)
    for one, twin in ((table, TableConfig(10, 4, name="t")), features):
        assert one == one
        assert one != twin
        assert len({one, twin}) == 2
        assert copy.copy(one) != one
    assert QuantizationConfig(4, 0, 1) == QuantizationConfig(4, 0.0, 1.0)


def test_configs_are_frozen_and_a_replacement_is_checked():
    table = TableConfig(10, 4)
    for config, name in ((table, "dim"), (FeatureConfig(table), "name")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 5)
    assert dataclasses.replace(table, combiner="sum").combiner == "sum"
    with pytest.raises(ValueError, match=r"TableConfig.dim"):
        dataclasses.replace(table, dim=0)


def test_what_is_given_is_kept_in_one_form():
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"):
        assert TableConfig(10, 4, dtype=dtype).dtype == "bfloat16"
    assert TableConfig(10, 4, dtype=np.float32).dtype == "float32"
    with jax.enable_x64(True):
        assert TableConfig(10, 4, dtype=np.float64).dtype == "float64"
    table = TableConfig(np.int64(10), np.int32(4), shard_axes="x")
    assert type(table.vocabulary_size) is type(table.dim) is int
    assert table.shard_axes == ("x",)
    assert TableConfig(10, 4, shard_axes=["x", "y"]).shard_axes == ("x", "y")  # type: ignore[arg-type]


NAME = r"name: expected None or a non-empty string of Unicode text, got "
OF_TABLES = [
    ({"vocabulary_size": 0}, r"TableConfig.vocabulary_size: expected an integer >= 1, got 0"),
    ({"dim": -1}, r"TableConfig.dim: expected an integer >= 1, got -1"),
    ({"combiner": "max"}, r"combiner: expected 'mean' \| 'sum' \| 'sqrtn', got 'max'"),
    ({"placement": "rows"}, r"placement: expected 'mod' .*'auto', got 'rows'"),
    ({"dtype": "float16"}, r"dtype: expected 'float32' .*, got 'float16'"),
    ({"dtype": "float64"}, r"TableConfig.dtype: .* while x64 is off, got float64; .*x64"),
    ({"rounding": "stochastic"}, r'rounding: .*"nearest" for a float32 .*; set dtype='),
    ({"trainable": 1}, r"trainable: expected a bool, got 1"),
    ({"initializer": 0.5}, r"initializer: expected None or a callable .*, got 0.5"),
    ({"name": "\ud800"}, f"{NAME}'.ud800'"),
    ({"name": "users", "dim": 0}, r"TableConfig 'users'.dim: "),
    ({"shard_axes": ()}, r"shard_axes: expected .*at least one axis, each once, got \(\)"),
    ({"quantization_config": 8}, r"quantization_config: expected a QuantizationConfig, got 8"),
    ({"initializer": jax.nn.initializers.glorot_uniform()}, "initializer: .*one row.*table_shape"),
]
OF_FEATURES = [
    ({"table": "users"}, r"FeatureConfig.table: expected a TableConfig, got 'users'"),
    ({"max_sequence_length": -1}, r"max_sequence_length: expected an integer >= 0, got -1"),
    ({"on_bad_id": "warn"}, r"on_bad_id: expected 'error' \| 'drop' \| 'clip', got 'warn'"),
    ({"output_shape": 4}, r"output_shape: expected None or a shape \(B, ...\), got 4"),
    ({"output_shape": (4,), "max_sequence_length": 2}, "expected None for a sequence, got .*=2"),
    ({"name": 1}, f"FeatureConfig.{NAME}1"),
    ({"name": "clicks", "on_bad_id": "x"}, r"FeatureConfig 'clicks'.on_bad_id: "),
]
OF_QUANTIZATIONS = [
    ({"num_buckets": 1}, r"num_buckets: expected an integer >= 2, got 1"),
    ({"lower": 1.0}, r"QuantizationConfig: expected lower < upper, got 1.0 and 1.0"),
    ({"lower": float("-inf")}, r"lower: expected a finite number, got -inf"),
]


CASES = [
    (TableConfig(10, 4), OF_TABLES),
    (FeatureConfig(TableConfig(10, 4)), OF_FEATURES),
    (QuantizationConfig(4, 0.0, 1.0), OF_QUANTIZATIONS),
]


@pytest.mark.parametrize(("config", "cases"), CASES)
def test_refusals(config, cases):
    for wrong, says in cases:
        with pytest.raises(ValueError, match=says):
            dataclasses.replace(config, **wrong)
