"""Nestings of features: order, paths, names, and errors for values that do not match."""

import collections
import dataclasses
import types

import pytest

from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.core.ids.structure import flatten

Pair = collections.namedtuple("Pair", ["right", "left"])
OtherPair = collections.namedtuple("OtherPair", ["right", "left"])


@dataclasses.dataclass
class Record:
    zebra: object
    ant: object
    count: int = dataclasses.field(default=0, init=False)


def _feature(**options) -> FeatureConfig:
    return FeatureConfig(TableConfig(10, 4), **options)


def test_order_is_sorted_keys_then_positions_then_fields():
    config = {
        "b": [_feature(), _feature(name="clicks")],
        "a": Pair(_feature(), Record(_feature(), _feature())),
        "c": (_feature(),),
    }
    structure = flatten(config)
    assert structure.paths == ("a/right", "a/left/zebra", "a/left/ant", "b/0", "b/1", "c/0")
    assert structure.labels[3:5] == ("b/0", "b/1 (clicks)")
    assert structure.features[1] is config["a"].left.zebra
    assert structure.features[3] is config["b"][0]
    assert flatten({10: _feature(), 9: _feature()}).paths == ("9", "10")


def test_a_single_feature_is_a_structure():
    structure = flatten(feature := _feature())
    assert (structure.paths, structure.features) == (("feature",), (feature,))
    assert (structure.match(7, what="features"), structure.unflatten([8])) == ([7], 8)


@pytest.mark.parametrize(
    "make", [dict, collections.OrderedDict, lambda d: collections.defaultdict(list, d)]
)
def test_unflatten_keeps_types_that_jax_knows(make):
    config = make({"x": _feature(), "a": Pair(_feature(), [_feature(), (_feature(),)])})
    rebuilt = flatten(config).unflatten([1, 2, 3, 4])
    assert rebuilt == {"a": Pair(1, [2, (3,)]), "x": 4}
    assert type(rebuilt) is type(config)
    assert list(rebuilt) == ["x", "a"]


def test_dataclasses_come_back_as_themselves_and_other_mappings_as_dicts():
    structure = flatten(types.MappingProxyType({"b": _feature(), "a": _feature()}))
    assert structure.unflatten([1, 2]) == {"a": 1, "b": 2}
    assert type(structure.unflatten([1, 2])) is dict
    structure = flatten(Record(_feature(), {"x": _feature()}))
    assert structure.unflatten([1, 2]) == Record(1, {"x": 2})


def test_tables_are_numbered_by_first_appearance_named_ones_too():
    shared, named, last = TableConfig(5, 2), TableConfig(5, 2, name="users"), TableConfig(5, 2)
    config = [FeatureConfig(t) for t in (shared, named, shared, last)]
    structure = flatten(config)
    assert structure.tables == (shared, named, last)
    assert structure.table_names == ("table_0", "users", "table_2")
    assert [structure.table_index(feature) for feature in config] == [0, 1, 0, 2]
    assert shared.name is None


@pytest.mark.parametrize("names", [("users", "users"), ("table_1", None)])
def test_names_that_coincide(names, refused):
    says = rf"a name of its own for each table, got '{names[0]}' for tables 0, 1; .*one TableConfig"
    refused(says, flatten, [FeatureConfig(TableConfig(5, 2, name=name)) for name in names])


BAD_CONFIGS = [
    ({}, r"feature_config: expected at least one FeatureConfig, got \{\}"),
    ({"a": {"b": None}}, r"feature_config: a/b: expected a FeatureConfig, got None"),
    ([TableConfig(5, 2)], r"feature_config: 0: expected a FeatureConfig, got TableConfig"),
    ("text", r"feature_config: expected a FeatureConfig, got 'text'"),
    ({"a/b": _feature(), "a": {"b": _feature()}}, "path of its own .*got 'a/b' for features"),
    ({"a": _feature(), 1: _feature()}, r"expected keys that can be sorted, got 'a', 1"),
]


@pytest.mark.parametrize(("config", "says"), BAD_CONFIGS)
def test_configs_that_are_refused(config, says, refused):
    refused(says, flatten, config)


NEST = {"a": Pair(_feature(), [_feature(), _feature()]), "b": Record(_feature(), (_feature(),))}


def test_a_list_is_a_leaf_where_a_feature_stands(refused):
    values = {"b": Record([6, 7], ([],)), "a": Pair([[1], [2, 3]], [[4], "anything"])}
    found = flatten(NEST).match(values, what="features", columns=True)
    assert found == [[[1], [2, 3]], [4], "anything", [6, 7], []]
    says = r"gradients: a/right: expected one .*, got a list$"
    refused(says, flatten(NEST).match, values, what="gradients", error=TypeError)
    says = r"features: 0: .*got a tuple; a column may be a list"
    refused(says, flatten([_feature()]).match_weighted, [(1, 2)], None, error=TypeError)


def test_any_mapping_matches_any_other():
    structure = flatten({"a": _feature()})
    for make in (collections.OrderedDict, types.MappingProxyType):
        assert structure.match(make({"a": 1}), what="features") == [1]
    assert flatten(types.MappingProxyType({"a": _feature()})).match({"a": 1}, what="f") == [1]


OTHER_VALUES = [
    ({"a": Pair(1, [2, 3])}, ValueError, "b is missing: expected 2 entries"),
    ({"a": Pair(1, [2, 3]), "b": 0, "c": 6}, ValueError, "c is not among the features"),
    ({"a": Pair(1, [2]), "b": 0}, ValueError, "a/left/1 is missing"),
    ({"a": Pair(1, [2, 3, 4]), "b": 0}, ValueError, "a/left/2 is not among the features"),
    ({"a": Pair(1, (2, 3)), "b": 0}, TypeError, "a/left: expected a list, got a tuple"),
    ({"a": (1, [2, 3]), "b": 0}, TypeError, r"a: expected Pair, got a tuple"),
    ({"a": OtherPair(1, [2, 3]), "b": 0}, TypeError, r"a: expected Pair, got OtherPair"),
    ([1, 2], TypeError, r"the top: expected a mapping, got a list"),
    ({"a": None, "b": None}, TypeError, r"a: expected Pair, got NoneType"),
    ({"a": Pair((1,), [2, 3]), "b": 0}, TypeError, "a/right: expected one feature's value"),
    ({"a": Pair(1, [2, 3]), "b": {"ant": 1}}, TypeError, "b: expected Record, got a mapping"),
    (
        {"a": Pair(1, [2, 3]), "b": Record(Record(1, 2), (5,))},
        TypeError,
        "b/zebra: expected one",
    ),
]


@pytest.mark.parametrize(("values", "kind", "says"), OTHER_VALUES)
def test_values_that_do_not_match(values, kind, says, refused):
    refused(f"features: {says}", flatten(NEST).match, values, what="features", error=kind)
