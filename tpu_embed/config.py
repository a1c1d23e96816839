"""Declarations: which tables there are, which features look them up, and how rows are quantized.

A table is an array of vectors; a feature is one column of the training data whose ids name rows of
a table. Several features may share a table.

Input: what the user writes. Output: frozen, validated objects. Nothing in the package changes
them; what is derived from them (names, layout, slots) is computed by the engine and kept there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import initializers
from tpu_embed._checks import (
    check_choice,
    check_int,
    explain_arguments,
    is_number,
    refuse,
)
from tpu_embed._types import Array
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import DynamicVocabulary

Combiner = Literal["mean", "sum", "sqrtn"]
Placement = Literal["mod", "div", "replicated", "auto"]
OnBadId = Literal["error", "drop", "clip"]
Rounding = Literal["nearest", "stochastic"]
Keep = Literal["first", "last"]

_DTYPES = ("float32", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Round every looked-up row to one of `num_buckets` evenly spaced values.

    With n = num_buckets, x is clipped to [lower, upper] and becomes
    x' = ⌊(x - lower)(n - 1)/(upper - lower) + ½⌋ (upper - lower)/(n - 1) + lower. The gradient
    passes through unchanged.

    Args:
      num_buckets: n, at least 2.
      lower: smallest value, finite.
      upper: largest value, finite, greater than `lower`.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> QuantizationConfig(num_buckets=256, lower=-1.0, upper=1.0).num_buckets
      256
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        buckets = check_int(
            "QuantizationConfig.num_buckets", self.num_buckets, minimum=2
        )
        object.__setattr__(self, "num_buckets", buckets)
        for field in ("lower", "upper"):
            bound = getattr(self, field)
            if not is_number(bound) or not np.isfinite(bound):
                refuse(
                    f"QuantizationConfig.{field}",
                    expected="a finite number",
                    got=repr(bound),
                )
            object.__setattr__(self, field, float(bound))
        if not self.lower < self.upper:
            refuse(
                "QuantizationConfig",
                expected="lower < upper",
                got=f"{self.lower} and {self.upper}",
            )


@explain_arguments(layout='placement="mod", "div" or "replicated"')
@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
    """Declare an embedding table of shape [V, D].

    Configs are compared and hashed by identity: features that name the same object share one
    table, while two objects with equal fields are two tables.

    Args:
      vocabulary_size: V, the number of rows; with `vocabulary`, the capacity: how many keys can
        have a row at a time.
      dim: D, the number of columns.
      initializer: `(key, shape, dtype) -> array`, called for one row at a time with shape (1, D),
        or once per shard if it has a `shard_info` argument. None: truncated normal with mean 0 and
        standard deviation 1/√D. An initializer that depends on the fan-in is refused.
      optimizer: one of `tpu_embed.optimizers` or a row-separable optax transform. None: the
        engine's optimizer.
      combiner: how the rows of a bag become one vector: "mean", "sum" or "sqrtn".
      name: the table's name. None: `table_{i}`, numbered by first appearance among the features.
      dtype: the dtype of the stored rows: float32, bfloat16, or float64 if x64 is on. The config
        keeps its name, a string.
      placement: where rows live: "mod" (row r on shard r mod S), "div" (a range per shard),
        "replicated", or "auto", which the planner must resolve before an engine is made.
      shard_axes: the mesh axes over which rows are split. None: all axes.
      trainable: False: the table is looked up but never updated; it has no optimizer and no slots.
      quantization_config: how each looked-up row is quantized. None: not at all.
      vocabulary: how keys of 64 bits get rows and lose them again: a dynamic vocabulary. None: ids
        are row numbers in [0, V).
      storage: keep the rows on the host, and those that batches need on the devices; V may then be
        up to 2⁶³, or, with `vocabulary`, is the capacity of the host. None: all rows are on the
        devices.
      rounding: how a bfloat16 table rounds the new values of its rows when an update stores them:
        "nearest", or "stochastic", at random to one of the two nearest, so that many small steps
        add up. Initial values, and rows that you set or load, are rounded to nearest.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> table = TableConfig(vocabulary_size=1000, dim=16, combiner="sum", name="user")
      >>> table.dtype, table == TableConfig(1000, 16, combiner="sum", name="user")
      ('float32', False)
    """

    vocabulary_size: int
    dim: int
    initializer: Callable[..., Array] | None = None
    optimizer: Any = None
    combiner: Combiner = "mean"
    name: str | None = None
    dtype: Any = "float32"
    placement: Placement = "mod"
    shard_axes: tuple[str, ...] | str | None = None
    trainable: bool = True
    quantization_config: QuantizationConfig | None = None
    vocabulary: DynamicVocabulary | None = None
    storage: HostStorage | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        # The fields of a frozen dataclass cannot be assigned; object.__setattr__ can set them.
        what = _described("TableConfig", self.name)
        for field in ("vocabulary_size", "dim"):
            size = check_int(f"{what}.{field}", getattr(self, field), minimum=1)
            object.__setattr__(self, field, size)
        check_choice(f"{what}.combiner", self.combiner, get_args(Combiner))
        check_choice(f"{what}.placement", self.placement, get_args(Placement))
        _check_type(f"{what}.trainable", self.trainable, bool)
        initializers.check(f"{what}.initializer", self.initializer)
        if self.quantization_config is not None:
            _check_type(
                f"{what}.quantization_config",
                self.quantization_config,
                QuantizationConfig,
            )
        if self.vocabulary is not None:
            _check_type(f"{what}.vocabulary", self.vocabulary, DynamicVocabulary)
            _check_map(what, self.vocabulary, self.vocabulary_size)
            self._check_rows_alone(what, "a dynamic vocabulary")
        if self.storage is not None:
            self._check_storage(what)
        object.__setattr__(self, "dtype", _dtype_name(f"{what}.dtype", self.dtype))
        check_choice(f"{what}.rounding", self.rounding, get_args(Rounding))
        if self.rounding == "stochastic" and self.dtype != "bfloat16":
            refuse(
                f"{what}.rounding",
                expected=f'"nearest" for a {self.dtype} table',
                got='"stochastic"',
                remedy='set dtype="bfloat16", or leave rounding out',
            )
        object.__setattr__(
            self, "shard_axes", _axes(f"{what}.shard_axes", self.shard_axes)
        )

    def __repr__(self) -> str:
        """Show all fields; without a name also which object it is, as equal ones are two tables."""
        shown = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)
        )
        return f"TableConfig({shown}{'' if self.name else f', at {id(self):#x}'})"

    def _check_storage(self, what: str) -> None:
        """Check that the other fields suit a table on the host."""
        _check_type(f"{what}.storage", self.storage, HostStorage)
        refused = {
            "placement": (self.placement == "replicated", '"mod", "div" or "auto"'),
            "vocabulary_size": (self.vocabulary_size > 2**63, "at most 2**63"),
        }
        for field, (is_bad, expected) in refused.items():
            if is_bad:
                refuse(
                    f"{what}.{field} with storage",
                    expected=expected,
                    got=repr(getattr(self, field)),
                )
        _check_map(f"{what}.storage", self.row_rules, self.device_rows)
        self._check_rows_alone(what, "a table on the host")

    def _check_rows_alone(self, what: str, kind: str) -> None:
        """Check that the initializer makes each row by itself, wherever it comes to stand."""
        if self.initializer is not None and initializers.wants_shard_info(
            self.initializer
        ):
            refuse(
                f"{what}.initializer",
                expected=f"one that makes a row from its random key, for {kind}",
                got=f"{self.initializer!r}, which looks at row numbers (shard_info)",
                remedy="a new row must not depend on the row number that it gets: give an "
                "initializer (key, shape, dtype)",
            )

    @property
    def device_rows(self) -> int:
        """The rows that the devices hold: V, or C of a table on the host."""
        return (
            self.vocabulary_size if self.storage is None else self.storage.device_rows
        )

    @property
    def row_rules(self) -> DynamicVocabulary | None:
        """How keys, or the ids at home of a table on the host, get rows on the devices."""
        if self.storage is None:
            return self.vocabulary
        return DynamicVocabulary(evict=self.storage.evict)


@explain_arguments(
    validate_weights_and_indices='on_bad_id="error", "drop" or "clip", and finite weights'
)
@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
    """Declare a feature: which table its ids look up, and the shape of its activation.

    Configs are compared and hashed by identity.

    Args:
      table: the `TableConfig` of the table that is looked up.
      max_sequence_length: L. 0: the ids of a bag are combined. L > 0: the feature is a sequence
        with the activation [B, L, D].
      output_shape: the activation's shape without D; its first entry is B. None: the shape follows
        from the input.
      on_bad_id: what happens to an id outside [0, V): "error" raises, "drop" leaves it out of its
        bag, "clip" replaces it by the nearest valid id. It does not apply to the keys of a dynamic
        vocabulary, which are all valid.
      name: a name that messages show beside the feature's path.
      jagged: the feature is a sequence whose activation is a `Jagged`: the rows of all examples one
        after the other, without padding between them. `max_sequence_length` then only cuts rows.
      keep: of a row longer than `max_sequence_length`, the "first" ids or the "last" ones are kept.
        A dense row ends after its last id that is not padding, a sparse one after its last column.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> table = TableConfig(vocabulary_size=1000, dim=16)
      >>> FeatureConfig(table, max_sequence_length=20).max_sequence_length
      20
    """

    table: TableConfig
    max_sequence_length: int = 0
    output_shape: tuple[int, ...] | None = None
    on_bad_id: OnBadId = "error"
    name: str | None = None
    jagged: bool = dataclasses.field(default=False, kw_only=True)
    keep: Keep = dataclasses.field(default="first", kw_only=True)

    def __post_init__(self) -> None:
        what = _described("FeatureConfig", self.name)
        _check_type(f"{what}.table", self.table, TableConfig)
        length = check_int(
            f"{what}.max_sequence_length", self.max_sequence_length, minimum=0
        )
        object.__setattr__(self, "max_sequence_length", length)
        check_choice(f"{what}.on_bad_id", self.on_bad_id, get_args(OnBadId))
        _check_type(f"{what}.jagged", self.jagged, bool)
        check_choice(f"{what}.keep", self.keep, get_args(Keep))
        if self.keep == "last" and not length:
            refuse(
                f"{what}.keep",
                expected='"first" where no row is cut',
                got='"last" with max_sequence_length=0',
                remedy="give max_sequence_length=L, too",
            )
        if self.output_shape is None:
            return
        if length or self.jagged:
            kind = "jagged=True" if self.jagged else f"max_sequence_length={length}"
            shape = "a Jagged" if self.jagged else "[B, max_sequence_length, D]"
            refuse(
                f"{what}.output_shape",
                expected="None for a sequence",
                got=f"{self.output_shape!r} with {kind}",
                remedy=f"a sequence's activation is {shape}",
            )
        object.__setattr__(
            self,
            "output_shape",
            _output_shape(f"{what}.output_shape", self.output_shape),
        )


def _check_type(what: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        refuse(what, expected=f"a {kind.__name__}", got=repr(value))


def _check_map(what: str, rules: DynamicVocabulary | None, capacity: int) -> None:
    """Check that a map can give so many rows by its rules, if there are any."""
    try:
        if rules is not None:
            rules.options(capacity, lookahead=0)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _described(kind: str, name: Any) -> str:
    """Return how messages name a config, such as `TableConfig 'user'`, after checking its name."""
    if name is None:
        return kind
    # A string that holds half of a surrogate pair cannot be encoded.
    if not (
        isinstance(name, str) and name and name.encode(errors="ignore").decode() == name
    ):
        refuse(
            f"{kind}.name",
            expected="None or a non-empty string of Unicode text",
            got=ascii(name),
        )
    return f"{kind} {name!r}"


def _dtype_name(what: str, dtype: Any) -> str:
    """Return the name of an allowed dtype."""
    # jnp.dtype(None) is float64, so None skips it; `check_choice` then refuses None.
    try:
        name = dtype if dtype is None else str(jnp.dtype(dtype).name)
    except TypeError:
        name = dtype
    check_choice(what, name, _DTYPES)
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        refuse(
            what,
            expected="float32 or bfloat16 while x64 is off",
            got="float64",
            remedy='turn it on with jax.config.update("jax_enable_x64", True)',
        )
    return str(name)


def _axes(what: str, axes: Any) -> tuple[str, ...] | None:
    """Return names of mesh axes as a tuple; None stays None."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) else axes
    known = isinstance(names, (tuple, list)) and all(
        isinstance(n, str) and n for n in names
    )
    if not known or not names or len(set(names)) != len(names):
        expected = "None or names of mesh axes: at least one axis, each once"
        refuse(what, expected=expected, got=repr(axes))
    return tuple(names)


def _output_shape(what: str, shape: Any) -> tuple[int, ...]:
    """Return an output shape as a tuple of positive ints."""
    if not isinstance(shape, (tuple, list)) or not shape:
        refuse(what, expected="None or a shape (B, ...)", got=repr(shape))
    return tuple(check_int(f"{what}[{i}]", n, minimum=1) for i, n in enumerate(shape))
