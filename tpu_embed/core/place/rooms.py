"""Give each batch a static shape: few, so that few programs serve all; the same on all processes.

A batch gets the smallest earlier spec that it fits, if that has at most twice the room that the
batch needs. Otherwise the spec of batches of about its size grows, or there is a new one: each
holds all batches between a power of 4 and the next. So one outlier does not slow every later step,
and all programs stay compiled.

    Batches need about 8,000 ids: a spec for 8,704. An outlier needs 400,000: one for 425,984, too.
    The next batch needs 8,000 again, and gets the first one.

All this is decided from specs that the processes agreed on, so all processes have the same ones. A
network that sums over the places of a jagged feature sums in an order that depends on their room,
so a checkpoint has the specs, too, as JSON.

With several processes, each one sees only its own part of a batch, but all must run the same
program. So before a batch is sent, the processes exchange the specs that their parts need, and all
use the union. If one process refuses its part, for example because of a bad id, all of them raise.

Input: the spec that a batch needs, or this process's part of it, or the error that the part raises.
Output: the spec that it gets, on all processes.
"""

from __future__ import annotations

import collections
import json
import logging
import operator
import threading
import zlib
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np

from tpu_embed._checks import is_int, refuse
from tpu_embed.core.batch import BatchSpec, Routed, StackSpec
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import Layout
from tpu_embed.processes import Conversation

RATIO = 2
"""A spec with more than this many times the room of another one is worth a program of its own."""

SMALL = 2**14
"""Specs with room for fewer ids and rows on a device count as if they had this much."""


class Rooms:
    """The specs that batches of one engine get. Threads may share them.

    Batches of another size, or with other activation shapes, are of another kind and have specs of
    their own.

    Args:
      layout: the engine's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        # `_kind_of` a spec -> its class of sizes -> the spec.
        self._specs: dict[Any, dict[int, BatchSpec]] = collections.defaultdict(dict)
        self._lock = threading.RLock()

    def copy(self) -> Any:
        """Return all specs as they are now, as a JSON value."""
        with self._lock:
            specs = [
                spec for by_class in self._specs.values() for spec in by_class.values()
            ]
        # JSON has dicts in place of dataclasses, and lists in place of tuples.
        return [
            [{"spec": json.loads(json.dumps(spec, default=vars))} for spec in specs]
        ]

    def set(self, value: Any) -> None:
        """Take what `copy` returned in place of the specs of the same kinds.

        Specs of an engine with other features, stacks or devices are left out.

        Raises:
          ValueError: it is something else.
        """
        try:
            # Version 0.2.0 has written several lists, and more of each spec.
            specs = [decode_spec(one["spec"]) for some in value for one in some]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refuse(
                "shapes",
                expected="those of an engine",
                got=repr(error),
                remedy="give what get_state returned",
                cause=error,
            )
        # Those of another layout are no error: a checkpoint may be restored on other devices or
        # with other features. The room of its batches is then found anew.
        if not all(_is_of(spec, self.layout) for spec in specs):
            return
        with self._lock:
            self._specs |= {_kind_of(spec): {} for spec in specs}
            for spec in specs:
                self._specs[_kind_of(spec)][self._class_of(spec)] = spec

    def propose(self, needed: BatchSpec) -> BatchSpec:
        """Return the spec that this process asks for; change nothing.

        Args:
          needed: what this process's part of the batch needs exactly.
        """
        with self._lock:
            specs = self._specs[_kind_of(needed)]
            near = [one for one in specs.values() if holds(one, needed)]
            # One with more room would cost every such batch more than a program of its own.
            near = [one for one in near if self._is_near(one, needed)]
            if near:
                return min(near, key=self._room)
            # Room to spare, so that the next batches fit, too.
            roomy = needed.bucketed()
            grown = specs.get(self._class_of(roomy))
            return roomy if grown is None else BatchSpec.union(grown, roomy)

    def accept(self, agreed: BatchSpec) -> BatchSpec:
        """Return the spec that a batch gets, after all processes have agreed on what they want.

        Args:
          agreed: the union of what `propose` returned in all processes.
        """
        with self._lock:
            specs = self._specs[_kind_of(agreed)]
            if agreed in specs.values():
                return agreed
            # A union may be of the next class, which has a spec, too.
            while (number := self._class_of(agreed)) in specs and not holds(
                agreed, specs[number]
            ):
                agreed = BatchSpec.union(agreed, specs[number])
            if specs and not any(self._is_near(agreed, one) for one in specs.values()):
                rooms = ", ".join(f"{self._room(one):,}" for one in specs.values())
                logging.getLogger("tpu_embed").warning(
                    "place: room for %s ids and rows on a device is far from that of earlier "
                    "batches (%s); such batches get a program of their own",
                    f"{self._room(agreed):,}",
                    rooms,
                )
            specs[number] = agreed
            return agreed

    def _is_near(self, one: BatchSpec, other: BatchSpec) -> bool:
        """Tell whether batches of either spec may as well run the program of the larger one."""
        rooms = self._room(one), self._room(other)
        return max(rooms) <= RATIO * max(min(rooms), SMALL)

    def _class_of(self, spec: BatchSpec) -> int:
        """Return the number of the class: k for less than 4ᵏ times `SMALL`."""
        return ((self._room(spec) // SMALL).bit_length() + 1) // 2

    def _room(self, spec: BatchSpec) -> int:
        """Return the places for ids and rows that a device has in a spec."""
        total = 0
        for g, (stack, one) in enumerate(
            zip(self.layout.stacks, spec.stacks, strict=True)
        ):
            exchanged = stack.num_shards * (one.row_capacity + one.partials)
            total += spec.ids(g) + exchanged + one.merged
        return total


def _kind_of(spec: BatchSpec) -> Any:
    """Return what specs must have in common to have a union."""
    shapes = (
        (shape.batch, shape.inner, shape.combines, shape.capacity is None)
        for shape in spec.feature_shapes
    )
    return spec.routed, tuple(shapes)


def holds(spec: BatchSpec, needed: BatchSpec) -> bool:
    """Tell whether every batch of `needed` fits `spec`, which is of the same kind.

    It is `BatchSpec.union(spec, needed) == spec`, but makes no spec: `place` asks it several times.
    """
    return spec is needed or (
        all(
            all(map(operator.ge, stack.sizes, other.sizes))
            for stack, other in zip(spec.stacks, needed.stacks, strict=True)
        )
        and all(map(_holds_shape, spec.feature_shapes, needed.feature_shapes))
    )


def _holds_shape(shape: FeatureShape, other: FeatureShape) -> bool:
    # Flat ids have no width. They hold dense ones, but not the other way round.
    wide = shape.width is None or (
        other.width is not None and shape.width >= other.width
    )
    roomy = (shape.capacity or 0) >= (other.capacity or 0)
    return wide and roomy and shape.weighted >= other.weighted


# -- specs as JSON ---------------------------------------------------------------------------------


def decode_spec(value: dict[str, Any]) -> BatchSpec:
    """Return the spec that `value` has the fields of, as JSON has them.

    Raises:
      KeyError, TypeError, ValueError: it has not.
    """
    if value["routed"] not in get_args(Routed):
        refuse(
            "routed", expected=f"one of {get_args(Routed)}", got=repr(value["routed"])
        )
    shapes = tuple(
        FeatureShape(**_read(FeatureShape, one)) for one in value["feature_shapes"]
    )
    stacks = tuple(StackSpec(**_read(StackSpec, one)) for one in value["stacks"])
    return BatchSpec(_count(value["replicas"]), shapes, stacks, value["routed"])


def _read(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass, each read as its type says."""
    # Version 0.2.0 has written one more.
    return {
        name: _READ[type_](value[name]) for name, type_ in kind.__annotations__.items()
    }


def _count(value: Any) -> int:
    # Devices number the places of a batch in 32 bits, so no room is larger. A position in which
    # a digit has changed must not make the next batch ask for all memory.
    if not is_int(value) or not 0 <= value < 2**31:
        refuse("a size", expected="an integer in [0, 2³¹)", got=repr(value))
    return int(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        refuse("a flag", expected="true or false", got=repr(value), error=TypeError)
    return value


_READ = {
    "int": _count,
    "int | None": lambda value: None if value is None else _count(value),
    "tuple[int, ...]": lambda values: tuple(map(_count, values)),
    "bool": _flag,
}


def _is_of(spec: BatchSpec, layout: Layout) -> bool:
    """Tell whether batches of an engine with this layout may have a spec."""
    # Capacities may be any, because they are what is remembered. The replicas that share a batch,
    # the features of each stack, and which of them are jagged are not.
    found = spec.replicas, [stack.features for stack in spec.stacks]
    jagged = [shape.capacity is not None for shape in spec.feature_shapes]
    declared = [feature.config.jagged for feature in layout.features]
    return (
        found == (layout.axes.replicas, layout.features_by_stack) and jagged == declared
    )


# -- agreement of processes ------------------------------------------------------------------------


class Agreement(Conversation):
    """Gives all processes the same spec for a batch, or an error on all of them.

    Usually every part fits the spec that was agreed last. Then no process has news to send, and
    the round costs one wait for all processes and one request to the key-value store.

    Args:
      layout: the engine's layout. Engines with the same tables and features on all processes form
        one conversation for each kind of batch.
      routed: what of these batches is routed.

    Attributes:
      alone, order: see `Conversation`.
    """

    def __init__(self, layout: Layout, routed: Routed) -> None:
        tables = [
            (t.name, t.vocabulary_size) for stack in layout.stacks for t in stack.tables
        ]
        known = repr((tables, [feature.path for feature in layout.features], routed))
        # The name must be the same on all processes, so it is made of what they declare alike.
        super().__init__(f"tpu_embed/{zlib.crc32(known.encode()):08x}")
        self._last: BatchSpec | None = None

    def agree(self, wanted: BatchSpec, *, exact: bool) -> tuple[BatchSpec, bool]:
        """Return the union of the specs that all processes want, and whether it must be exact.

        Both are the same on each process.

        Args:
          wanted: the spec of the global batch that this process's part fits.
          exact: whether all processes must want the same spec.

        Raises:
          ValueError, TypeError, RuntimeError: another process refused its part or has no more
            batches, or the wanted specs have no union; raised by every process.
          RuntimeError: a process did not come within `WAIT_SECONDS`, or ended.
        """
        if self.alone:
            return wanted, exact
        # Silence means "what was agreed last is enough for me".
        new = exact or wanted != self._last
        said = self.exchange((wanted, exact) if new else None)
        specs = {process: spec for process, (spec, _) in said.items()}
        # Key -1 holds the last agreed spec, for the processes that sent nothing.
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        exact = any(one for _, one in said.values())
        self._last = _union(specs, exact=exact)
        return self._last, exact

    def share(self, arrays: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
        """Return the arrays `[n]` that all processes give, by process.

        A batch for which this is called is placed in two rounds: this one, then `agree`. They
        cannot be one: the room that a part needs depends on the rows of its keys, and what rows
        unknown keys get depends on those of all parts.

        Args:
          arrays: as many in every process.

        Raises:
          ValueError, TypeError, RuntimeError: as for `agree`.
        """
        if self.alone:
            return [arrays]
        return [one["arrays"] for one in self.exchange({"arrays": arrays}).values()]


def _union(specs: dict[int, BatchSpec], *, exact: bool) -> BatchSpec:
    """Return the union of the specs of all processes.

    Args:
      specs: by process; key -1 holds the last agreed spec, for processes that sent nothing.
      exact: whether the specs must be equal.

    Raises:
      ValueError: the specs have no union, or differ although they must be equal.
    """
    try:
        agreed = BatchSpec.union(*specs.values())
    except ValueError as error:
        # The first feature whose parts differ in size speaks for all.
        by_feature = zip(*(one.sizes for one in specs.values()), strict=True)
        different = next(
            (sorted({*sizes}) for sizes in by_feature if len({*sizes}) > 1), None
        )
        refuse(
            "place",
            expected="parts of one batch, as large on every device and of like shapes",
            got=f"batches of {different} in all" if different else f"{error}",
            remedy="pad the shorter parts with tpu_embed.pad_batch",
            cause=error,
        )
    if exact and any(one != agreed for one in specs.values()):
        refuse(
            "spec",
            expected="the same on all processes",
            got="different ones",
            remedy="use BatchSpec.union of all processes' specs",
        )
    return agreed
