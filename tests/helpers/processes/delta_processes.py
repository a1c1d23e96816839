"""What tests of deltas by key run in one process or in several; see `process_cases.py`."""

from pathlib import Path

import host_table_processes
import jax
import living_processes
import numpy as np
from process_cases import assert_same, told

from tpu_embed import io
from tpu_embed.io.delta import delta_files
from tpu_embed.processes import gather_from_all

STEPS = 4


def start(kind):
    """Return an engine, its first state, and the function that draws a part of a batch.

    Args:
      kind: "living", tables with keys on the devices; or "hosted", tables on the host.
    """
    if kind == "living":
        return *living_processes.start(), living_processes.draw_part
    return *host_table_processes.begin(0), host_table_processes.draw_part


def train(made, state, touched, draw_part, steps=STEPS):
    """Train some steps, and record each as features or as a placed batch."""
    for step in range(int(state.step), int(state.step) + steps):
        features = draw_part(step)
        batch = made.place(features)
        state = living_processes.train_step(made, state, batch)
        touched.record(features if step % 2 else batch, step + 1)
    return state


def edit(made, state, touched):
    """Set the rows of a key, and those of the first process's users."""
    keys, rows = made.vocabularies.keys("tags")
    values = np.full((1, made.table_configs["tags"].dim), 0.25, np.float32)
    state = made.set_rows(state, "tags", rows[:1], values)
    touched.record_rows("tags", None, int(state.step), keys=keys[:1])
    return state


def contents(path):
    """Return what a delta says."""
    delta = delta_files.read(Path(path))
    found = {}
    for name, one in delta.tables.items():
        found |= {f"{name} {part}": np.array(array) for part, array in one.arrays.items()}
    return found, (delta.since[1:], delta.version[1:], len(delta.ancestors))


def publish(kind, directory):
    """Train, write deltas, save with the record, and train on.

    Returns:
      What the deltas say; the error of a delta whose first step differs between processes.
    """
    made, state, draw_part = start(kind)
    touched = io.TouchedRows(made)
    state = train(made, state, touched, draw_part, steps=1)
    versions = [touched.version(state)]
    for n in range(2):
        state = edit(made, train(made, state, touched, draw_part), touched)
        path = f"{directory}/{kind} delta {n}"
        # A version of the first process serves all of them.
        since = io.Version(*gather_from_all("versions of a test", versions[-1])[0])
        versions.append(io.export_delta(path, made, state, touched, since))
        if n == 0:
            io.save(f"{directory}/{kind} recorded", made, state, touched=touched)
    assert versions[-1] == touched.version(state)
    older = versions[1 - jax.process_index()]
    path = f"{directory}/{kind} unlike"
    refused = told(io.export_delta, path, made, state, touched, older)
    return [contents(f"{directory}/{kind} delta {n}") for n in range(2)], refused


def go_on(kind, directory, name):
    """Restore the record, and train on; return what a delta since the very first one says.

    Args:
      kind: as for `start`.
      directory: where `publish` has written.
      name: of the new delta, which is written there.
    """
    made, _, draw_part = start(kind)
    touched = io.TouchedRows(made)
    state = io.restore(f"{directory}/{kind} recorded", made, touched=touched).state
    first = delta_files.read(Path(directory) / f"{kind} delta 0").since
    state = edit(made, train(made, state, touched, draw_part), touched)
    io.export_delta(f"{directory}/{name}", made, state, touched, first)
    return contents(f"{directory}/{name}")


def check(one, two, kind, published, deltas, later):
    """Check that deltas of two processes are those of one, also after a restart.

    Args:
      one, two: folders of what one process has written, and what two have.
      kind: as for `start`.
      published: what `publish` returned in one process.
      deltas: what it returned in each of the two.
      later: what `go_on` returned there, of what one process had saved.
    """
    assert published[1] is None
    for mine, (_, refused) in deltas:
        assert_same(mine, published[0])
        assert refused.startswith("since: expected the same in every process, got Version(run=")
        assert "; give what one version or export_delta returned to all" in refused
    expected = go_on(kind, one, "by one")
    assert expected[1][2] == 1
    assert expected[0]["tags lost"].size or kind == "hosted"
    for mine in (*later, go_on(kind, two, "by one")):
        assert_same(mine, expected)
