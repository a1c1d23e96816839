"""The optimizer of a whole parameter tree, made from a table's rule or an optax transform.

Dense parameters are updated by an optax transform. Tables whose gradient is sparse are updated by a
rule over rows, and only in the rows that the gradient names.

Data-parallel optimizers sum the gradients over all replicas, then apply them on each. Every replica
starts from the same parameters and applies the same sum, so the replicas stay equal.

Input: a loss, a tree of parameters, and the optimizer's state; of replicas, their mesh axes.
Output: a new tree and a new state; or an optax transform (`cross_shard`), inside a `shard_map`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr

from tpu_embed._checks import check_type, refuse
from tpu_embed._types import Array, ArrayLike, PyTree, as_array, snapshot
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.optimizers.optax_rows import init_state
from tpu_embed.sparse import is_indexed_slices
from tpu_embed.training.autodiff import (
    Aggregation,
    Gate,
    checked_loss,
    value_and_gradients,
)
from tpu_embed.training.replicas import AxisName, Reduction, Replicas, make_replicas
from tpu_embed.training.update import (
    DeclaredOptimizer,
    Leaves,
    Path,
    State,
    SumsItself,
    check_gradients,
    check_update,
    leaves_of,
    listed,
    summed_twice,
    take_apart,
    update_parameters,
)

Groups = Iterable[Iterable[int]]

GradientsAndVariables = list[tuple[Any, KeyPath]]
"""Pairs of an array, an `IndexedSlices` or None, and the path of a parameter."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class OptState:
    """State of a `TreeOptimizer`.

    Args:
      step: int32 `[]`, the number of updates done.
      inner: the state of the optax transform over all parameters.
      structure: the structure of the parameter tree, a static field.
    """

    step: Array
    inner: PyTree
    structure: Any = dataclasses.field(metadata={"static": True})


def check_state(what: str, state: Any) -> None:
    """Check that a user gives an `OptState`.

    Args:
      what: the optimizer's name, for messages.
      state: the state that the user gives.

    Raises:
      TypeError: `state` is something else.
    """
    check_type(
        f"{what}: state",
        state,
        OptState,
        expected="an OptState",
        remedy="init(params) makes one, apply_gradients the next",
    )


class TreeOptimizer(abc.ABC):
    """Compute gradients of a loss by a tree of parameters, and apply them.

    `Optimizer` and `CrossShardOptimizer` share these methods. The object holds no state: `init`
    returns the first state, and `apply_gradients` the next.
    """

    GATE_NONE: Final = "none"
    GATE_OP: Final = "op"
    GATE_GRAPH: Final = "graph"

    _name: str
    _declared: DeclaredOptimizer
    _replicas: Replicas

    @abc.abstractmethod
    def __init__(self) -> None: ...

    def get_name(self) -> str:
        """Return the optimizer's name."""
        return self._name

    def init(self, params: PyTree) -> OptState:
        """Return the first state, including all slots.

        Args:
          params: a pytree of arrays.

        Raises:
          ValueError: `params` has no leaves.
        """
        structure = leaves_of(params).structure
        inner = init_state(self._declared.dense, jax.tree.map(as_array, params))
        return OptState(jnp.zeros((), jnp.int32), inner, structure)

    def local(self, tree: PyTree) -> PyTree:
        """Return the same arrays, marked so that gradients by them stay this replica's own.

        In a `shard_map` that tracks what varies, gradients by replicated arrays are summed over the
        replicas; gradients by the arrays returned here are not. Without an axis the arrays are
        returned as they are.

        Args:
          tree: a pytree of arrays.
        """
        return self._replicas.local(tree)

    def scale_loss(self, loss: ArrayLike) -> Any:
        """Return the loss that `compute_gradients` differentiates.

        With the reduction "mean" and a bound axis this is the loss divided by the number of
        replicas, otherwise the loss as it is.
        """
        return self._replicas.scaled(loss)

    def minimize(
        self,
        loss: Callable[[PyTree], ArrayLike],
        params: PyTree,
        state: OptState,
        var_list: Iterable[Path] | None = None,
        gate_gradients: Gate = "op",
        aggregation_method: Aggregation | None = "add_n",
        grad_loss: ArrayLike | None = None,
        *,
        constraints: Mapping[Path, Callable[[Array], ArrayLike]] | None = None,
        learning_rate: ArrayLike | None = None,
    ) -> tuple[PyTree, OptState, Array]:
        """Compute gradients and apply them.

        The arguments are those of `compute_gradients` and `apply_gradients`.

        Returns:
          the new parameters, the new state, and the loss at the old parameters (this replica's own
          loss, unscaled).

        Raises:
          ValueError: no variable has a gradient; otherwise as `compute_gradients` and
            `apply_gradients`.
        """
        # Refuse a wrong state before the gradients, which may take long to trace.
        check_state(self._name, state)
        value, pairs = self._compute(
            loss, params, var_list, grad_loss, gate_gradients, aggregation_method
        )
        if all(gradient is None for gradient, _ in pairs):
            refuse(
                f"{self._name}: minimize",
                expected="a loss that depends on a variable",
                got=f"no gradient for any of {listed(keystr(path) for _, path in pairs)}",
                remedy="use a parameter in the loss, outside stop_gradient",
            )
        params, state = self.apply_gradients(
            pairs, params, state, constraints=constraints, learning_rate=learning_rate
        )
        return params, state, value

    def compute_gradients(
        self,
        loss: Callable[[PyTree], ArrayLike],
        params: PyTree,
        var_list: Iterable[Path] | None = None,
        gate_gradients: Gate = "op",
        aggregation_method: Aggregation | None = "add_n",
        grad_loss: ArrayLike | None = None,
    ) -> GradientsAndVariables:
        """Return this replica's gradients of the loss, scaled by `scale_loss`.

        Args:
          loss: a function of the parameters that returns a float array, which is summed.
          params: a pytree of arrays.
          var_list: paths of the variables; other parameters are constants. None means all.
          gate_gradients: `GATE_NONE`, `GATE_OP` (an optimization barrier for each gradient) or
            `GATE_GRAPH` (one barrier for all). Barriers never change numbers.
          aggregation_method: how gradients of several losses are added. There is only one loss, so
            it changes nothing.
          grad_loss: the cotangent of the loss, in its shape; None means ones.

        Returns:
          pairs of a gradient and a path, in the order of `var_list` or of the leaves. The gradient
          of a parameter that is only looked up (`embedding_lookup`) is an `IndexedSlices`. It names
          the rows of those lookups that are connected to the loss, as `gradients` defines it. The
          gradient of an integer parameter, and of one that is not connected to the loss, is None.

        Raises:
          TypeError: `loss` is not a function.
          ValueError: the loss or `grad_loss` is not float; there are no parameters; a path, gate or
            method is unknown.
        """
        return self._compute(
            loss, params, var_list, grad_loss, gate_gradients, aggregation_method
        )[1]

    def _compute(
        self,
        loss: Any,
        params: PyTree,
        var_list: Any,
        grad_loss: Any,
        gate: Gate,
        method: Any,
    ) -> tuple[Array, GradientsAndVariables]:
        """Return the unscaled loss, and pairs of a gradient and a path."""
        leaves = leaves_of(params)
        wanted = leaves.paths if var_list is None else var_list
        variables = leaves.find_all(wanted, what=f"{self._name}: var_list")
        if not callable(loss):
            refuse(
                "loss",
                expected="a function of the parameters",
                got=repr(loss),
                remedy="write lambda params: ...",
                error=TypeError,
            )
        # Leaves w, ids, b and variables [0, 1]: only w is differentiated by. Integers have no
        # gradient (None in the result), and b is a constant like all leaves outside of `variables`.
        kinds = {i: jnp.result_type(leaves.values[i]) for i in variables}
        floats = [i for i in variables if jnp.issubdtype(kinds[i], jnp.inexact)]

        def objective(*chosen):
            values = dict(enumerate(leaves.values)) | dict(
                zip(floats, chosen, strict=True)
            )
            found = checked_loss(loss(leaves.only(values)))
            # The gradient of Σ c·l is the pull-back of c: one scalar to differentiate, whatever
            # shape the loss has.
            return jnp.sum(self.scale_loss(found) * _cotangent(found, grad_loss)), found

        arrays = self.local([as_array(leaves.values[i]) for i in floats])
        (_, found), gradients = value_and_gradients(
            objective, arrays, gate_gradients=gate, aggregation_method=method
        )
        if not floats:  # value_and_gradients does not run a function without arguments
            found = objective()[1]
        by_number = dict(zip(floats, gradients, strict=True))
        return found, [(by_number.get(i), leaves.paths[i]) for i in variables]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Path]],
        params: PyTree,
        state: OptState,
        skip_gradients_aggregation: bool = False,
        *,
        constraints: Mapping[Path, Callable[[Array], ArrayLike]] | None = None,
        learning_rate: ArrayLike | None = None,
    ) -> tuple[PyTree, OptState]:
        """Update parameters and state, with gradients that are first summed over the replicas.

        A parameter without a gradient, or with None, keeps its bits and those of its slots. The
        step and whatever else belongs to no parameter are updated nevertheless. A transform that
        couples parameters, such as a clip by the global norm, sees only parameters with a dense
        gradient.

        In a table whose gradient is an `IndexedSlices`, only the rows that it names are updated,
        each of them once; the rule's `use_gradient_accumulation` has no effect here. A rule that
        changes every row at every step still does so.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them, in any order. They are this
            replica's own gradients.
          params: a pytree of arrays.
          state: the state of the optimizer.
          skip_gradients_aggregation: True if the gradients are already summed over the replicas. In
            a `shard_map` that tracks what varies, those of `jax.grad` by a replicated parameter
            are.
          constraints: functions by path, each applied to its parameter after a dense update.
          learning_rate: `[]`, used instead of the rule's own. A rule whose rate is a callable
            without arguments needs it inside a jit: call it outside and pass its value.

        Returns:
          the new parameters and the new state.

        Raises:
          TypeError: a gradient cannot become an array; the state is not an `OptState`.
          ValueError: a path is unknown or repeated; a gradient has another shape than its parameter
            or is the same on all replicas; there is no gradient at all; an `IndexedSlices` belongs
            to a parameter `[V]` or the transform is not row-separable; the transform reads the
            loss; the learning rate is missing.
          RuntimeError: a parameter whose gradient is an `IndexedSlices` has a constraint.
        """
        check_state(self._name, state)
        leaves = leaves_of(params)
        if leaves.structure != state.structure:
            refuse(
                f"{self._name}: params",
                expected=f"the tree that the state was made for, {state.structure}",
                got=str(leaves.structure),
                remedy="init(params) makes a state for another tree",
            )
        # All checks come before any arithmetic: an error leaves nothing half-applied.
        gradients, constrained = check_gradients(
            self._name, grads_and_vars, leaves, constraints or {}
        )
        old = take_apart(
            self._declared.dense, jax.tree.map(snapshot, state.inner), leaves
        )
        sparse = check_update(self._name, self._declared, leaves, old, gradients)
        step = state.step + 1
        rate = self._declared.learning_rate(step, learning_rate)
        if not skip_gradients_aggregation:
            # By label and not by number, so that errors can name the parameter.
            summed = self._replicas.summed(
                {leaves.labels[i]: g for i, g in gradients.items()}
            )
            gradients = dict(zip(gradients, summed.values(), strict=True))
        params, inner = update_parameters(
            self._declared,
            leaves,
            old,
            gradients,
            sparse,
            constraints=constrained,
            step=step,
            learning_rate=rate,
        )
        return params, OptState(step, inner, state.structure)

    def get_slot(self, state: OptState, path: Path, name: str) -> Array | None:
        """Return a slot of a parameter, None if the parameter has no slot of that name.

        A transform that mixes parameters (`optax.flatten`) has no slots, since it is not known
        which part of its state belongs to which parameter; `get_non_slot` returns all of it.

        Raises:
          ValueError: no parameter has this path.
        """
        leaves, parts = self._parts(state)
        return parts.slots(leaves.find(path, what=f"{self._name}: get_slot")).get(name)

    def get_slot_names(self, state: OptState) -> list[str]:
        """Return the names of the slots, sorted.

        For an optax transform they are the names of the fields of its state. Where two fields have
        the same name, their position in the chain is put before it.
        """
        leaves, parts = self._parts(state)
        return sorted(
            {name for i in range(len(leaves.labels)) for name in parts.slots(i)}
        )

    def get_non_slot(self, state: OptState) -> dict[str, Array]:
        """Return what belongs to no parameter, by name: `step`, and counts of the transform.

        If the transform itself has a leaf named `step`, it is returned as `inner_step`.
        """
        _, parts = self._parts(state)
        shared = {_beside_step(name): leaf for name, leaf in parts.slots().items()}
        return shared | {"step": state.step}

    def variables(self, state: OptState) -> list[tuple[str, Array]]:
        """Return all slots and everything in `get_non_slot`, as pairs sorted by name.

        The name of a slot is `path/name`, or just `name` if the whole tree is one array.
        """
        leaves, parts = self._parts(state)
        # Leaves ['b'] and ['w'] with the slot mu: ['b']/mu, ['w']/mu. An empty label: mu.
        slots = {
            f"{label}/{name}" if label else _beside_step(name): leaf
            for i, label in enumerate(leaves.labels)
            for name, leaf in parts.slots(i).items()
        }
        return sorted(
            (slots | self.get_non_slot(state)).items(), key=lambda pair: pair[0]
        )

    def _parts(self, state: OptState) -> tuple[Leaves, State]:
        """Return the leaves of the parameters and those of the state.

        The state holds only the structure of the parameters, so numbers stand for their values.
        """
        check_state(self._name, state)
        numbers = state.structure.unflatten(range(state.structure.num_leaves))
        leaves = leaves_of(numbers)
        return leaves, take_apart(self._declared.dense, state.inner, leaves)


def checked_name(kind: str, name: Any) -> str:
    """Return an optimizer's name after checking it.

    Args:
      kind: the optimizer's class, for messages.
      name: the name that the user gives.

    Raises:
      ValueError: the name is not a non-empty string.
    """
    if not isinstance(name, str) or not name:
        # The name also tells optimizers apart in the messages of a model that has several.
        refuse(
            f"{kind}: name",
            expected="a word",
            got=repr(name),
            remedy="give one such as 'adagrad': messages begin with it",
        )
    return name


def _cotangent(loss: Array, given: ArrayLike | None) -> Array:
    if given is None:
        return jnp.ones((), loss.dtype)
    array = as_array(given)
    if array.shape != loss.shape or not jnp.issubdtype(array.dtype, jnp.floating):
        refuse(
            "grad_loss",
            expected=f"floats of the loss' shape {loss.shape}",
            got=f"{array.dtype} of shape {array.shape}",
            remedy="leave it out for ones",
        )
    return array.astype(loss.dtype)


def _beside_step(name: str) -> str:
    """Return the name of a leaf of `OptState.inner`, changed if it would clash with `step`."""
    return "inner_step" if name == "step" else name


@final
class Optimizer(TreeOptimizer):
    """Minimise a loss of a tree of parameters.

    Its methods are those of `TreeOptimizer`. It can be pickled if `tx_or_rule` can.

    Args:
      tx_or_rule: one of `tpu_embed.optimizers`, whose rule is also applied to dense parameters
        (`as_optax`), or an optax transform.
      name: the name of the optimizer, which messages say.
      axis_name: the mesh axes over which gradients are summed, as in `CrossShardOptimizer`. With
        None nothing is scaled or summed.
      reduction: whether the global loss is the "mean" or the "sum" over these axes.

    Raises:
      ValueError: an empty name, something that is not an optimizer, or an unknown reduction.

    Example:
      >>> import jax.numpy as jnp
      >>> from tpu_embed.optimizers import Adagrad
      >>> optimizer = Optimizer(Adagrad(0.5))
      >>> params = {"w": jnp.ones(2), "b": jnp.zeros(())}
      >>> state = optimizer.init(params)
      >>> def loss(params):
      ...     return (params["w"] ** 2).sum()
      >>> params, state, value = optimizer.minimize(loss, params, state)
      >>> float(value), [round(float(w), 3) for w in params["w"]]
      (2.0, [0.506, 0.506])
      >>> optimizer.get_slot_names(state), int(state.step)
      (['accumulators'], 1)

    Reference:
      The optimizer of TensorFlow 1, its verbs and their order; optax, its explicit state.
    """

    def __init__(
        self,
        tx_or_rule: TableOptimizer | optax.GradientTransformation,
        name: str = "Optimizer",
        *,
        axis_name: AxisName | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self._name = checked_name("Optimizer", name)
        self._declared = DeclaredOptimizer(tx_or_rule)
        self._replicas = make_replicas(name, axis_name, reduction, required=False)
        # cross_shard sums the gradients itself; without an axis here it may do so.
        if axis_name is not None and self._declared.sums_itself:
            raise summed_twice(name, "cross_shard(...)")

    def declared_for(self, what: str) -> DeclaredOptimizer:
        """Return the optimizer inside this one, for a wrapper that sums gradients itself.

        Args:
          what: the name of the wrapper, for messages.

        Raises:
          ValueError: this optimizer sums gradients too.
        """
        what = f"{what}: optimizer {self._name}"
        if self._replicas.names:
            raise summed_twice(what, f"axis_name {self._replicas.names}")
        if self._declared.sums_itself:
            raise summed_twice(what, "cross_shard(...)")
        return self._declared


@final
class CrossShardOptimizer(TreeOptimizer):
    """Sum the gradients of all replicas, then let another optimizer apply them.

    Its methods are those of `TreeOptimizer`. With S replicas and their losses l, the optimizer sees
    the gradient of Σ l / S (mean) or of Σ l (sum). `compute_gradients` divides the loss and returns
    this replica's own gradients, so that they can be clipped before `apply_gradients` sums them.
    Use "mean" for a loss that is a mean over the replica's batch, "sum" for one that is a sum.

    In a `shard_map` that tracks what varies (`check_vma=True`), declare parameters and state as
    replicated outputs; with several groups, as outputs that vary from group to group.

    Args:
      opt: an `Optimizer` without an axis, or an optax transform.
      reduction: "mean" or "sum".
      axis_name: the mesh axes of the replicas; several count as one. Where none of them is bound
        there is one replica, and one warning is given.
      group_assignment: lists of equal length that together hold the index of every replica
        (row-major over the axes) once. Gradients are summed within a list, and the mean divides by
        its length. With None or [] all replicas are one group.
      name: the name of the optimizer.

    Raises:
      TypeError: `opt` is neither an `Optimizer` nor an optax transform.
      ValueError: `opt` has an axis of its own; an unknown reduction; groups that are not such
        lists.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("replicas",))
      >>> optimizer = CrossShardOptimizer(optax.sgd(0.5), axis_name="replicas")
      >>> def step(params, state, x):
      ...     return optimizer.minimize(lambda w: (w * x).mean(), params, state)[:2]
      >>> mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("replicas")), out_specs=P())
      >>> params = jnp.ones(())
      >>> params, state = jax.jit(mapped)(params, optimizer.init(params), jnp.array([1.0, 3.0]))
      >>> float(params), int(state.step)
      (0.0, 1)

    Reference:
      TensorFlow's `tf.compat.v1.tpu.CrossShardOptimizer`.
    """

    def __init__(
        self,
        opt: Optimizer | optax.GradientTransformation,
        reduction: Reduction = "mean",
        *,
        axis_name: AxisName,
        group_assignment: Groups | None = None,
        name: str = "CrossShardOptimizer",
    ) -> None:
        self._name = checked_name("CrossShardOptimizer", name)
        self._replicas = make_replicas(name, axis_name, reduction, group_assignment)
        if isinstance(opt, Optimizer):
            self._declared = opt.declared_for(name)
        else:
            _check_transform(name, opt)
            self._declared = DeclaredOptimizer(opt)


def cross_shard(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    reduction: Reduction = "mean",
    group_assignment: Groups | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that sums local gradients over replicas, then calls another.

    `update` divides the gradients by the number of replicas (mean), sums them, and calls `tx`. It
    takes this replica's own gradients of the unscaled loss. In a `shard_map` with `check_vma=True`
    these are the gradients by parameters that `jax.lax.pcast(…, axis_name, to="varying")` has made
    local.

    A clip of the norm at c that stands before `cross_shard` in a chain clips unscaled gradients. It
    equals a clip at c / S between `compute_gradients` and `apply_gradients` of
    `CrossShardOptimizer`, whose gradients are scaled already.

    Args:
      tx: an optax transform.
      axis_name: the mesh axes of the replicas.
      reduction: "mean" or "sum".
      group_assignment: as in `CrossShardOptimizer`.

    Raises:
      TypeError: `tx` is not an optax transform; at an update, a gradient is an `IndexedSlices`.
      ValueError: an unknown reduction, groups that are not as described, or a gradient that is the
        same on all replicas.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = cross_shard(optax.sgd(0.5), "replicas", reduction="sum")
      >>> w, gradients = jnp.ones(()), jnp.array([1.0, 3.0])
      >>> jax.vmap(lambda g: tx.update(g, tx.init(w))[0], axis_name="replicas")(gradients).tolist()
      [-2.0, -2.0]

    Reference:
      optax: a transform is a pair of pure functions, init and update.
    """
    _check_transform("cross_shard", tx)
    shards = make_replicas("cross_shard", axis_name, reduction, group_assignment)
    inner = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        # IndexedSlices are pytrees: without is_leaf their values and indices would be two leaves.
        pairs, structure = jax.tree_util.tree_flatten_with_path(
            updates, is_leaf=is_indexed_slices
        )
        for path, gradient in pairs:
            if is_indexed_slices(gradient):
                refuse(
                    f"cross_shard: gradient of {keystr(path) or 'the parameter'}",
                    expected="an array, since optax transforms do not take IndexedSlices",
                    got="IndexedSlices",
                    remedy="CrossShardOptimizer(Optimizer(tx), axis_name=...) takes them",
                    error=TypeError,
                )
        summed = shards.summed({keystr(path): shards.scaled(g) for path, g in pairs})
        return inner.update(
            structure.unflatten(summed.values()), state, params, **extra
        )

    return SumsItself(tx.init, update)


def _check_transform(what: str, tx: Any) -> None:
    if isinstance(tx, SumsItself):
        raise summed_twice(f"{what}: opt", "cross_shard(...)")
    if isinstance(tx, optax.GradientTransformation):
        return
    name = type(tx).__name__
    remedies = {
        TableOptimizer: f"wrap it: Optimizer({name}(...)), or {name}(...).as_optax()",
        Optimizer: "CrossShardOptimizer takes an Optimizer",
        CrossShardOptimizer: "one is enough: give it the optimizer that this one wraps",
    }
    # Here `tx` is something else: name the remedy for what users most likely meant.
    likely = (words for kind, words in remedies.items() if isinstance(tx, kind))
    refuse(
        f"{what}: opt",
        expected="an Optimizer or an optax transform",
        got=name,
        remedy=next(likely, "make one: optax.sgd(0.1)"),
        error=TypeError,
    )
