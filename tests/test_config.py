"""Configs: what is accepted, how it is stored, and the text of each refusal."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.config import FeatureConfig, QuantizationConfig, TableConfig


def test_table_defaults_are_those_of_the_semantics():
    table = TableConfig(10, 4)
    assert dataclasses.asdict(table) == {
        "vocabulary_size": 10,
        "dim": 4,
        "initializer": None,
        "optimizer": None,
        "combiner": "mean",
        "name": None,
        "dtype": "float32",
        "placement": "mod",
        "shard_axes": None,
        "trainable": True,
        "quantization_config": None,
        "vocabulary": None,
        "storage": None,
        "rounding": "nearest",
    }


def test_tables_and_features_compare_and_hash_by_identity():
    table, twin = TableConfig(10, 4, name="t"), TableConfig(10, 4, name="t")
    assert table == table
    assert table != twin
    assert len({table, twin}) == 2
    feature, other = FeatureConfig(table), FeatureConfig(table)
    assert feature == feature
    assert feature != other
    assert len({feature, other}) == 2
    assert copy.copy(table) != table


def test_quantization_compares_by_value():
    assert QuantizationConfig(4, 0, 1) == QuantizationConfig(4, 0.0, 1.0)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TableConfig(10, 4).dim = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        FeatureConfig(TableConfig(10, 4)).name = "x"  # type: ignore[misc]


def test_replace_validates_again():
    table = dataclasses.replace(TableConfig(10, 4), combiner="sum")
    assert table.combiner == "sum"
    with pytest.raises(ValueError, match=r"TableConfig.dim"):
        dataclasses.replace(table, dim=0)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("float32", "float32"),
        (np.float32, "float32"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_dtype_is_kept_as_one_string(given, kept):
    assert TableConfig(10, 4, dtype=given).dtype == kept


def test_float64_needs_x64():
    with pytest.raises(
        ValueError, match=r"TableConfig.dtype: .* while x64 is off, got float64; .*x64"
    ):
        TableConfig(10, 4, dtype="float64")
    with jax.enable_x64(True):
        assert TableConfig(10, 4, dtype=np.float64).dtype == "float64"


def test_numpy_sizes_become_ints():
    table = TableConfig(np.int64(10), np.int32(4))
    assert type(table.vocabulary_size) is int
    assert type(table.dim) is int


def test_shard_axes_become_a_tuple():
    assert TableConfig(10, 4, shard_axes="x").shard_axes == ("x",)
    assert TableConfig(10, 4, shard_axes=["x", "y"]).shard_axes == ("x", "y")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"vocabulary_size": 0}, r"TableConfig.vocabulary_size: expected an integer >= 1, got 0"),
        ({"vocabulary_size": True}, r"vocabulary_size: expected an integer >= 1, got True"),
        ({"vocabulary_size": 10.0}, r"vocabulary_size: expected an integer >= 1, got 10.0"),
        ({"dim": -1}, r"TableConfig.dim: expected an integer >= 1, got -1"),
        ({"combiner": "max"}, r"combiner: expected 'mean' \| 'sum' \| 'sqrtn', got 'max'"),
        ({"combiner": None}, r"combiner: .*got None"),
        ({"placement": "rows"}, r"placement: expected 'mod' .*'auto', got 'rows'"),
        ({"dtype": "float16"}, r"dtype: expected 'float32' .*, got 'float16'"),
        ({"dtype": "nonsense"}, r"dtype: expected 'float32' .*, got 'nonsense'"),
        ({"dtype": None}, r"dtype: .*got None"),
        (
            {"rounding": "stochastic"},
            r'rounding: expected "nearest" for a float32 table, got "stochastic"; set dtype=',
        ),
        ({"rounding": "up", "dtype": "bfloat16"}, r"rounding: expected 'nearest' .*, got 'up'"),
        ({"trainable": 1}, r"trainable: expected a bool, got 1"),
        ({"initializer": 0.5}, r"initializer: expected None or a callable .*, got 0.5"),
        ({"name": ""}, r"name: expected None or a non-empty string of Unicode text, got ''"),
        ({"name": 3}, r"name: expected None or a non-empty string of Unicode text, got 3"),
        (
            {"name": "\ud800"},
            r"name: expected None or a non-empty string of Unicode text, got '.ud800'",
        ),
        ({"name": "users", "dim": 0}, r"TableConfig 'users'.dim: "),
        ({"shard_axes": ()}, r"shard_axes: expected .*at least one axis, each once, got \(\)"),
        ({"shard_axes": ("x", "x")}, r"shard_axes: expected .*at least one axis, each once"),
        ({"shard_axes": 3}, r"shard_axes: expected None or names of mesh axes.*, got 3"),
        ({"quantization_config": 8}, r"quantization_config: expected a QuantizationConfig, got 8"),
        (
            {"initializer": jax.nn.initializers.glorot_uniform()},
            r"TableConfig.initializer: .*one row.*variance_scaling.*table_shape",
        ),
    ],
)
def test_table_refusals(wrong, says):
    with pytest.raises(ValueError, match=says):
        TableConfig(**({"vocabulary_size": 10, "dim": 4} | wrong))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"table": "users"}, r"FeatureConfig.table: expected a TableConfig, got 'users'"),
        ({"max_sequence_length": -1}, r"max_sequence_length: expected an integer >= 0, got -1"),
        ({"max_sequence_length": True}, r"max_sequence_length: expected an integer >= 0, got True"),
        ({"max_sequence_length": 2.0}, r"max_sequence_length: expected an integer >= 0, got 2.0"),
        ({"on_bad_id": "warn"}, r"on_bad_id: expected 'error' \| 'drop' \| 'clip', got 'warn'"),
        ({"output_shape": 4}, r"output_shape: expected None or a shape \(B, ...\), got 4"),
        ({"output_shape": ()}, r"output_shape: expected None or a shape \(B, ...\), got \(\)"),
        ({"output_shape": (4, 0)}, r"output_shape\[1\]: expected an integer >= 1, got 0"),
        (
            {"output_shape": (4,), "max_sequence_length": 2},
            r"output_shape: expected None for a sequence, got \(4,\) with max_sequence_length=2",
        ),
        (
            {"name": 1},
            r"FeatureConfig.name: expected None or a non-empty string of Unicode text, got 1",
        ),
        ({"name": "clicks", "on_bad_id": "x"}, r"FeatureConfig 'clicks'.on_bad_id: "),
    ],
)
def test_feature_refusals(wrong, says):
    with pytest.raises(ValueError, match=says):
        FeatureConfig(**({"table": TableConfig(10, 4)} | wrong))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((1, 0.0, 1.0), r"num_buckets: expected an integer >= 2, got 1"),
        ((4, 1.0, 1.0), r"QuantizationConfig: expected lower < upper, got 1.0 and 1.0"),
        ((4, float("-inf"), 1.0), r"lower: expected a finite number, got -inf"),
        ((4, 0.0, "1"), r"upper: expected a finite number, got '1'"),
    ],
)
def test_quantization_refusals(args, says):
    with pytest.raises(ValueError, match=says):
        QuantizationConfig(*args)
