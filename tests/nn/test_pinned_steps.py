"""`pinned_steps.py`: a batch that is placed late has the rows of the step that was noted early."""

import numpy as np
from living_cases import ids, simple, train_once

from tpu_embed.nn.pinned_steps import PinnedSteps


def late(made, step):
    """Return the step and the rows of a lookup of the keys 1 and 3 that is placed now."""
    batch = made.next_turn(training=False).place(ids(1, 3), as_of=step)
    rows = {} if not batch.keys.tables else batch.keys.tables["t"].rows[0].tolist()
    return batch.valid_steps.tolist()[0], rows


def test_rows_of_a_noted_step_are_found_until_it_is_freed():
    made, state = simple(capacity=2)
    state = train_once(made, state, 1, 2)
    row = int(made.vocabularies.find("t", [1])[0])
    one, two = (PinnedSteps([made.vocabularies]) for _ in range(2))
    assert one.steps == two.steps == {made.vocabularies: 1}
    for keys in ((3, 4), (5, 3)):
        state = train_once(made, state, *keys)
    one.free()
    one.free()
    # At step 1 the key 1 had its row and 3 had none; now it is the other way round.
    assert late(made, two.steps[made.vocabularies]) == (1, [row, -1])
    two.free()
    step, rows = late(made, 1)  # what was done since is forgotten
    assert step == 3
    assert rows[0] == -1
    assert rows[1] >= 0
    np.testing.assert_array_equal(made.vocabularies.find("t", [1, 3]), rows)
