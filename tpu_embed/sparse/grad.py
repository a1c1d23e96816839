"""Gradients of a function that looks rows up in tables: sparse for tables, dense for all else.

`jax.grad` gives a dense gradient `[V, D]` for a table, although only the rows that were looked up
have one. Here the lookups are found by tracing, and the gradient holds those rows alone.

Input: a function of tables and other parameters.
Output: a function of the same arguments that returns the value and the gradients, like
`jax.value_and_grad`, with `IndexedSlices` for tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._checks import is_int, refuse, warn_user
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array
from tpu_embed.core.state import TableState, refuse_gradient
from tpu_embed.kernels.tracing import as_varying, varying_axes
from tpu_embed.sparse.indexed_slices import IndexedSlices
from tpu_embed.sparse.program import find_sites, looked_up, pull_back, tap


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
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        remedy = "give what is differentiated by position, not by keyword"
        which = positions(argnums, len(args), remedy=remedy)
        chosen = [args[i] for i in which]
        if any(map(_is_state, jax.tree.leaves(chosen, is_leaf=_is_state))):
            refuse_gradient("sparse_value_and_grad")
        paths, structure = jax.tree_util.tree_flatten_with_path(chosen)

        def flat(*leaves: Any) -> Any:
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
        zeros = lambda _: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes[0])  # noqa: E731
        jax.eval_shape(jax.grad(zeros), list(dense.values()))
        results, found = pull_back(program, reached | dense.keys(), {0: None})
        value, aux = jax.tree.structure(shapes).unflatten(results)
        every = [found[i] if i in found else _no_slices(leaf) for i, leaf in enumerate(leaves)]
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
    def gradients(*args: Any, **kwargs: Any) -> Any:
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
