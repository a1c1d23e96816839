"""Activations of sequences of different lengths, one after the other instead of padded.

A padded `[B, L, D]` has a place for each example at each of L positions, most of them empty where
lengths vary. `Jagged` has one place per id: the sequences of lengths 2, 0 and 1 are the 3 rows of
`values`, and `row_splits` (0, 2, 2, 3) says where each begins and ends. Every replica has its own
part of the batch, with splits that count from 0, so that a model works on one replica's part and
`jax.vmap` maps it over the replicas without moving anything between devices.

Input: values and row splits per replica. Output: the same as a pytree, numbers that say which
example and position each value belongs to, and results per example.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import (
    check_in_program,
    check_int,
    check_integers,
    check_type,
    refuse,
)
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer, as_array
from tpu_embed.core.lookup import segments

# -- checks ----------------------------------------------------------------------------------------


def require(
    right: Any, what: str, error: type[Exception] = ValueError, **words: Any
) -> None:
    """Raise an error about `Jagged` unless something is right.

    Args:
      right: whether it is.
      what: which method or argument it is about, as in ".spread: of_examples".
      error: the error.
      words: as for `message`.
    """
    if not right:
        refuse(f"Jagged{what}", error=error, **words)


def refuse_arithmetic(self: Any, *_: Any, **__: Any) -> Any:
    """Refuse to be computed with as if it were an array.

    Raises:
      TypeError: always.
    """
    require(
        False,
        "",
        TypeError,
        expected="an array",
        got="a Jagged",
        remedy="compute with jagged.values, and jagged.with_values(new) has the same sequences "
        "again",
    )


def check_arrays(values: Any, row_splits: Any) -> None:
    """Check a pair of arrays; anything else is a placeholder, which is accepted.

    Raises:
      TypeError, ValueError: see `Jagged`.
    """
    dtype = getattr(row_splits, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return
    check_integers("Jagged.row_splits", dtype)
    shape, axes = getattr(values, "shape", None), row_splits.ndim
    if shape is None:
        return
    fits = axes and len(shape) >= axes and shape[: axes - 1] == row_splits.shape[:-1]
    got = f"shapes {shape} and {row_splits.shape}"
    require(
        fits, "", expected="values [S, C, …] and row_splits [S, B / S + 1]", got=got
    )


def check_padded(padded: Array, lengths: Any, shards: int) -> None:
    """Check shapes and dtypes of the arguments of `Jagged.from_padded`.

    Raises:
      TypeError, ValueError: see there.
    """
    check_int("Jagged.from_padded: shards", shards, minimum=1)
    where, shape = ".from_padded: ", padded.shape
    require(len(shape) > 1, where + "padded", expected="[B, L, …]", got=shape)
    require(
        not shape[0] % shards,
        where + "padded",
        expected=f"rows that {shards} shards divide",
        got=shape[0],
        remedy="tpu_embed.pad_batch adds empty examples",
    )
    check_integers(f"Jagged{where}lengths", lengths.dtype)
    require(
        lengths.shape == shape[:1],
        where + "lengths",
        expected=f"one per row, {shape[:1]}",
        got=lengths.shape,
    )


def check_lengths(lengths: Any, longest: int, room: int) -> None:
    """Check the lengths `[S, B / S]` of padded rows.

    Raises:
      ValueError: one is outside of 0 … `longest`, or those of a replica sum to more than `room`;
        where they are not known to this process, only `checkify` learns of it.
    """
    where = ".from_padded"
    if isinstance(lengths, Tracer) or not getattr(
        lengths, "is_fully_addressable", True
    ):
        right = ((lengths >= 0) & (lengths <= longest)).all() & (
            lengths.sum(1) <= room
        ).all()
        check_in_program(
            right, f"Jagged{where}: lengths outside of 0 to {longest}, or above {room}"
        )
        return
    lengths = np.asarray(lengths)
    if lengths.size:
        low, high = lengths.min(), lengths.max()
        require(
            0 <= low <= high <= longest,
            where,
            expected=f"lengths from 0 to {longest}",
            got=f"{low} to {high}",
        )
    needed = int(lengths.sum(axis=1, dtype=np.int64).max(initial=0))
    require(
        needed <= room,
        where,
        expected=f"room for {needed} values on a replica",
        got=f"capacity {room}",
        remedy="a capacity of None is always enough",
    )


# -- the activation --------------------------------------------------------------------------------


@final
@jax.tree_util.register_pytree_with_keys_class
class Jagged:
    """Hold sequences of different lengths, one after the other in the part of each replica.

    Replica s holds B / S of the B examples. Its example e, counted within the replica, is
    `values[s, row_splits[s, e] : row_splits[s, e + 1]]`. Values beyond the last split belong to no
    example, and no method reads them; those that a lookup returns are zeros.

    Both arrays are leaves of a pytree. `jax.vmap` over the first axis gives a function the part of
    one replica: a `Jagged` with values `[C, …]` and splits `[B / S + 1]`, on which every method and
    property works in the same way, without the axis of replicas.

    Args:
      values: `[S, C, …]` of any dtype, from lookups float `[S, C, D]`; S replicas, C the capacity
        of each.
      row_splits: int32 `[S, B / S + 1]`, non-decreasing from 0 to at most C along the last axis.
        Where only the structure or the values matter (specs, gradients) it may be anything.

    Raises:
      TypeError: `row_splits` is an array, but not of integers.
      ValueError: the axes before the last one of `row_splits` are not the first ones of `values`.

    Example:
      >>> history = Jagged(jnp.arange(8.0).reshape(1, 4, 2), jnp.array([[0, 2, 2, 3]]))
      >>> history.lengths.tolist(), history.segment_ids.tolist(), history.positions.tolist()
      ([[2, 0, 1]], [[0, 0, 2, 3]], [[0, 1, 0, 0]])
      >>> history.sums().tolist()
      [[2.0, 4.0], [0.0, 0.0], [4.0, 5.0]]
    """

    __slots__ = ("_row_splits", "_values")

    # NumPy and JAX ask for these before they compute with it, or take it for an array.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse_arithmetic
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = (
        refuse_arithmetic
    )
    __neg__ = __abs__ = __array__ = __jax_array__ = refuse_arithmetic
    __array_ufunc__ = None

    def __init__(self, values: Any, row_splits: Any) -> None:
        check_arrays(values, row_splits)
        self._values, self._row_splits = values, row_splits

    @property
    def values(self) -> Any:
        """The values of all examples, `[S, C, …]`."""
        return self._values

    @property
    def row_splits(self) -> Any:
        """Where each example begins, and where the last one ends, int32 `[S, B / S + 1]`."""
        return self._row_splits

    @property
    def lengths(self) -> Array:
        """The number of values of each example, int32 `[S, B / S]`."""
        return self._splits[..., 1:] - self._splits[..., :-1]

    @property
    def segment_ids(self) -> Array:
        """The example of each value, counted within its replica, int32 `[S, C]`.

        Values beyond the last split have B / S, one more than the last example: the segment sums of
        JAX leave it out, and no example attends to it where segments are compared.
        """
        return self._by_replica(
            lambda splits: segments.segment_ids(splits, self._capacity)
        )

    @property
    def positions(self) -> Array:
        """The position of each value in its sequence, int32 `[S, C]`; 0 beyond the last split."""
        return self._by_replica(
            lambda splits: segments.positions(splits, self._capacity)
        )

    @property
    def valid(self) -> Array:
        """Whether each value belongs to an example, bool `[S, C]`."""
        return jnp.arange(self._capacity, dtype=jnp.int32) < self._splits[..., -1:]

    def with_values(self, new: Any) -> Jagged:
        """Return the same sequences of other values.

        Args:
          new: `[S, C, …]`.

        Raises:
          TypeError: `new` is a `Jagged`.
          ValueError: `new` is an array whose first axes are not `[S, C]`.
        """
        what = ".with_values"
        require(
            not isinstance(new, Jagged),
            what,
            TypeError,
            expected="an array",
            got="a Jagged",
            remedy="give its values; they must be of the same batch",
        )
        had, got = getattr(self.values, "shape", None), getattr(new, "shape", None)
        axes = getattr(self.row_splits, "ndim", None)
        if had is not None and got is not None and axes is not None:
            require(
                got[:axes] == had[:axes],
                what,
                expected=f"first axes {had[:axes]}",
                got=f"shape {got}",
                remedy="values must be of the same batch; inside jax.vmap, the Jagged must be "
                "mapped with its values",
            )
        return Jagged(new, self.row_splits)

    def concatenate(self, others: Sequence[Jagged]) -> Jagged:
        """Return the sequences of each example joined: its own, then those of the others.

        Args:
          others: the other sequences of the same examples, with values of the same dtype and shape
            but for C.

        Returns:
          A `Jagged` whose capacity is the sum of all.

        Raises:
          TypeError: what is given is not a sequence of `Jagged`.
          ValueError: another `Jagged` has another number of replicas or examples, or values of
            another dtype or shape.

        Example:
          >>> history = Jagged(jnp.array([[1, 2, 3, 0]]), jnp.array([[0, 2, 2, 3]]))
          >>> target = Jagged(jnp.array([[7, 8, 9]]), jnp.array([[0, 1, 2, 3]]))
          >>> joined = history.concatenate([target])
          >>> joined.values.tolist(), joined.row_splits.tolist()
          ([[1, 2, 7, 8, 3, 9, 0]], [[0, 3, 4, 6]])
        """
        require(
            not isinstance(others, Jagged),
            ".concatenate",
            TypeError,
            expected="others",
            got="one Jagged",
            remedy="give them in a list",
        )
        parts = [self, *others]
        for number, part in enumerate(others):
            self._check_same_examples(f".concatenate: others[{number}]", part)
        splits, values = (
            [part._splits for part in parts],
            [part.values for part in parts],
        )
        joined, new = self._by_replica(
            lambda _, *both: segments.join(*both), splits, values
        )
        return Jagged(new, joined)

    def to_padded(self, length: int) -> tuple[Array, Array]:
        """Return each sequence in a row of its own, padded with zeros.

        Args:
          length: L, the positions of a row. Of longer sequences the first L values are taken.

        Returns:
          the values, `[B, L, …]`; whether a place has one, bool `[B, L]`. Inside a `jax.vmap`, B is
          the number of the replica's examples.

        Raises:
          ValueError: `length` is not an integer of at least 0.
        """
        length = check_int("Jagged.to_padded: length", length, minimum=0)
        pad = functools.partial(segments.pad, length=length)
        return self._by_example(pad, self.values)

    @classmethod
    def from_padded(
        cls,
        padded: ArrayLike,
        lengths: ArrayLike | Sequence[int],
        shards: int,
        capacity: int | None = None,
    ) -> Jagged:
        """Return the first `lengths[e]` values of each row e.

        Where the lengths are traced, nothing can be raised. There a length outside of 0 … L counts
        as the nearest of them; values for which a capacity of your own leaves no room are cut off
        the end of the replica's part, and the lengths say so. Under `jax.experimental.checkify`
        both are errors.

        Args:
          padded: `[B, L, …]`.
          lengths: integers `[B]`, from 0 to L.
          shards: S, the number of replicas, which divides B; example e goes to replica ⌊e S / B⌋.
          capacity: C, the room of each replica. None: B / S · L, which is always enough.

        Raises:
          TypeError: the lengths are not integers.
          ValueError: S does not divide B, there is not one length per row, a length is outside of
            0 … L, or the values of a replica are more than C.

        Example:
          >>> padded = np.array([[5, 6], [0, 0], [7, 0], [8, 9]])
          >>> Jagged.from_padded(padded, [2, 0, 1, 2], 2, capacity=3).values.tolist()
          [[5, 6, 0], [7, 8, 9]]
        """
        padded = as_array(padded)
        lengths = lengths if isinstance(lengths, jax.Array) else np.array(lengths)
        check_padded(padded, lengths, shards)
        examples, longest = padded.shape[0] // shards, padded.shape[1]
        room = examples * longest if capacity is None else capacity
        # In a program that is exported for any B, it may be a symbol.
        if capacity is not None and not jax.export.is_symbolic_dim(capacity):
            check_int("Jagged.from_padded: capacity", capacity, minimum=0)
        lengths = lengths.reshape(shards, examples)
        check_lengths(lengths, longest, room)
        # [B, L, …] -> [S, B / S, L, …]: the first axis stays sharded as B was.
        parts = padded.reshape(shards, examples, *padded.shape[1:])
        unpad = functools.partial(segments.unpad, capacity=room)
        splits, values = jax.vmap(unpad)(parts, jnp.asarray(lengths, jnp.int32))
        return cls(values, splits)

    def first(self) -> Array:
        """Return the first value of each sequence, `[B, …]`; zeros where it is empty."""
        return self._by_example(segments.first, self.values)

    def last(self) -> Array:
        """Return the last value of each sequence, `[B, …]`; zeros where it is empty."""
        return self._by_example(segments.last, self.values)

    def attention_mask(self) -> Array:
        """Return which values each value may attend to, bool `[S, C, C]`.

        Value i attends to value j of the same sequence up to itself; values beyond the last split
        attend to nothing. Its size is that of C² numbers, so it is for short sequences.
        """
        return self._by_replica(lambda splits: segments.causal(splits, self._capacity))

    def to_list(self) -> list[np.ndarray]:
        """Return the values of each of the B examples on the host, `[n, …]` each.

        Raises:
          TypeError: the values are traced.
        """
        require(
            not any(
                isinstance(leaf, Tracer) for leaf in (self.row_splits, self.values)
            ),
            ".to_list",
            TypeError,
            expected="arrays whose values are known",
            got="a tracer",
            remedy="call it outside of the jit, or use to_padded",
        )
        splits, values = np.asarray(self.row_splits), np.asarray(self.values)
        parts = splits.reshape(-1, splits.shape[-1])
        rows = values.reshape(len(parts), -1, *values.shape[splits.ndim :])
        return [
            row[begin:end]
            for row, part in zip(rows, parts, strict=True)
            for begin, end in itertools.pairwise(part.tolist())
        ]

    def sums(self) -> Array:
        """Return the sum of each sequence, `[B, …]`; zeros where it is empty.

        Sums are taken from the first value to the last, in float32 at least; on GPUs in the order
        of a tree, which is the same in every run.
        """
        return self._by_example(segments.sum_segments, self.values).astype(
            self.values.dtype
        )

    def means(self) -> Array:
        """Return the mean of each sequence, `[B, …]`; zeros where it is empty.

        The means of integers are float32.
        """
        sums = self._by_replica(segments.sum_segments, self.values)
        dtype = self.values.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.dtype(jnp.float32)
            sums = sums.astype(dtype)
        counts = _column(jnp.maximum(self.lengths, 1), sums)
        return self._join_replicas(sums / counts.astype(sums.dtype)).astype(dtype)

    def spread(self, of_examples: ArrayLike) -> Array:
        """Return for each value what is known of its example, `[S, C, …]`; zeros beyond the last.

        So a number of a user comes to stand beside each of the user's events. The gradient of what
        is known of an example is the sum over its values.

        Args:
          of_examples: `[B, …]` of any dtype. Inside a `jax.vmap`, B is the number of the replica's
            examples.

        Raises:
          ValueError: there is not one value per example.

        Example:
          >>> history = Jagged(jnp.array([[5, 6, 7, 0]]), jnp.array([[0, 2, 2, 3]]))
          >>> history.spread([10, 20, 30]).tolist()
          [[10, 10, 30, 0]]
        """
        array, splits = as_array(of_examples), self.row_splits.shape
        by_replica = *splits[:-1], splits[-1] - 1  # [S, B / S]
        count = math.prod(by_replica)
        require(
            array.shape[:1] == (count,),
            ".spread: of_examples",
            expected=f"shape [{count}, …]",
            got=list(array.shape),
            remedy="one value per example; inside jax.vmap, those of the replica's examples",
        )
        # Every part stays on its device.
        parts = array.reshape(*by_replica, *array.shape[1:])
        return self._by_replica(
            lambda splits, part: segments.spread(splits, part, self._capacity), parts
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Return the two leaves with their names; for JAX."""
        key = jax.tree_util.GetAttrKey
        return (
            (key("values"), self.values),
            (key("row_splits"), self.row_splits),
        ), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> Jagged:
        """Return a `Jagged` of two leaves, whatever they are; for JAX."""
        jagged = object.__new__(cls)
        jagged._values, jagged._row_splits = leaves
        return jagged

    def __repr__(self) -> str:
        return f"Jagged(values={_short(self.values)}, row_splits={_short(self.row_splits)})"

    @property
    def _splits(self) -> Array:
        return as_array(self.row_splits).astype(jnp.int32)

    @property
    def _capacity(self) -> int:
        return self.values.shape[self.row_splits.ndim - 1]

    def _by_replica(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(row_splits, *arguments)` of the part of each replica."""
        for _ in range(self.row_splits.ndim - 1):
            function = jax.vmap(function)
        return function(self._splits, *jax.tree.map(as_array, arguments))

    def _join_replicas(self, array: Array) -> Array:
        """Return `[B, …]` of `[S, B / S, …]`, which leaves every part on its device."""
        axes = self.row_splits.ndim  # not -1, which an empty array leaves open
        return array.reshape(math.prod(array.shape[:axes]), *array.shape[axes:])

    def _by_example(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `_by_replica` does, with the examples of all replicas in one axis."""
        return jax.tree.map(self._join_replicas, self._by_replica(function, *arguments))

    def _check_same_examples(self, what: str, other: Any) -> None:
        """Check that another can be joined by example; see `concatenate`."""
        check_type(
            f"Jagged{what}",
            other,
            Jagged,
            expected="a Jagged",
            remedy="with_values and from_padded make one of an array",
        )
        splits = self.row_splits.shape
        require(
            other.row_splits.shape == splits,
            what,
            expected=f"row_splits {splits}",
            got=other.row_splits.shape,
            remedy="join the sequences of one batch, on the same devices",
        )
        expected, got = (
            f"{one.values.dtype} values of shape {one.values.shape[len(splits) :]}"
            for one in (self, other)
        )
        require(expected == got, what, expected=expected, got=got)


# So that exported programs may take and return it.
jax.export.register_pytree_node_serialization(
    Jagged,
    serialized_name="tpu_embed.Jagged",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def _short(leaf: Any) -> str:
    """Return dtype and shape of an array, without its numbers; of anything else its repr."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


# -- the arrays of activations ---------------------------------------------------------------------


def split_activations(activations: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return the float arrays of activations, and a function that restores the activations.

    `jax.grad` refuses integers, such as the row splits of a `Jagged`. So differentiate by the
    values alone, and put the activations together again inside the differentiated function, before
    any `jax.vmap`.

    Args:
      activations: what a lookup returns: arrays, and a `Jagged` per jagged feature, in any nesting.

    Returns:
      values: the same nesting, with the values `[S, C, D]` in the place of each `Jagged`. Gradients
        by it are what `update` takes.
      rebuild: a function of such values, which returns the activations with these values. It raises
        `ValueError` where values have other first axes than those of the `Jagged`.

    Example:
      >>> import jax.numpy as jnp
      >>> splits = jnp.array([[0, 2, 2, 3]])
      >>> activations = {"user": jnp.ones((3, 2)), "seen": Jagged(jnp.ones((1, 4, 2)), splits)}
      >>> values, rebuild = split_activations(activations)
      >>> def loss(values):
      ...     activations = rebuild(values)
      ...     return (activations["user"] * activations["seen"].sums()).sum()
      >>> jax.grad(loss)(values)["seen"][0, :, 0].tolist()
      [1.0, 1.0, 1.0, 0.0]
    """
    leaves, structure = flatten_arrays(activations)
    values = [leaf.values if isinstance(leaf, Jagged) else leaf for leaf in leaves]
    # `rebuild` may outlive the activations: of their values it keeps the shapes alone.
    frames = [
        leaf.with_values(jax.typeof(leaf.values)) if isinstance(leaf, Jagged) else None
        for leaf in leaves
    ]

    def rebuild(values):
        pairs = zip(frames, structure.flatten_up_to(values), strict=True)
        return structure.unflatten(
            [
                value if frame is None else frame.with_values(value)
                for frame, value in pairs
            ]
        )

    return structure.unflatten(values), rebuild


# -- parts of a batch ------------------------------------------------------------------------------


ARRAYS = (jax.Array, Jagged)
"""What an activation is, and what may belong to one."""


def flatten_arrays(tree: PyTree) -> tuple[list[Any], Any]:
    """Return the arrays of a tree, where a `Jagged` counts as one, and the tree without them."""
    return jax.tree.flatten(tree, is_leaf=lambda one: isinstance(one, Jagged))


def extent_of(array: Any, replicas: int) -> tuple[int | None, Any, int]:
    """Return how large an array is that is split into so many replicas, outside of a program.

    Returns:
      B, None of a single number; of a `Jagged` its row splits `[S, B / S + 1]` and C, else None, 0.
    """
    if not isinstance(array, Jagged):
        return next(iter(np.shape(array)), None), None, 0
    splits = array.row_splits
    return replicas * (splits.shape[1] - 1), splits, array.values.shape[1]


def take_part(array: Any, *, room: int, number: Array, count: int) -> Any:
    """Return a part of one device's examples.

    Args:
      array: `[B / S, …]`, or a `Jagged` of one replica.
      room: C' of a `Jagged`, at least the events of the part.
      number: of the part, int32 from 0.
      count: how many parts there are.
    """
    if not isinstance(array, Jagged):
        size = array.shape[0] // count
        return jax.lax.dynamic_slice_in_dim(array, number * size, size)
    _, shift, splits, events, inside = _span(array, room, number, count)
    # What else is in the slice belongs to other examples.
    events = jnp.where(inside, events, jnp.zeros((), events.dtype))
    return Jagged(jnp.roll(events, -shift, axis=0)[None], splits[None])


def put_part(array: Any, new: Array, *, room: int, number: Array, count: int) -> Array:
    """Return one device's values with others in the place of a part.

    Args:
      array: as for `take_part`.
      new: shaped like the values of the part.
      room: as for `take_part`.
      number: as for `take_part`.
      count: as for `take_part`.
    """
    if not isinstance(array, Jagged):
        return jax.lax.dynamic_update_slice_in_dim(
            array, new, number * new.shape[0], axis=0
        )
    start, shift, _, events, inside = _span(array, room, number, count)
    events = jnp.where(inside, jnp.roll(new[0], shift, axis=0), events)
    return jax.lax.dynamic_update_slice_in_dim(array.values[0], events, start, axis=0)[
        None
    ]


def _span(
    sequences: Jagged, room: int, number: Array, count: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Return where the events of a part are on one device: in a slice of C' places.

    Returns:
      the first place of the slice; how far after it the part's events begin; the part's row splits;
      the slice `[C', …]`; which of its places are the part's, bool `[C', 1, …]`.
    """
    # C = 10 places, C' = 4, and a part with the events at 8 and 9: a slice from 8 on would end
    # beyond C, so it is the one from 6 on, in which they begin at 2.
    values, size = sequences.values[0], (sequences.row_splits.shape[1] - 1) // count
    splits = jax.lax.dynamic_slice_in_dim(
        sequences.row_splits[0], number * size, size + 1
    )
    start = jnp.minimum(splits[0], values.shape[0] - room)
    events, shift = jax.lax.dynamic_slice_in_dim(values, start, room), splits[0] - start
    places, splits = jnp.arange(room, dtype=jnp.int32) - shift, splits - splits[0]
    return (
        start,
        shift,
        splits,
        events,
        _column((places >= 0) & (places < splits[-1]), events),
    )


def _column(array: Array, like: Array) -> Array:
    """Return an array with axes of length 1 behind its own, as many axes as another has."""
    return array.reshape(*array.shape, *[1] * (like.ndim - array.ndim))
