"""Check what an update is given besides tables and ids, and put it together for the program.

Input: a state, a batch, gradients and learning rates. Output: `Operands`.
"""

from __future__ import annotations

import jax

from tpu_embed._types import ArrayLike, PyTree, Tracer
from tpu_embed.core.batch import Batch, TracedIds
from tpu_embed.core.ids import Structure
from tpu_embed.core.layout import HostRates, Layout
from tpu_embed.core.lookup import activations_read
from tpu_embed.core.state import TableState, check_not_donated
from tpu_embed.core.update import Guard, Operands, check_trainable, checked_gradients


class OperandMaker:
    """Makes the operands of updates, for one engine.

    Args:
      declared: the feature configuration.
      layout: the engine's layout.
      guard: what to do with activation gradients that are not finite.
      rates: the learning rates that are read on the host.
    """

    def __init__(self, declared: Structure, layout: Layout, guard: Guard, rates: HostRates) -> None:
        self._declared, self._layout = declared, layout
        self._guard, self._rates = guard, rates

    def make(
        self,
        state: TableState,
        source: Batch | TracedIds,
        gradients: PyTree,
        learning_rates: tuple[ArrayLike, ...] | None,
    ) -> Operands:
        """Return the operands of an update.

        Args:
          state: the state to update.
          source: the ids.
          gradients: in the structure of the features; None is zero.
          learning_rates: what `HostRates.read` returned; None: they are read now, outside a jit.

        Raises:
          ValueError: a table without an optimizer; a gradient of a wrong shape, or one that the
            guard refuses; missing rates; a state that was donated.
          TypeError: a container of another type than in the configuration.
        """
        check_trainable("update", self._layout)
        check_not_donated(state)
        given = self._declared.match(gradients, what="activation_gradients")
        checked = checked_gradients(given, source.spec, self._layout)
        leaves = jax.tree.leaves((state, source, checked))
        # Outside a jit, values can be checked now, and callable learning rates be read.
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            self._guard.refuse(checked, source)
            learning_rates = self._rates.read() if learning_rates is None else learning_rates
        rates = self._rates.by_stack(learning_rates)
        reads = activations_read(state.tables, self._layout.axes.replicas)
        return Operands(checked, state.step + 1, rates, reads)
