"""Run SparseCore kernels on a CPU: in Pallas' interpreter, all workers one after the other.

The indirect DMAs, which it does not know, are replaced by plain copies of rows, which happen as
early or as late as they may: when they are started, or when they are waited for. So do all other
copies of the kernel that reads and rounds rows. What a kernel does not write is NaN. `tests/tpu`
compiles the kernels unchanged.

To look for races, the workers are cores that run at the same time, and a copy of rows is one DMA
for each row; what the kernel does not order by semaphores, the interpreter reports.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tpu_embed.kernels import (
    sparsecore,
    sparsecore_rows,
    sparsecore_rules,
    sparsecore_subcore,
    sparsecore_sums,
    sparsecore_update,
)

WORKERS, CHUNK = 4, 16
RACES = "races"
"""Given as `late`, the interpreter looks for races."""


def mesh_of(kind):
    """Return a mesh of one TPU of a kind, as a `shard_map` over it has it."""
    device = AbstractDevice(kind, num_cores=1, platform="tpu")
    return AbstractMesh((1,), ("d",), (AxisType.Manual,), abstract_device=device)


class Copy:
    """A copy that happens when it is started, or only when it is waited for."""

    def __init__(self, run, late):
        self.run, self.late = run, late

    def start(self):
        if not self.late:
            self.run()

    def wait(self):
        if self.late:
            self.run()


class RowCopies:
    """A DMA for each row that is present."""

    def __init__(self, ids, pair, semaphore):
        self.ids = ids
        self.copy = lambda row, i: pltpu.make_async_copy(*pair(row, i), semaphore)

    def start(self):
        over_rows(self.ids, lambda row, i: self.copy(row, i).start())

    def wait(self):
        over_rows(self.ids, lambda row, i: self.copy(row, i).wait())


def over_rows(ids, act):
    """Call `act(row, i)` for the rows that are present."""

    @pl.loop(0, ids.shape[0])
    def _(i):
        row = ids[i]
        pl.when(row >= 0)(lambda: act(row, i))


def row_by_row(ids, pair, semaphore, late):
    """Return a copy of single rows, those that are present."""
    if late == RACES:
        return RowCopies(ids, pair, semaphore)
    return Copy(lambda: over_rows(ids, lambda row, i: pltpu.sync_copy(*pair(row, i))), late)


def interpret(kernel, name, size, out_type, **options):
    """Return what runs the kernel in the interpreter; what it does not write is NaN."""
    options = options or {"interpret": True}
    # All arrays stay where they are: the kernel copies what it wants.
    here = pl.BlockSpec(memory_space=pl.ANY)

    def call(*operands):
        if out_type:
            options["in_specs"], options["out_specs"] = [here] * len(operands), here
            return pl.pallas_call(kernel, out_shape=out_type, **options)(*operands)
        refs = [x for x in operands if hasattr(jax.typeof(x), "inner_aval")]
        arrays = operands[: len(operands) - len(refs)]
        options["out_shape"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in refs]
        options["input_output_aliases"] = {len(arrays) + n: n for n in range(len(refs))}
        options["in_specs"], options["out_specs"] = [here] * len(operands), [here] * len(refs)
        run = pl.pallas_call(
            lambda *given: kernel(*given[: len(arrays)], *given[len(operands) :]), **options
        )
        results = run(*arrays, *[x[...] for x in refs])
        for x, result in zip(refs, results, strict=True):
            x[...] = result
        return None

    return call


def on_cores(*given):
    """Return what runs the kernel in the interpreter, each worker on a core, to find races."""
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel",))
    finder = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=WORKERS)
    return interpret(*given, grid=(WORKERS,), compiler_params=parameters, interpret=finder)


def found_races():
    """Whether the last kernel that was compiled with `RACES` had any when it ran."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # it has no public name

    races = interpret_pallas_call.races
    return races is not None and races.races_found


def over_vectors(vectors, carry, add):
    return jax.lax.fori_loop(0, vectors, add, carry)


def times(x, y):
    """Return a product that XLA's CPU compiler cannot fuse with an addition."""
    product = x * y
    bits = jax.lax.bitcast_convert_type(product, jnp.int32)
    # Adds 1 to the bits of NaN only, which the compiler cannot know not to be.
    return jax.lax.bitcast_convert_type(bits + (product != product).astype(jnp.int32), jnp.float32)


def _replaced(late):
    """Return what stands in place of the copies of the kernels, by module and name.

    `late` may be `"rows"`: then numbers are copied early, and rows late.
    """

    def gather(ids, source, target, semaphore):
        return row_by_row(ids, lambda row, i: (source.at[row], target.at[i]), semaphore, late)

    def scatter(ids, source, target, semaphore):
        return row_by_row(ids, lambda row, i: (source.at[i], target.at[row]), semaphore, late)

    def fetch(work, slot):
        memory = work.memory
        fetched = memory.fetched.at[slot]
        return gather(memory.ids.at[slot], work.source, memory.rows.at[slot], fetched)

    def write(work, slot):
        memory = work.memory
        written = memory.written.at[slot]
        return scatter(memory.targets.at[slot], memory.sums.at[slot], work.out, written)

    def fetches(work, memory, slot):
        rows, fetched = memory.targets.at[slot], memory.fetched.at[slot]
        pairs = zip((work.table, *work.slots), (memory.table, *memory.slots), strict=True)
        sums = gather(memory.ids.at[slot], work.source, memory.rows.at[slot], fetched)
        return [sums, *(gather(rows, held, near.at[slot], fetched) for held, near in pairs)]

    def writes(work, memory, slot):
        rows, written = memory.targets.at[slot], memory.written.at[slot]
        pairs = zip((work.table, *work.slots), (memory.table, *memory.slots), strict=True)
        return [scatter(rows, near.at[slot], held, written) for held, near in pairs]

    def fetch_rows(work, k):
        memory, slot = work.memory, k & 1
        fetched = memory.fetched.at[slot]
        return gather(memory.ids.at[slot], work.table, memory.rows.at[slot], fetched)

    def numbers(work, k):
        here, target = sparsecore_rows._places(work, k), work.memory.ids.at[k & 1]
        return Copy(lambda: pltpu.sync_copy(work.ids.at[here], target), late is True)

    def write_rows(work, k):
        here, source = sparsecore_rows._places(work, k), work.memory.rounded.at[k & 1]
        return Copy(lambda: pltpu.sync_copy(source, work.out.at[here]), late)

    of_rows = {"_fetch": fetch_rows, "_numbers": numbers, "_write": write_rows}
    return {
        sparsecore_sums: {"_fetch": fetch, "_write": write},
        sparsecore_update: {"_fetches": fetches, "_writes": writes},
        sparsecore_rows: {"_fetch": fetch_rows} if late == RACES else of_rows,
    }


@contextlib.contextmanager
def interpreted(late):
    """Trace small kernels for the interpreter; DMAs copy as early or as late as they may."""
    with pytest.MonkeyPatch.context() as patch:
        for module, functions in _replaced(late).items():
            for name, function in functions.items():
                patch.setattr(module, name, function)
        patch.setattr(sparsecore_update, "_look_up", lambda ref, positions: ref[...][positions])
        on_each = (lambda run: run(pl.program_id(0))) if late == RACES else pl.loop(0, WORKERS)
        patch.setattr(sparsecore_subcore, "on_each_worker", on_each)
        patch.setattr(sparsecore_subcore, "over_vectors", over_vectors)
        patch.setattr(sparsecore_subcore, "_IN_REGISTERS", 32)  # two passes over 48 columns
        patch.setattr(sparsecore_rules, "times", times)
        patch.setattr(sparsecore_update, "_UNROLLED", 2)  # and a loop over the rest
        patch.setattr(sparsecore_update, "_AT_A_TIME", 2)
        patch.setattr(sparsecore, "_MOST_ROWS", CHUNK)
        for module in (sparsecore_sums, sparsecore_rules):
            patch.setattr(module, "_MOST_ENTRIES", CHUNK)
        patch.setattr(sparsecore_sums, "_workers_here", lambda: WORKERS)
        patch.setattr(sparsecore_sums, "on_subcores", on_cores if late == RACES else interpret)
        yield


def compiled(function, *operands, late):
    """Return a function that was traced for SparseCores, compiled for a CPU."""
    with interpreted(late), jax.sharding.use_abstract_mesh(mesh_of("TPU v6 lite")):
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cpu",))
        return lowered.compile()
