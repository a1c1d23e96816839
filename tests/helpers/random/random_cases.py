"""Random cases of training: what is declared, where it lives, and how the steps are run.

`draw_case(seed)` depends on its seed alone. A case has tables and features in a random nesting,
batches of ids, weights and activation gradients (`random_batches`), and several arrangements:
meshes and ways of running the same steps, which must not change a bit.

Each part has its own generator, so that a new choice in one part does not change the others.
"""

import dataclasses
import itertools
import math
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_optimizers
from jax.sharding import AxisType, Mesh
from random_batches import BadIds, draw_form, draw_step
from random_optimizers import choose

import tpu_embed
from tpu_embed import FeatureConfig, QuantizationConfig, TableConfig

STEPS = 2
BATCHES = (1, 2, 4, 6, 8, 8, 8, 10, 12, 15, 16, 16, 16, 20, 24, 24, 28, 72)
FACTORS = (1, 1, 2, 3, 5)
"""By what the batch sizes of features may differ."""
VOCABULARIES = (1, 2, 3, 5, 7, 8, 9, 20, 64, 100, 300)
DIMS = (1, 1, 2, 2, 3, 3, 5, 5, 8, 8, 16, 16, 17, 17, 128)
GRIDS = ((16, -1.0, 1.0), (2, 0.0, 1.0), (256, -2.0, 3.0))
INSIDE = "ids in jit"
WAYS = ("eager", "in jit", INSIDE, "stateful")


Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Trio:
    """A nesting of three branches; the fields are not in the order of their names."""

    second: Any
    third: Any
    first: Any


def filled(nest, values):
    """Return a nesting like `nest`, with these leaves; its dicts are sorted, which is no matter."""
    return jax.tree.unflatten(jax.tree.structure(nest), values)


def _nested(rng, items):
    """Return the items as leaves of a random nesting."""
    if len(items) == 1 and rng.random() < 0.6:
        return items[0]
    count = int(rng.integers(1, min(3, len(items)) + 1))
    cuts = np.sort(rng.choice(np.arange(1, len(items)), count - 1, replace=False))
    bounds = [0, *cuts.tolist(), len(items)]
    parts = [_nested(rng, items[i:j]) for i, j in itertools.pairwise(bounds)]
    kind = choose(rng, ["dict", "numbers", list, tuple, {1: list, 2: Pair, 3: Trio}[count]])
    if kind in ("dict", "numbers"):
        keys = rng.permutation(10)[:count].tolist()
        return dict(zip(keys if kind == "numbers" else [f"f{k}" for k in keys], parts, strict=True))
    return kind(*parts) if kind in (Pair, Trio) else kind(parts)


class Known:
    """An initializer whose values the oracle knows, because NumPy draws them."""

    def __init__(self, seed):
        self.seed = seed

    def values(self, size, dim):
        """Return a whole table, float32 [V, D], in which some rows are zeros."""
        rng = np.random.default_rng(self.seed)
        rows = rng.normal(size=(size, dim)).astype(np.float32)
        return np.where(rng.random((size, 1)) < 0.05, np.float32(0), rows)

    def __call__(self, key, shape, dtype, shard_info):
        return jnp.asarray(self.values(*shard_info.table_shape))[shard_info.rows].astype(dtype)


class Arrangement(
    namedtuple("Arrangement", "mesh_shape way explicit stack_tables ahead pipelined kernels")
):
    """Devices, and a way of running the steps on them.

    Attributes:
      mesh_shape: the sizes of one axis or two.
      way: one of `WAYS`.
      explicit: for each axis, whether it is an explicit axis, which the types of arrays show.
      stack_tables: as for the engine; `TPUEmbedding` always stacks.
      ahead: whether batches are placed or enqueued before the first step.
      pipelined: the option of `TPUEmbedding`.
      kernels: the value of `TPU_EMBED_KERNELS`.
    """

    @property
    def devices(self):
        return math.prod(self.mesh_shape)

    def mesh(self):
        """Return its mesh of axes p and q, or of d alone."""
        names = ("p", "q") if len(self.mesh_shape) == 2 else ("d",)
        kinds = tuple(AxisType.Explicit if one else AxisType.Auto for one in self.explicit)
        devices = np.array(jax.devices()[: self.devices]).reshape(self.mesh_shape)
        return Mesh(devices, names, axis_types=kinds)


FIELDS = "seed nest optimizer batch batch_axes sum_blocks on_bad_gradient inside steps arrangements"


class Case(namedtuple("Case", FIELDS)):
    """What is trained, and its arrangements, of which the first is on one device.

    Attributes:
      nest: the features, nested.
      optimizer: the optimizer of the engine.
      batch: B; of features of their own size, what divides all sizes.
      inside: whether all arrangements give ids inside a jit, where bad ids are dropped even under
        "error".
    """

    @property
    def features(self):
        return jax.tree.leaves(self.nest)

    @property
    def tables(self):
        """The tables by name: numbered by first appearance where they have none."""
        configs = list(dict.fromkeys(feature.table for feature in self.features))
        return {config.name or f"table_{i}": config for i, config in enumerate(configs)}

    def optimizer_of(self, table):
        """Return the optimizer of a table, or None if it is not trained."""
        if not table.trainable:
            return None
        return self.optimizer if table.optimizer is None else table.optimizer

    def skips(self, step):
        """Return whether a step is skipped: a gradient of a trained table is not finite."""
        return step.spoilt is not None and self.features[step.spoilt].table.trainable

    def replicas(self, arrangement):
        """Return into how many parts the batch is split."""
        sizes = dict(zip(("p", "q"), arrangement.mesh_shape, strict=False))
        axes = self.batch_axes or tuple(sizes)
        return math.prod(sizes[axis] for axis in axes)

    def keeps_bits(self, arrangement):
        """Return whether all bits must be those of one device."""
        return self.sum_blocks % self.replicas(arrangement) == 0


def draw_case(seed):
    """Return the case of a seed."""

    def part(number):
        return np.random.default_rng([seed, number])

    rng = part(0)
    two_axes, dense = rng.random() < 0.3, rng.random() < 0.35
    inside = dense and rng.random() < 0.3
    batch = choose(rng, BATCHES)
    optimizer, tables = _draw_tables(part(1), two_axes)
    factors = FACTORS if part(6).random() < 0.3 else (1,)
    sizes = [batch * choose(part(7 + f), factors) for f in range(5)]
    forms = _draw_features(part(2), tables, sizes, dense)
    nest = _nested(part(3), list(forms))
    pairs = [(feature, forms[feature]) for feature in jax.tree.leaves(nest)]
    policy = choose(rng, ("allow", "allow", "skip", "error"))
    axes = choose(rng, (None, None, ("p",), ("q",), ("p", "q"))) if two_axes else None
    blocks = choose(rng, (8, 8, 8, 8, 16, 24, 4, 1))
    without = {"stateful"} if blocks != 8 else set()  # no option for sum_blocks
    ways = (INSIDE,) if inside else [w for w in WAYS if w not in without and (dense or w != INSIDE)]
    batches, bad = part(4), BadIds(inside, wide=INSIDE not in ways)
    steps = tuple(draw_step(batches, pairs, bad, policy == "skip") for _ in range(STEPS))
    case = Case(seed, nest, optimizer, batch, axes, blocks, policy, inside, steps, ())
    return case._replace(arrangements=_arrangements(part(5), case, two_axes, ways))


def _arrangements(rng, case, two_axes, ways):
    """Return arrangements on one device, and on up to three other counts that B allows."""
    found, turn = [], int(rng.integers(len(ways)))
    counts = [2, 4, 8] if two_axes or rng.random() < 0.7 else list(range(2, 9))
    for devices in (1, *rng.permutation(counts).tolist()):
        rows = int(choose(rng, [n for n in range(1, devices + 1) if devices % n == 0]))
        arrangement = Arrangement(
            mesh_shape=(rows, devices // rows) if two_axes else (devices,),
            way=ways[(turn + len(found)) % len(ways)],
            explicit=tuple((rng.random(1 + two_axes) < 0.2).tolist()),
            stack_tables=bool(rng.random() < 0.7),
            ahead=bool(rng.random() < 0.5),
            pipelined=bool(rng.random() < 0.3),
            kernels="reference" if rng.random() < 0.2 else "native",
        )
        if case.batch % case.replicas(arrangement) == 0 and len(found) < 4:
            found.append(arrangement)
    return tuple(sorted(found, key=lambda arrangement: arrangement.devices))


def _draw_tables(rng, two_axes):
    """Return the engine's optimizer and one to four tables; some are alike and may be stacked."""
    default, kinds, tables = random_optimizers.draw(rng), [], []
    for i in range(rng.integers(1, 5)):
        if not kinds or rng.random() < 0.7:
            kinds.append(_draw_kind(rng, default, two_axes))
        kind = dict(choose(rng, kinds))
        size = int(choose(rng, (*VOCABULARIES, rng.integers(1, 301))))
        kind |= {"initializer": _draw_initializer(rng)}
        kind |= {"combiner": choose(rng, ("mean", "sum", "sqrtn"))}
        kind |= {"name": choose(rng, (f"t{i}", f"t/{i} é", None)), "trainable": rng.random() < 0.9}
        tables.append(TableConfig(size, **kind))
    return default, tables


def _draw_initializer(rng):
    """Return an initializer, most often one that the oracle knows: the default compiles slowly."""
    chance, seed = rng.random(), int(rng.integers(2**31))
    if chance < 0.1:
        return None
    return tpu_embed.RowIdInitializer(seed % 7 - 3) if chance < 0.25 else Known(seed)


def _draw_kind(rng, default, two_axes):
    """Return the options that stacked tables have in common."""
    optimizer = random_optimizers.draw(rng) if rng.random() < 0.7 else None
    used = default if optimizer is None else optimizer
    placements = ("mod", "div", "replicated")
    if not getattr(used, "use_gradient_accumulation", True):
        placements = placements[:2]
    return {
        "dim": int(choose(rng, DIMS)),
        "dtype": choose(rng, ("float32", "float32", "bfloat16")),
        "optimizer": optimizer,
        "placement": choose(rng, placements),
        "shard_axes": choose(rng, (None, "p", "q", ("q", "p"))) if two_axes else None,
        "quantization_config": QuantizationConfig(*choose(rng, GRIDS))
        if rng.random() < 0.15
        else None,
    }


def _draw_features(rng, tables, sizes, dense):
    """Return one to five features, each with the form of its ids; every table has at least one."""
    count = int(rng.integers(len(tables), 6))
    numbers = [*range(len(tables)), *rng.integers(0, len(tables), count - len(tables)).tolist()]
    forms = {}
    for number in rng.permutation(numbers).tolist():
        form = draw_form(rng, sizes[len(forms)], dense)
        policy = choose(rng, ("error", "drop", "clip"))
        options = {"output_shape": form.output_shape, "on_bad_id": policy}
        options["name"] = f"feature {len(forms)}" if rng.random() < 0.5 else None
        forms[FeatureConfig(tables[number], form.length, **options)] = form
    return forms
