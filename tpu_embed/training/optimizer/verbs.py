"""The verbs of an optimizer of a tree of parameters, over explicit state.

Enters: a loss, a tree of parameters, and a state. Leaves: a new tree and a new state. Dense
parameters go through an optax transform; tables whose gradient is sparse, through the rule over
rows, touched rows only. `Optimizer` and `CrossShardOptimizer` say how they are made.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array, snapshot
from tpu_embed._types import Array, ArrayLike, PyTree
from tpu_embed.optimizers._optax_calls import init_state
from tpu_embed.training.autodiff import Aggregation, Collected, Gate, collect_gradients
from tpu_embed.training.optimizer.checked_gradients import check_gradients
from tpu_embed.training.optimizer.declared import DeclaredOptimizer
from tpu_embed.training.optimizer.slots import State, take_apart
from tpu_embed.training.optimizer.state import OptState, check_state
from tpu_embed.training.optimizer.update import check_update, update_parameters
from tpu_embed.training.paths import Leaves, Path, leaves_of, listed
from tpu_embed.training.replicas import Replicas

__all__ = ["GradientsAndVariables", "TreeOptimizer", "checked_name"]

GradientsAndVariables = list[tuple[Any, KeyPath]]
"""Pairs of an array, an `IndexedSlices` or None, and the path of a parameter."""


class TreeOptimizer(abc.ABC):
    """Compute gradients of a loss by a tree of parameters, and apply them.

    What an `Optimizer` and a `CrossShardOptimizer` do. The object holds no state: `init` makes it,
    and `apply_gradients` returns a new one.
    """

    GATE_NONE: ClassVar[Literal["none"]] = "none"
    GATE_OP: ClassVar[Literal["op"]] = "op"
    GATE_GRAPH: ClassVar[Literal["graph"]] = "graph"

    _name: str
    _declared: DeclaredOptimizer
    _shards: Replicas

    @abc.abstractmethod
    def __init__(self) -> None: ...

    def get_name(self) -> str:
        """Return the optimizer's name."""
        return self._name

    def init(self, params: PyTree) -> OptState:
        """Return the first state, all slots included.

        Args:
          params: a pytree of arrays.

        Raises:
          ValueError: it has no leaves.
        """
        structure = leaves_of(params).structure
        inner = init_state(self._declared.dense, jax.tree.map(as_array, params))
        return OptState(jnp.zeros((), jnp.int32), inner, structure)

    def local(self, tree: PyTree) -> PyTree:
        """Return arrays whose gradients stay this replica's own.

        In a `shard_map` that checks what varies, gradients by replicated arrays are summed over the
        replicas; by these they are not. Without an axis: the arrays as they are.

        Args:
          tree: of arrays.
        """
        return self._shards.local(tree) if self._shards.names else tree

    def scale_loss(self, loss: ArrayLike) -> Any:
        """Return the loss that `compute_gradients` differentiates.

        That is the loss over the number of replicas under mean, where an axis is given and bound.
        """
        return self._shards.scaled(loss)

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

        Args are those of `compute_gradients` and `apply_gradients`.

        Returns:
          parameters, state, and the loss of the old parameters: this replica's, unscaled.

        Raises:
          ValueError: no variable has a gradient, or see both.
        """
        check_state(self._name, state)
        options = (var_list, gate_gradients, aggregation_method, grad_loss)
        collected, pairs = self._compute(loss, params, *options)
        if all(gradient is None for gradient, _ in pairs):
            raise ValueError(
                message(
                    f"{self._name}: minimize",
                    expected="a loss that depends on a variable",
                    got=f"no gradient for any of {listed(keystr(path) for _, path in pairs)}",
                    remedy="use a parameter in the loss, outside stop_gradient",
                )
            )
        params, state = self.apply_gradients(
            pairs, params, state, constraints=constraints, learning_rate=learning_rate
        )
        return params, state, collected.loss

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
          loss: a function of the parameters that returns floats; more than one are summed.
          params: a pytree of arrays.
          var_list: paths of the variables, the rest being constants; None: all.
          gate_gradients: `GATE_NONE`, `GATE_OP`: a barrier for each gradient, `GATE_GRAPH`: one
            for all. They never change numbers.
          aggregation_method: how gradients of several losses would be added; there is one.
          grad_loss: the loss' cotangent, of its shape, or None: ones.

        Returns:
          pairs of a gradient and a path, in the order of `var_list` or of the leaves. The gradient
          of a parameter that is only looked up (`embedding_lookup`) is an `IndexedSlices`, which
          names the rows of the lookups that are connected to the loss, as `gradients` defines it;
          None is that of an integer parameter or of one that is not connected to the loss.

        Raises:
          TypeError: a loss that is no function.
          ValueError: a loss or `grad_loss` that is not float, no parameters, an unknown path, gate
            or method.
        """
        options = (var_list, gate_gradients, aggregation_method, grad_loss)
        return self._compute(loss, params, *options)[1]

    def _compute(
        self, loss: Any, params: PyTree, var_list: Any, gate: Gate, method: Any, grad_loss: Any
    ) -> tuple[Collected, GradientsAndVariables]:
        leaves = leaves_of(params)
        wanted = leaves.paths if var_list is None else var_list
        variables = leaves.find_all(wanted, what=f"{self._name}: var_list")
        words = {"gate_gradients": gate, "aggregation_method": method}
        collected = collect_gradients(
            loss, leaves, variables, self._shards, grad_loss=grad_loss, **words
        )
        paths = [leaves.paths[i] for i in variables]
        return collected, list(zip(collected.gradients, paths, strict=True))

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
        """Update parameters and state, with gradients summed over the replicas if there are any.

        A parameter without a gradient, or with None, keeps its bits and those of its slots; step
        and whatever else belongs to no parameter go on. A transform that couples parameters, as a
        clip by the global norm does, sees those that have a gradient.

        Of a table with `IndexedSlices` only the rows that they name are updated, each once: the
        rule's `use_gradient_accumulation` means nothing here. A rule that changes every row at
        every step still does.

        Args:
          grads_and_vars: pairs as `compute_gradients` gives them, in any order: this replica's own.
          params: a pytree of arrays.
          state: of the optimizer.
          skip_gradients_aggregation: the gradients are summed over the replicas already, as those
            of `jax.grad` by a replicated parameter are in a `shard_map` that checks what varies.
          constraints: by path a function that the parameter goes through after a dense update.
          learning_rate: `[]`, instead of the rule's; inside a jit the value of a callable without
            arguments, called outside.

        Returns:
          parameters and state.

        Raises:
          TypeError: a gradient that cannot become an array; a state that is no `OptState`.
          ValueError: an unknown or repeated path, a shape, no gradient at all, one that is the same
            on all replicas, `IndexedSlices` for a parameter `[V]` or a transform that is not
            row-separable, a transform that reads the loss, or a learning rate that is missing.
          RuntimeError: a constraint on a parameter whose gradient is `IndexedSlices`.
        """
        check_state(self._name, state)
        leaves = leaves_of(params)
        if leaves.structure != state.structure:
            expected = f"the tree that the state was made for, {state.structure}"
            got, remedy = str(leaves.structure), "init(params) makes a state for another tree"
            what = f"{self._name}: params"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        given = check_gradients(self._name, grads_and_vars, leaves, constraints or {})
        old = take_apart(self._declared.dense, jax.tree.map(snapshot, state.inner), leaves)
        check_update(self._name, self._declared, leaves, old, given)
        step = state.step + 1
        rate = self._declared.learning_rate(step, learning_rate)
        if not skip_gradients_aggregation:
            given = given._replace(gradients=self._summed(given.gradients, leaves))
        params, inner = update_parameters(
            self._declared, leaves, old, given, step=step, learning_rate=rate
        )
        return params, OptState(step, inner, state.structure)

    def _summed(self, gradients: dict[int, Any], leaves: Leaves) -> dict[int, Any]:
        labelled = {leaves.labels[i]: gradient for i, gradient in gradients.items()}
        summed = self._shards.summed(labelled)
        return {leaves.labels.index(label): gradient for label, gradient in summed.items()}

    def get_slot(self, state: OptState, path: Path, name: str) -> Array | None:
        """Return a parameter's slot, None if it has none of that name.

        Of a transform that mixes parameters (`optax.flatten`) it is not known which part of the
        state is whose: all of it is in `get_non_slot`.

        Raises:
          ValueError: no parameter has this path.
        """
        leaves, parts = self._parts(state)
        return parts.slots(leaves.find(path, what=f"{self._name}: get_slot")).get(name)

    def get_slot_names(self, state: OptState) -> list[str]:
        """Return the names of the slots, sorted.

        For an optax transform they are the fields of its state, with their position in the chain
        before them where two have one name.
        """
        leaves, parts = self._parts(state)
        return sorted({name for i in range(len(leaves.labels)) for name in parts.slots(i)})

    def get_non_slot(self, state: OptState) -> dict[str, Array]:
        """Return what belongs to no parameter, by name: `step`, and counts of the transform.

        A `step` of the transform's own is `inner_step`.
        """
        _, parts = self._parts(state)
        shared = {_beside_step(name): leaf for name, leaf in parts.shared().items()}
        return shared | {"step": state.step}

    def variables(self, state: OptState) -> list[tuple[str, Array]]:
        """Return slots and all of `get_non_slot`, sorted by name.

        A slot is `path/name`; where the whole tree is one array, `name`.
        """
        leaves, parts = self._parts(state)
        slots = {
            f"{label}/{name}" if label else _beside_step(name): leaf
            for i, label in enumerate(leaves.labels)
            for name, leaf in parts.slots(i).items()
        }
        return sorted((slots | self.get_non_slot(state)).items(), key=lambda pair: pair[0])

    def _parts(self, state: OptState) -> tuple[Leaves, State]:
        """Return the leaves of the parameters, numbers in place of values, and the state's."""
        check_state(self._name, state)
        numbers = state.structure.unflatten(range(state.structure.num_leaves))
        leaves = leaves_of(numbers)
        return leaves, take_apart(self._declared.dense, state.inner, leaves)


def checked_name(kind: str, name: Any) -> str:
    """Return an optimizer's name.

    Args:
      kind: the optimizer's class, for messages.
      name: as the user gives it.

    Raises:
      ValueError: it is no word.
    """
    if not isinstance(name, str) or not name:
        remedy = "messages begin with it: 'adagrad'"
        raise ValueError(message(f"{kind}: name", expected="a word", got=repr(name), remedy=remedy))
    return name


def _beside_step(name: str) -> str:
    """Return the name of a leaf of `OptState.inner` that stands beside `OptState.step`."""
    return "inner_step" if name == "step" else name
