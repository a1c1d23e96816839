"""Walk traced programs (jaxprs), across the releases of JAX that name their parts differently.

A jaxpr is a list of equations, each a primitive with operands and results, and some equations have
jaxprs inside. `walk` goes through the equations in order and keeps something for each variable. It
has two uses: `flow` carries marks from inputs forward, to see where they go, and `rerun` carries
values, so that a user's program runs again with something else done at some of its equations.

Input: a jaxpr, and the marks or values of its inputs.
Output: the marks or values of its results.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that call another jaxpr, by all names that they had in some release."""
REMATS = ("checkpoint", "remat2")
"""Primitives that call another jaxpr, and call it again in the backward pass."""


# -- the jaxprs inside of an equation --------------------------------------------------------------


class Inner(NamedTuple):
    """A jaxpr inside of an equation.

    Attributes:
      jaxpr: the open jaxpr.
      consts: the values of its constants.
      operands: for each of its inputs, which operand of the equation it is at first; None where
        this is not known.
    """

    jaxpr: Any
    consts: Sequence[Any]
    operands: Sequence[int] | None

    def marks(self, operands: Sequence[Any], unknown: Any = None) -> dict[Any, Any]:
        """Return the marks of its inputs.

        Args:
          operands: the marks of the equation's operands.
          unknown: the mark of every input where it is not known which operand is which input.
        """
        inputs = self.jaxpr.invars
        if self.operands is None:
            return dict.fromkeys(inputs, unknown)
        return {var: operands[i] for var, i in zip(inputs, self.operands, strict=True)}


def inner_jaxprs(eqn: Any) -> list[Inner]:
    """Return the jaxprs among the parameters of an equation; a while has a condition and a body."""
    params, operands = eqn.params, range(len(eqn.invars))
    if eqn.primitive.name == "while":
        # The operands are [constants of cond, constants of body, first carry].
        start = params["cond_nconsts"]
        first = start + params["body_nconsts"]
        of_cond = [*operands[:start], *operands[first:]]
        return [
            _inner(params["cond_jaxpr"], of_cond),
            _inner(params["body_jaxpr"], operands),
        ]
    # A parameter may be a jaxpr, a closed jaxpr (which has `.jaxpr`), or a tuple of branches.
    flat = [
        x
        for p in params.values()
        for x in (p if isinstance(p, (tuple, list)) else (p,))
    ]
    return [
        _inner(one, operands)
        for one in flat
        if hasattr(getattr(one, "jaxpr", one), "eqns")
    ]


def _inner(given: Any, operands: Sequence[int]) -> Inner:
    # A cond's index, and a while's constants of the condition, come before the operands that are
    # passed in: the last n belong to the n inputs.
    jaxpr = getattr(given, "jaxpr", given)
    before = len(operands) - len(jaxpr.invars)
    known = operands[before:] if before >= 0 else None
    return Inner(jaxpr, getattr(given, "consts", ()), known)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are the initial carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Later releases of JAX keep the operands as trees: constants, carry, scanned arrays.
    fixed, carried, _ = eqn.params["ft_in"].unpack()
    return len(fixed), len(carried)


# -- the walk --------------------------------------------------------------------------------------

Step = Callable[[Any, list[Any]], Iterable[tuple[Any, Any]]]
"""Maps an equation, and what its operands hold, to (variable, what it holds from then on) pairs."""


def walk(
    jaxpr: Any, held: Mapping[Any, Any], step: Step, otherwise: Callable[[Any], Any]
) -> list[Any]:
    """Take a step at each equation of a jaxpr in order, and return what its results hold.

    Args:
      jaxpr: an open jaxpr.
      held: what its inputs hold.
      step: what to do at an equation.
      otherwise: what a literal, or a variable that got nothing so far, holds.
    """
    env = dict(held)

    def read(atom):
        known = not isinstance(atom, Literal) and atom in env
        return env[atom] if known else otherwise(atom)

    for eqn in jaxpr.eqns:
        env.update(step(eqn, list(map(read, eqn.invars))))
    return list(map(read, jaxpr.outvars))


def flow(jaxpr: Any, marks: Mapping[Any, Any], rule: Step, unmarked: Any) -> list[Any]:
    """Carry the marks of inputs forward through a jaxpr, and return those of its results.

    Args:
      jaxpr: an open jaxpr.
      marks: the marks of its inputs.
      rule: the step at each equation that has a marked operand. It may pass marks into inner
        jaxprs by `flow` itself.
      unmarked: the mark of all else.
    """

    def step(eqn, operands):
        return () if all(one == unmarked for one in operands) else rule(eqn, operands)

    return walk(jaxpr, marks, step, lambda _: unmarked)


# -- running a program again -----------------------------------------------------------------------

Path = tuple[tuple[Any, int], ...]
"""Equations, each inside of the one before, with the number of the inner jaxpr that goes on."""


@dataclasses.dataclass(frozen=True)
class Site(abc.ABC):
    """An equation of a program at which `rerun` does something else.

    Attributes:
      path: the equations around it, outermost first, and itself, with any number.
    """

    path: Path

    @property
    def eqn(self) -> Any:
        """The equation itself."""
        return self.path[-1][0]

    @property
    def around(self) -> list[Any]:
        """The equations around it, outermost first."""
        return [eqn for eqn, _ in self.path[:-1]]

    def inside(self) -> Self:
        """Return the same site as the jaxpr inside of the outermost equation has it."""
        return dataclasses.replace(self, path=self.path[1:])

    @abc.abstractmethod
    def nothing(self) -> Any:
        """Return what stands for the site's note where another branch of a cond is taken."""


At = Callable[[Any, list[Any], Any], tuple[Sequence[Any], Any]]
"""Maps a site, the values of its operands and its extra to its results and a note, pytrees."""


def rerun(
    at: At,
    program: ClosedJaxpr | Inner,
    args: Sequence[Any],
    sites: Sequence[Any],
    extras: Any,
) -> tuple[list[Any], list[Any]]:
    """Run a program with something else done at some of its equations.

    A site inside a scan has one extra for all iterations, stacked, and so is its note. Sites may
    stand inside of calls, scans and conds; in the body of a while if they have neither extras nor
    notes.

    Args:
      at: what to do at a site.
      program: the jaxpr and its constants.
      args: the values of its inputs.
      sites: `Site`s in program order.
      extras: one pytree of arrays per site.

    Returns:
      the results; the note of each site.
    """
    jaxpr, notes = program.jaxpr, []
    if not sites:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, program.consts))(*args), []

    # Equations with a site inside are rebuilt around the rerun of their own jaxpr. All others are
    # evaluated as they are, which keeps their custom derivatives.
    def step(eqn, values):
        here = [
            pair
            for pair in zip(sites, extras, strict=True)
            if pair[0].path[0][0] is eqn
        ]
        if not here:
            results = evaluate(jaxpr, eqn, values)
        elif here[0][0].eqn is eqn:
            results, note = at(here[0][0], values, here[0][1])
            notes.append(note)
        else:
            mine, given = zip(*here, strict=True)
            run = functools.partial(_run_inner, at, eqn, mine)
            results, found = _REBUILT[eqn.primitive.name](run, eqn, values, list(given))
            notes.extend(found)
        return zip(eqn.outvars, results, strict=True)

    inputs = zip(
        (*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True
    )
    return walk(jaxpr, dict(inputs), step, lambda literal: literal.val), notes


def _run_inner(
    at: At,
    eqn: Any,
    sites: Sequence[Any],
    number: int,
    args: Sequence[Any],
    extras: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Rerun one of the jaxprs inside of an equation; sites in the others get nothing for a note."""
    # Branches with 2 and 1 sites: number 0 takes extras[0:2] and returns its own notes and nothing
    # for the third; number 1 takes extras[2:3] and returns nothing for the first two.
    inner, mine = (
        [site.inside() for site in sites],
        [site.path[0][1] == number for site in sites],
    )
    chosen = [list(itertools.compress(some, mine)) for some in (inner, extras)]
    results, notes = rerun(at, inner_jaxprs(eqn)[number], args, *chosen)
    rest = iter(notes)
    return results, [
        next(rest) if m else one.nothing() for one, m in zip(inner, mine, strict=True)
    ]


def _call(run: Any, eqn: Any, values: list[Any], extras: list[Any]) -> tuple:
    return run(0, values, extras)


def _remat(run: Any, eqn: Any, values: list[Any], extras: list[Any]) -> tuple:
    keep = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(functools.partial(run, 0), **keep)(values, extras)


def _scan(run: Any, eqn: Any, values: list[Any], extras: list[Any]) -> tuple:
    # The operands of a scan are [constants, first carry, xs]; its body maps [constants, carry, x]
    # to [carry, y]. Extras [length, …] join the xs, and the notes of every iteration join the ys.
    fixed, carried = scan_counts(eqn)

    def body(carry, xs):
        results, notes = run(0, [*values[:fixed], *carry, *xs[0]], xs[1])
        return results[:carried], (results[carried:], notes)

    first, rest = values[fixed : fixed + carried], values[fixed + carried :]
    keep = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, notes) = jax.lax.scan(body, first, (rest, extras), **keep)
    return [*carry, *ys], notes


def _while(run: Any, eqn: Any, values: list[Any], extras: list[Any]) -> tuple:
    start = eqn.params["cond_nconsts"]
    first = start + eqn.params["body_nconsts"]

    def more(carry):
        return jaxpr_as_fun(eqn.params["cond_jaxpr"])(*values[:start], *carry)[0]

    def body(carry):
        return run(1, [*values[start:first], *carry], extras)[0]

    return jax.lax.while_loop(more, body, values[first:]), [None] * len(extras)


def _cond(run: Any, eqn: Any, values: list[Any], extras: list[Any]) -> tuple:
    # cond and switch are one primitive, whose first operand is the number of the branch.
    branches = [functools.partial(run, k) for k in range(len(eqn.params["branches"]))]
    return jax.lax.switch(values[0], branches, values[1:], extras)


_REBUILT: Mapping[str, Callable[..., tuple]] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(REMATS, _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def evaluate(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr.

    Args:
      jaxpr: an open jaxpr.
      eqn: one of its equations, or of a jaxpr inside of it.
      values: the values of the equation's operands.
    """
    # Make a jaxpr of this equation alone. Its inputs are the operands that are variables, each
    # once: x * x has one input. Literals are part of the equation.
    operands = zip(eqn.invars, values, strict=True)
    given = {var: value for var, value in operands if not isinstance(var, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())
