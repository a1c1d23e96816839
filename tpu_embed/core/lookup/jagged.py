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

from tpu_embed._checks import check_in_program, check_int, message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer
from tpu_embed.core.lookup import segments

# -- checks ----------------------------------------------------------------------------------------


def refuse_arithmetic(self: Any, *_: Any, **__: Any) -> Any:
    """Refuse to be computed with as if it were an array.

    Raises:
      TypeError: always.
    """
    remedy = "compute with jagged.values, and jagged.with_values(new) has the same sequences again"
    raise TypeError(message("Jagged", expected="an array", got="a Jagged", remedy=remedy))


def concrete(what: str, array: Any) -> np.ndarray:
    """Return an array on the host.

    Raises:
      TypeError: it is traced.
    """
    if isinstance(array, Tracer):
        expected, got = "arrays whose values are known", "a tracer"
        remedy = "call it outside of the jit, or use to_padded"
        raise TypeError(message(what, expected=expected, got=got, remedy=remedy))
    return np.asarray(array)


def check_arrays(values: Any, row_splits: Any) -> None:
    """Check a pair of arrays; anything else is a placeholder, which is accepted.

    Raises:
      TypeError, ValueError: see `Jagged`.
    """
    dtype = getattr(row_splits, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(message("Jagged.row_splits", expected="integers", got=str(dtype)))
    shape, axes = getattr(values, "shape", None), row_splits.ndim
    if shape is None:
        return
    if not axes or len(shape) < axes or shape[: axes - 1] != row_splits.shape[:-1]:
        expected = "values [S, C, …] and row_splits [S, B / S + 1]"
        got = f"shapes {shape} and {row_splits.shape}"
        raise ValueError(message("Jagged", expected=expected, got=got))


def check_padded(padded: Array, lengths: Any, shards: int) -> None:
    """Check shapes and dtypes of the arguments of `Jagged.from_padded`.

    Raises:
      TypeError, ValueError: see there.
    """
    where = "Jagged.from_padded"
    check_int(f"{where}: shards", shards, minimum=1)
    if padded.ndim < 2:
        raise ValueError(message(f"{where}: padded", expected="[B, L, …]", got=str(padded.shape)))
    if padded.shape[0] % shards:
        expected, got = f"rows that {shards} shards divide", f"{padded.shape[0]}"
        remedy = "tpu_embed.pad_batch adds empty examples"
        raise ValueError(message(f"{where}: padded", expected=expected, got=got, remedy=remedy))
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(message(f"{where}: lengths", expected="integers", got=str(lengths.dtype)))
    if lengths.shape != padded.shape[:1]:
        expected, got = f"one per row, {padded.shape[:1]}", f"{lengths.shape}"
        raise ValueError(message(f"{where}: lengths", expected=expected, got=got))


def check_room(capacity: Any) -> Any:
    """Return a capacity: an integer, or the symbol that it is in a program exported for any B.

    Raises:
      ValueError: it is neither.
    """
    if jax.export.is_symbolic_dim(capacity):
        return capacity
    return check_int("Jagged.from_padded: capacity", capacity, minimum=0)


def check_lengths(lengths: Any, longest: int, room: int) -> None:
    """Check the lengths `[S, B / S]` of padded rows.

    Raises:
      ValueError: one is outside of 0 … `longest`, or those of a replica sum to more than `room`;
        where they are not known to this process, only `checkify` learns of it.
    """
    where = "Jagged.from_padded"
    if isinstance(lengths, Tracer) or not getattr(lengths, "is_fully_addressable", True):
        right = ((lengths >= 0) & (lengths <= longest)).all() & (lengths.sum(1) <= room).all()
        check_in_program(right, f"{where}: lengths outside of 0 to {longest}, or above {room}")
        return
    lengths = np.asarray(lengths)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= longest:
        expected, got = f"lengths from 0 to {longest}", f"{lengths.min()} to {lengths.max()}"
        raise ValueError(message(where, expected=expected, got=got))
    needed = int(lengths.sum(axis=1, dtype=np.int64).max(initial=0))
    if needed > room:
        expected, got = f"room for {needed} values on a replica", f"capacity {room}"
        remedy = "a capacity of None is always enough"
        raise ValueError(message(where, expected=expected, got=got, remedy=remedy))


# -- the activation --------------------------------------------------------------------------------


_WITH = "Jagged.with_values"


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
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = refuse_arithmetic
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
        return self._by_replica(lambda splits: segments.segment_ids(splits, self._capacity))

    @property
    def positions(self) -> Array:
        """The position of each value in its sequence, int32 `[S, C]`; 0 beyond the last split."""
        return self._by_replica(lambda splits: segments.positions(splits, self._capacity))

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
        if isinstance(new, Jagged):
            remedy = "give its values; they must be of the same batch"
            raise TypeError(message(_WITH, expected="an array", got="a Jagged", remedy=remedy))
        had, got = getattr(self.values, "shape", None), getattr(new, "shape", None)
        axes = getattr(self.row_splits, "ndim", None)
        if had is not None and got is not None and axes is not None and got[:axes] != had[:axes]:
            raise ValueError(
                message(
                    _WITH,
                    expected=f"first axes {had[:axes]}",
                    got=f"shape {got}",
                    remedy="values must be of the same batch; inside jax.vmap, the Jagged must be "
                    "mapped with its values",
                )
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
        if isinstance(others, Jagged):
            what, remedy = "Jagged.concatenate", "give them in a list"
            raise TypeError(message(what, expected="others", got="one Jagged", remedy=remedy))
        parts = [self, *others]
        for number, part in enumerate(others):
            _check_same_examples(f"Jagged.concatenate: others[{number}]", self, part)
        splits, values = [part._splits for part in parts], [part.values for part in parts]
        joined, new = self._by_replica(lambda _, *both: segments.join(*both), splits, values)
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
        padded, mask = self._by_replica(pad, self.values)
        return self._join_replicas(padded), self._join_replicas(mask)

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
        room = examples * longest if capacity is None else check_room(capacity)
        lengths = lengths.reshape(shards, examples)
        check_lengths(lengths, longest, room)
        # [B, L, …] -> [S, B / S, L, …]: the first axis stays sharded as B was.
        parts = padded.reshape(shards, examples, *padded.shape[1:])
        unpad = functools.partial(segments.unpad, capacity=room)
        splits, values = jax.vmap(unpad)(parts, jnp.asarray(lengths, jnp.int32))
        return cls(values, splits)

    def first(self) -> Array:
        """Return the first value of each sequence, `[B, …]`; zeros where it is empty."""
        return self._join_replicas(self._by_replica(segments.first, self.values))

    def last(self) -> Array:
        """Return the last value of each sequence, `[B, …]`; zeros where it is empty."""
        return self._join_replicas(self._by_replica(segments.last, self.values))

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
        what = "Jagged.to_list"
        splits, values = (concrete(what, x) for x in (self.row_splits, self.values))
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
        return self._join_replicas(self._sums()).astype(self.values.dtype)

    def means(self) -> Array:
        """Return the mean of each sequence, `[B, …]`; zeros where it is empty.

        The means of integers are float32.
        """
        sums, lengths = self._sums(), jnp.maximum(self.lengths, 1)
        dtype = self.values.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.dtype(jnp.float32)
            sums = sums.astype(dtype)
        # lengths [S, n] -> [S, n, 1, …], to divide [S, n, …].
        counts = lengths.reshape(*lengths.shape, *[1] * (sums.ndim - lengths.ndim))
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
        if array.shape[:1] != (math.prod(by_replica),):
            expected, got = f"shape [{math.prod(by_replica)}, …]", f"{list(array.shape)}"
            remedy = "one value per example; inside jax.vmap, those of the replica's examples"
            what = "Jagged.spread: of_examples"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        parts = array.reshape(*by_replica, *array.shape[1:])  # every part stays on its device
        return self._by_replica(
            lambda splits, part: segments.spread(splits, part, self._capacity), parts
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Return the two leaves with their names; for JAX."""
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("row_splits"), self.row_splits)), None

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

    def _sums(self) -> Array:
        """Return the sum of each sequence, `[S, B / S, …]`, in float32 at least."""
        return self._by_replica(segments.sum_segments, self.values)


# So that exported programs may take and return it.
jax.export.register_pytree_node_serialization(
    Jagged,
    serialized_name="tpu_embed.Jagged",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def _check_same_examples(what: str, first: Jagged, other: Jagged) -> None:
    """Check that two can be joined by example.

    Raises:
      TypeError, ValueError: see `Jagged.concatenate`.
    """
    if not isinstance(other, Jagged):
        remedy = "with_values and from_padded make one of an array"
        got = type(other).__name__
        raise TypeError(message(what, expected="a Jagged", got=got, remedy=remedy))
    splits, axes = first.row_splits.shape, first.row_splits.ndim
    dtype, inner = first.values.dtype, first.values.shape[axes:]
    if other.row_splits.shape != splits:
        expected, got = f"row_splits {splits}", f"{other.row_splits.shape}"
        remedy = "join the sequences of one batch, on the same devices"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    if (other.values.dtype, other.values.shape[axes:]) != (dtype, inner):
        expected = f"{dtype} values of shape {inner}"
        got = f"{other.values.dtype} values of shape {other.values.shape[axes:]}"
        raise ValueError(message(what, expected=expected, got=got))


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
    leaves, structure = jax.tree.flatten(activations, is_leaf=_is_jagged)
    values = [leaf.values if _is_jagged(leaf) else leaf for leaf in leaves]
    # `rebuild` may outlive the activations: of their values it keeps the shapes alone.
    frames = [
        leaf.with_values(jax.typeof(leaf.values)) if _is_jagged(leaf) else None for leaf in leaves
    ]

    def rebuild(values: PyTree) -> PyTree:
        pairs = zip(frames, structure.flatten_up_to(values), strict=True)
        return structure.unflatten(
            [value if frame is None else frame.with_values(value) for frame, value in pairs]
        )

    return structure.unflatten(values), rebuild


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Jagged)


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
    start, shift, splits = _span(array, room, number, count)
    events = jax.lax.dynamic_slice_in_dim(array.values[0], start, room)
    # What follows the part's events in the slice belongs to other examples.
    inside = _column(jnp.arange(room, dtype=jnp.int32) < splits[-1], events)
    events = jnp.where(inside, jnp.roll(events, -shift, axis=0), jnp.zeros((), events.dtype))
    return Jagged(events[None], splits[None])


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
        return jax.lax.dynamic_update_slice_in_dim(array, new, number * new.shape[0], axis=0)
    start, shift, splits = _span(array, room, number, count)
    values, places = array.values[0], jnp.arange(room, dtype=jnp.int32) - shift
    events = jax.lax.dynamic_slice_in_dim(values, start, room)
    inside = _column((places >= 0) & (places < splits[-1]), events)
    events = jnp.where(inside, jnp.roll(new[0], shift, axis=0), events)
    return jax.lax.dynamic_update_slice_in_dim(values, events, start, axis=0)[None]


def _span(sequences: Jagged, room: int, number: Array, count: int) -> tuple[Array, Array, Array]:
    """Return where the events of a part are on one device: in a slice of C' places.

    Returns:
      the first place of the slice; how far after it the part's events begin; the part's row splits.
    """
    # C = 10 places, C' = 4, and a part with the events at 8 and 9: a slice from 8 on would end
    # beyond C, so it is the one from 6 on, in which they begin at 2.
    size = (sequences.row_splits.shape[1] - 1) // count
    splits = jax.lax.dynamic_slice_in_dim(sequences.row_splits[0], number * size, size + 1)
    start = jnp.minimum(splits[0], sequences.values.shape[1] - room)
    return start, splits[0] - start, splits - splits[0]


def _column(mask: Array, events: Array) -> Array:
    """Return a mask `[C']` as `[C', 1, …]`."""
    return mask.reshape(-1, *[1] * (events.ndim - 1))
