"""Stacks of tables made by hand, for tests of parts that work on one stack."""

from tpu_embed import TableConfig
from tpu_embed.core.layout import ResolvedTable, make_stacks


def resolved(name, size, shards, *, optimizer=None, placement="mod", **options):
    """Return a fully resolved table on a mesh of one axis "d"."""
    config = TableConfig(size, options.pop("dim", 4), name=name, placement=placement, **options)
    axes = () if placement == "replicated" else ("d",)
    return ResolvedTable(name, config, optimizer, None, axes, shards if axes else 1)


def make_stack(sizes, shards, placement="mod", **options):
    """Return one stack of tables of these sizes, named "0", "1", …"""
    options["placement"] = placement
    (stack,) = make_stacks([resolved(str(i), n, shards, **options) for i, n in enumerate(sizes)])
    return stack
