"""A traced program with taps, what reaches its results, and its gradients.

`jax.grad` gives a dense gradient `[V, D]` for a table, although only the rows that were looked up
have one. Here the lookups are found by tracing, and the gradient of a table (`IndexedSlices`) holds
those rows alone; all else has a dense one.

A *place* is something to differentiate by: an input of the program, or a tap, which is a further
input that stands for a value inside. The result of a lookup has a tap, and then passes no gradient
on to its table. Every question about what reaches a result is so about places: a lookup does if its
tap does, and a table is used in another way than by lookups if its own input does.

A tap of a lookup has the shape of the lookup's result, and its gradient is that of the rows that
were looked up. A lookup inside a scan has one tap for all iterations, stacked. A lookup in a branch
of a cond returns padding for ids when another branch is taken.

A gradient can only be nonzero where a path of differentiable equations leads from an input to a
result. Without one an argument has no gradient, and a lookup touches no row. An equation leads from
its float and complex operands to its float and complex results. `stop_gradient`, floor, ceil and
round cut the path. Paths are followed into calls, conds, scans and whiles. Any other equation with
a program inside, such as a custom rule, is opaque: each of its operands reaches each of its
results.

Input: a program, whose inputs may be tables, the values of its inputs, and where it gets taps.
Output: its lookups in program order, together with other equations that the caller asks for
(`find_sites`); `Program`, the same program with more inputs; what reaches its results
(`propagate`); its results and gradients (`pull_back`). Of a function of tables and other
parameters: one of the same arguments, like `jax.value_and_grad` (`sparse_value_and_grad`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad
from jax.sharding import AxisType

from tpu_embed._checks import is_int, refuse, warn_user
from tpu_embed._jaxprs import (
    CALLS,
    REMATS,
    Path,
    Site,
    flow,
    inner_jaxprs,
    rerun,
    scan_counts,
    walk,
)
from tpu_embed._types import PADDING_ID, Array, Tracer, as_array
from tpu_embed.core.state import TableState, refuse_gradient
from tpu_embed.kernels.tracing import as_varying, axes_of, varying_axes
from tpu_embed.sparse.indexed_slices import IndexedSlices, clean_padding
from tpu_embed.sparse.lookup import lookup_p


@dataclasses.dataclass(frozen=True)
class Lookup(Site):
    """One lookup of a table, an equation of `(table, ids)`.

    Attributes:
      table: the number of the input that is the table.
    """

    table: int

    def taps(self) -> list[Array]:
        """Return the lookup's tap: zeros like its result."""
        return [self._full(self.eqn.outvars[0].aval, 0)]

    def run(
        self, values: Sequence[Array], taps: Sequence[Array], guard: Array
    ) -> tuple[list[Array], Array]:
        """Return the rows, whose gradient goes to the tap and not to the table, and the ids."""
        table, ids = values
        found = lookup_p.bind(stopped_p.bind(table, guard), ids)
        return [tapped(found, taps[0])], known_after(ids, found)

    def nothing(self) -> Array:
        """Return ids that are all padding."""
        return self._full(self.eqn.invars[1].aval, PADDING_ID)

    def _full(self, aval: Any, number: int) -> Array:
        # Leading axes are the iterations of the scans around the lookup, outermost first.
        lead = [
            eqn.params["length"] for eqn in self.around if eqn.primitive.name == "scan"
        ]
        return full(aval, number, lead)


def full(aval: Any, number: float, lead: Sequence[int] = ()) -> Array:
    """Return an array filled with a number, in an aval's shape, dtype and varying mesh axes.

    Args:
      aval: the abstract value.
      number: the number.
      lead: sizes of further axes before those of the aval.
    """
    return as_varying(jnp.full((*lead, *aval.shape), number, aval.dtype), axes_of(aval))


_SAME = frozenset({"pvary", "pcast", "copy"})
"""Names of primitives whose result is still the table."""


def find_sites(
    jaxpr: Any, others: Mapping[Primitive, Callable[[Path], Site | None]] = {}
) -> list[Any]:
    """List the lookups of inputs, and other equations, in program order.

    Lookups are found in the jaxpr, and in calls, scans and conds; other equations everywhere.

    Args:
      jaxpr: an open jaxpr.
      others: for each primitive to find what makes a site of a path, or None to leave it out.
    """
    sites = []

    def find(jaxpr, tables, around):
        """Append the sites in a jaxpr, and return the number of the table that each result is."""

        def step(eqn, held):
            name, called, path = (
                eqn.primitive.name,
                (*CALLS, *REMATS),
                (*around, (eqn, 0)),
            )
            if eqn.primitive is lookup_p and held[0] is not None:
                sites.append(Lookup(path, held[0]))
            if eqn.primitive in others and (site := others[eqn.primitive](path)):
                sites.append(site)
            # A scan's constants are the same in every iteration; a table in the carry may not be.
            known = scan_counts(eqn)[0] if name == "scan" else len(held)
            entered = name in (*called, "scan", "cond")
            marks = [
                one if entered and i < known else None for i, one in enumerate(held)
            ]
            inside = [
                find(inner.jaxpr, inner.marks(marks), (*around, (eqn, number)))
                for number, inner in enumerate(inner_jaxprs(eqn))
            ]
            # A jit may return its table: the variable outside is then a table as well.
            passed = inside[0] if name in called else held if name in _SAME else ()
            return zip(eqn.outvars, passed, strict=False)

        return walk(jaxpr, tables, step, lambda _: None)

    find(jaxpr, {var: i for i, var in enumerate(jaxpr.invars)}, ())
    return sites


def looked_up(jaxpr: Any) -> set[int]:
    """Return the numbers of the inputs that are looked up in, or something computed from them.

    This includes lookups inside of equations in which `find_sites` finds none.

    Args:
      jaxpr: an open jaxpr.
    """
    found: set[int] = set()

    def rule(eqn, operands):
        together = frozenset().union(*operands)
        if eqn.primitive is lookup_p:
            found.update(operands[0])
        for inner in inner_jaxprs(eqn):
            flow(
                inner.jaxpr, inner.marks(operands, unknown=together), rule, frozenset()
            )
        return dict.fromkeys(eqn.outvars, together).items()

    flow(
        jaxpr,
        {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)},
        rule,
        frozenset(),
    )
    return found


def known_after(ids: Array, found: Array) -> Array:
    """Return the ids of a lookup, which then depend on its result.

    This makes the update, which uses the ids, depend on the lookup; otherwise XLA copies the table.
    Each bag's ids get a zero added that XLA cannot recognise as a zero. An optimization barrier
    does not help, since XLA removes it before it decides about copies.
    """
    # A mesh with explicit axes does not allow the reshapes here.
    explicit = AxisType.Explicit in jax.typeof(found).sharding.mesh.axis_types
    if not isinstance(ids, Tracer) or not ids.ndim or 0 in found.shape or explicit:
        return ids
    # result [B, …, D] -> first number of each bag, [B, …] -> as int32 bits -> zeros, one per entry
    # of the first axis of ids.
    first = jax.lax.stop_gradient(found)[(..., *[0] * (found.ndim - 1))].astype(
        jnp.float32
    )
    zeros = _zeros(jax.lax.bitcast_convert_type(first, jnp.int32), ids.dtype)
    # The packed ids of a placed batch are [devices, words]: one zero per device. A batch that only
    # some mesh axes split may have fewer bags than there are devices.
    even = zeros.size % ids.shape[0] == 0
    parts = zeros.reshape(ids.shape[0], -1)[:, 0] if even else jnp.max(zeros)[None]
    return ids + parts.reshape(-1, *[1] * (ids.ndim - 1))


def known_after_ids(ids: Array, later: Array) -> Array:
    """Return the ids of a lookup, which then depend on those of another lookup.

    An update that uses only this lookup then also comes after the other lookup of the same table.

    Args:
      ids: of the lookup.
      later: of the other lookup, as `known_after` returns them.
    """
    traced = isinstance(later, Tracer) and later.size
    if not traced or not varying_axes(later) <= varying_axes(ids):
        return ids
    return ids + _zeros(jnp.max(later), ids.dtype)


def _zeros(bits: Array, dtype: Any) -> Array:
    """Return zeros that are computed from integers, so that XLA cannot recognise them as zeros."""
    # Without the sign bit a number is never negative, so its minimum with 0 is 0.
    return jnp.minimum(bits & 0x7FFFFFFF, 0).astype(dtype)


@jax.custom_jvp
def tapped(value: Array, tap: Array) -> Array:
    """Return the value unchanged; its gradient goes to the tap too, which has the same type."""
    return value


@tapped.defjvp
def _tapped_tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


stopped_p = Primitive("stopped")
"""Maps a value and a guard to the value, which is constant in a differentiation by the guard.

`stop_gradient` would make it constant in every differentiation. JAX applies the rule below only in
those of which an operand has a tangent; the guard, a scalar, has one also where the value has none.
Such a differentiation leaves none of these equations, so they need no other rules.
"""

stopped_p.def_abstract_eval(lambda value, guard: value)
# The value is returned as it is, without binding the primitive again: it is constant in this
# differentiation only, and one around it must see the identity.
ad.primitive_jvps[stopped_p] = lambda primals, _: (
    primals[0],
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)


class Sources(NamedTuple):
    """Two sets of sources, each an integer with one bit per source.

    Attributes:
      reached: the sources that reach a value.
      looped: those of them with a path through a `while`, whose trip count is not known.
    """

    reached: int = 0
    looped: int = 0

    def __or__(self, other: Sources) -> Sources:
        """Return the union."""
        return Sources(self.reached | other.reached, self.looped | other.looped)


NOTHING = Sources()


def propagate(
    jaxpr: Any, sources: Mapping[Any, Sources] | None = None
) -> list[Sources]:
    """Return the sources that reach each output.

    Args:
      jaxpr: an open jaxpr.
      sources: the sources of each input; those of integer inputs reach nothing. None: each input
        is a source of its own, whose bit is its number.
    """
    if sources is None:
        sources = {var: Sources(1 << i) for i, var in enumerate(jaxpr.invars)}

    def step(eqn, operands):
        # What is written into a reference may be read from it later, so it counts as a result.
        references = [
            one
            for one in eqn.invars
            if getattr(one.aval, "inner_aval", None) is not None
        ]
        if references:
            return _inexact(dict.fromkeys([*references, *eqn.outvars], union(operands)))
        rule = _RULES.get(eqn.primitive.name, _opaque)
        return _inexact(dict(zip(eqn.outvars, rule(eqn, operands), strict=True)))

    return flow(jaxpr, _inexact(sources), step, NOTHING)


def _inexact(sources: Mapping[Any, Sources]) -> dict[Any, Sources]:
    """Return the sources of those variables that are floats or complex numbers."""
    # A token has no dtype. Booleans have one that is not inexact either.
    return {
        var: some
        for var, some in sources.items()
        if jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)
    }


def union(sources: Iterable[Sources]) -> Sources:
    """Return what is in any of some sets of sources."""
    return functools.reduce(operator.or_, sources, NOTHING)


# -- one rule per primitive: from the sources of its operands to those of its results --------------


def _opaque(eqn: Any, operands: list[Sources]) -> list[Sources]:
    return [union(operands)] * len(eqn.outvars)


def _call(eqn: Any, operands: list[Sources]) -> list[Sources]:
    # A call runs one program, a cond one of several.
    results = [
        propagate(inner.jaxpr, inner.marks(operands)) for inner in inner_jaxprs(eqn)
    ]
    return [union(same) for same in zip(*results, strict=True)]


def _loop(eqn: Any, operands: list[Sources]) -> list[Sources]:
    """Return the sources of a loop's last carry, and those of the other results of a scan.

    The sources of the first carry are included, since it is the result of a loop that runs zero
    times.
    """
    # The operands of a scan are [constants, first carry, xs], those of a while [constants of cond,
    # constants of body, first carry]. The condition is a boolean, so nothing is differentiated
    # through it.
    *conditions, body = inner_jaxprs(eqn)
    if conditions:
        start = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        end = len(operands)
    else:
        start, carried = scan_counts(eqn)
        end = start + carried
    # body (a, b) -> (b, x) with the sources a: {}, b: {}, x: {1}: after one walk b has {1}, after
    # two a has it as well, and the third changes nothing. Sets only grow, so this ends.
    while True:
        results = propagate(body.jaxpr, body.marks(operands))
        carry = [a | b for a, b in zip(operands[start:end], results, strict=False)]
        if carry == operands[start:end]:
            break
        operands = [*operands[:start], *carry, *operands[end:]]
    if conditions:
        return [Sources(one.reached, one.reached) for one in carry]
    return [*carry, *results[end - start :]]


_RULES = {
    **dict.fromkeys(
        ("stop_gradient", "stopped", "floor", "ceil", "round"),
        lambda eqn, _: [NOTHING] * len(eqn.outvars),
    ),
    **dict.fromkeys(("tag", "optimization_barrier"), lambda _, operands: operands),
    **dict.fromkeys((*CALLS, *REMATS, "cond"), _call),
    **dict.fromkeys(("scan", "while"), _loop),
}


# -- programs with taps ----------------------------------------------------------------------------


class Program(NamedTuple):
    """A program that can be differentiated by places.

    Attributes:
      closed: maps `values` to [results, ids of each lookup].
      values: of the inputs and of the taps, by place; then the guard of `stopped_p`.
      taps: the places of the taps of each site.
      tables: the place of each lookup's tap -> that of its table, in program order.
      reached: for each result the places that reach it.
    """

    closed: ClosedJaxpr
    values: list[Array]
    taps: list[list[int]]
    tables: dict[int, int]
    reached: list[Sources]

    def reaching(self, results: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the places that reach any of some results, and those that do through a `while`."""
        # Bits 10010: the places 1 and 4.
        both = union(self.reached[i] for i in results)
        reached, looped = (
            {i for i in range(len(self.values)) if b >> i & 1} for b in both
        )
        return reached, looped


def tap(closed: ClosedJaxpr, inputs: Sequence[Array], sites: Sequence[Any]) -> Program:
    """Return a program with taps.

    Args:
      closed: the program.
      inputs: the values of its inputs.
      sites: some of what `find_sites` returns. Each has `taps()`, the values of its taps, and
        `run(values, taps, guard)`, what `rerun` does there.
    """

    def run(inputs, taps, guard):
        at = lambda site, values, mine: site.run(values, mine, guard)  # noqa: E731
        return rerun(at, closed, inputs, sites, taps)

    given = (list(inputs), [site.taps() for site in sites], jnp.zeros(()))
    values, structure = jax.tree.flatten(given)
    _, taps, _ = structure.unflatten(range(len(values)))
    each = zip(sites, taps, strict=True)
    tables = {mine[0]: one.table for one, mine in each if isinstance(one, Lookup)}
    tapped = jax.make_jaxpr(run)(*given)
    reached = propagate(tapped.jaxpr)[: len(closed.out_avals)]
    return Program(tapped, values, taps, tables, reached)


def pull_back(
    program: Program, wanted: Collection[int], cotangents: Mapping[int, Array | None]
) -> tuple[list[Array], dict[int, Any]]:
    """Return the results of a program, and the gradients by place.

    A place gets a dense gradient, a table of wanted taps gets slices, and a place that is both gets
    their sum, which is dense.

    Args:
      program: the program.
      wanted: the places to differentiate by.
      cotangents: the cotangents of some of the results, by the number of the result; None for ones.
    """
    count, tables = len(program.reached), program.tables

    def run(chosen):
        values = [chosen.get(i, value) for i, value in enumerate(program.values)]
        # A result that is a literal of the jaxpr is a Python number.
        flat = list(map(as_array, jaxpr_as_fun(program.closed)(*values)))
        return [flat[i] for i in cotangents], (flat[:count], flat[count:])

    chosen = {i: program.values[i] for i in sorted({*wanted, len(program.values) - 1})}
    ys, back, (results, ids) = jax.vjp(run, chosen, has_aux=True)
    given = zip(ys, cotangents.values(), strict=True)
    (found,) = back([jnp.ones_like(y) if c is None else c for y, c in given])
    asked = dict(zip(tables, ids, strict=True))
    gradients = {i: found[i] for i in wanted if i not in tables}
    # Lookups with the taps 7 and 9 read table 5: its slices hold the ids of 7, then those of 9.
    for table in sorted({tables[k] for k in tables if k in wanted}):
        lookups = [k for k in tables if tables[k] == table]
        mine = [k for k in lookups if k in wanted]
        # One update of a table uses all its wanted lookups. It must come after every lookup of the
        # table, so one of the wanted is made to depend on those that are left out.
        for k in {*lookups} - {*mine}:
            asked[mine[0]] = known_after_ids(asked[mine[0]], asked[k])
        # Ids [2, 3] with rows [2, 3, D] and ids [4] with rows [4, D]: indices [10], values [10, D].
        # An id outside of the table (-1) becomes the index V, which is padding, with a zero row.
        shape = program.values[table].shape
        wide = np.result_type(*(asked[k].dtype for k in mine))
        joined = jnp.concatenate([asked[k].reshape(-1).astype(wide) for k in mine])
        rows = jnp.concatenate(
            [found[k].reshape(asked[k].size, *shape[1:]) for k in mine]
        )
        slices = clean_padding(IndexedSlices(rows, joined, shape))
        if table in gradients:
            dense = gradients[table].at[slices.indices]
            gradients[table] = dense.add(slices.values, mode="drop")
        else:
            gradients[table] = slices
    return results, gradients


def sparse_value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes `fun`'s value and gradients, sparse for tables.

    The gradient of a leaf that `fun` uses only as the table of `embedding_lookup` is an
    `IndexedSlices`. It has one entry per id looked up, keeps duplicates, and is ordered by lookup
    in program order. Its cost depends on the number of ids, not on V. The gradient of every other
    leaf is that of `jax.value_and_grad`. Lookups are found through jit, vmap, remat, scan and cond.
    A lookup inside a `custom_jvp` or `custom_vjp` function, or inside a `shard_map` within `fun`,
    makes the gradient dense and gives a warning, as any other use of the table does.

    Only uses that are connected to the value by a path of differentiable operations count, as
    `tpu_embed.training.gradients` defines it. A lookup has no entry if it stands behind
    `stop_gradient`, if its result is not used or used in aux only, or if its result only becomes
    integers or comparisons; no optimizer touches its rows. A lookup whose gradient happens to be
    zero has entries. A table of which no lookup counts gets an `IndexedSlices` with N = 0 entries.

    Inside a `shard_map` the slices are this device's own and not summed over devices.

    Args:
      fun: a function that returns a float scalar; with `has_aux` a pair of a float scalar and a
        pytree of arrays.
      argnums: which positional arguments to differentiate by; these are pytrees of floats.
      has_aux: whether `fun` returns a pair.

    Returns:
      a function that returns (value, gradients), or ((value, aux), gradients). Use it inside a jit:
      lookups are found by tracing `fun` again at every call.

    Raises:
      TypeError: values or arguments that are not floats, as in `jax.value_and_grad`; the state of
        an engine; with `has_aux`, a `fun` that does not return a pair.
      ValueError: a number in `argnums` is not that of an argument, or two are the same argument.

    Example:
      >>> from tpu_embed import embedding_lookup
      >>> def loss(table, ids):
      ...     return (embedding_lookup(table, ids) ** 2).sum()
      >>> value, gradient = sparse_value_and_grad(loss)(jnp.ones((1000, 2)), jnp.array([7, 7]))
      >>> gradient.indices.tolist(), gradient.values.tolist()
      ([7, 7], [[2.0, 2.0], [2.0, 2.0]])
    """

    @functools.wraps(fun)
    def value_and_gradients(*args, **kwargs):
        remedy = "give what is differentiated by position, not by keyword"
        which = positions(argnums, len(args), remedy=remedy)
        chosen = [args[i] for i in which]
        if any(map(_is_state, jax.tree.leaves(chosen, is_leaf=_is_state))):
            refuse_gradient("sparse_value_and_grad")
        paths, structure = jax.tree_util.tree_flatten_with_path(chosen)

        def flat(*leaves):
            given = dict(zip(which, structure.unflatten(leaves), strict=True))
            result = fun(*(given.get(i, arg) for i, arg in enumerate(args)), **kwargs)
            return value_and_aux(result, has_aux=has_aux)

        # Names for warnings: of a single argument ['w'], of several [0]['w'].
        names = [jax.tree_util.keystr(path[len(which) == 1 :]) for path, _ in paths]
        leaves = [as_array(leaf) for _, leaf in paths]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        program = tap(closed, leaves, find_sites(closed.jaxpr))
        of_value = len(jax.tree.leaves(shapes[0]))  # results: the value, then aux
        reached, _ = program.reaching(range(of_value))
        # A leaf is sparse if it is looked up and reaches the value in no other way than by lookups.
        # The program is differentiated by the other leaves, and by the taps of the lookups that
        # count.
        sparse = set(program.tables.values()) - reached
        for i in sorted(looked_up(closed.jaxpr) - sparse):
            warn_user(
                f"the gradient of table {names[i] or 'argument'} is dense: the function also uses "
                "it outside of embedding_lookup, or looks it up where lookups are not found"
            )
        dense = {i: leaf for i, leaf in enumerate(leaves) if i not in sparse}

        # The errors of `jax.grad`, for leaves that have no gradient, or a value that is no loss.
        # They depend on shapes and dtypes alone, so zeros can stand for the value.
        def zeros(_):
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes[0])

        jax.eval_shape(jax.grad(zeros), list(dense.values()))
        results, found = pull_back(program, reached | dense.keys(), {0: None})
        value, aux = jax.tree.structure(shapes).unflatten(results)
        every = [
            found[i] if i in found else _no_slices(leaf)
            for i, leaf in enumerate(leaves)
        ]
        gradients = tuple(structure.unflatten(every))
        result = (value, aux) if has_aux else value
        return result, gradients if isinstance(argnums, Sequence) else gradients[0]

    return value_and_gradients


def sparse_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes only the gradients of `sparse_value_and_grad`.

    Args:
      fun: as in `sparse_value_and_grad`, like the other arguments.
      argnums: which positional arguments to differentiate by.
      has_aux: whether `fun` returns a pair.

    Returns:
      a function that returns gradients, or (gradients, aux).
    """
    both = sparse_value_and_grad(fun, argnums, has_aux=has_aux)

    @functools.wraps(fun)
    def gradients(*args, **kwargs):
        result, found = both(*args, **kwargs)
        return (found, result[1]) if has_aux else found

    return gradients


# -- the conventions of `jax.grad`, for all functions that differentiate a user's function ---------


def positions(argnums: Any, count: int, *, remedy: str) -> tuple[int, ...]:
    """Return the positions of the arguments to differentiate by, counted from the first.

    Args:
      argnums: an int or a sequence of ints; negative ones count from the end.
      count: the number of positional arguments.
      remedy: the remedy that the error names.

    Returns:
      different numbers in [0, count).

    Raises:
      ValueError: a number in `argnums` is not that of an argument, or two are the same argument.
    """
    # Three arguments and argnums (0, -1): (0, 2).
    given = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    wanted = all(is_int(i) and -count <= i < count for i in given)
    found = tuple(int(i) % count for i in given) if wanted else ()
    if not wanted or len(set(found)) != len(found):
        refuse(
            "argnums",
            expected=f"different places among {count} positional arguments",
            got=repr(argnums),
            remedy=remedy,
        )
    return found


def value_and_aux(result: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Return a function's result as a pair of its value and aux.

    Args:
      result: what the function returned.
      has_aux: whether the result is a pair.

    Returns:
      the value, and aux; without `has_aux` aux is None.

    Raises:
      TypeError: `has_aux` is given, and the result is not a pair.
    """
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        refuse(
            "has_aux=True: the function",
            expected="a pair of the value and aux",
            got=type(result).__name__,
            remedy="return (value, aux), or leave has_aux out",
            error=TypeError,
        )
    return result


# -- gradients of leaves ---------------------------------------------------------------------------


def _is_state(value: Any) -> bool:
    return isinstance(value, TableState)


def _no_slices(table: Array) -> IndexedSlices:
    """Return a gradient with no entry, for a table that no lookup connects to the value."""
    axes = varying_axes(table)
    values = as_varying(jnp.zeros((0, *table.shape[1:]), table.dtype), axes)
    return IndexedSlices(values, as_varying(jnp.zeros(0, jnp.int32), axes), table.shape)
