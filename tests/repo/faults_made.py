"""Faults that the package once had, for `faults.py`: each is put back by a change of its file.

Input: none. Output: `MADE`, a list of (file, text, text that it becomes, what was wrong).
"""

ADMITTER = "tpu_embed/core/engine/admitter.py"
HOST_IDS = "tpu_embed/core/ids/host_ids.py"
LAYOUT = "tpu_embed/core/layout/layout.py"
TIMELINE = "tpu_embed/vocabulary/timeline.py"

MADE = [
    (
        LAYOUT,
        "            for r in range(replicas)\n            for size in distinct",
        "            for r in range(1)\n            for size in distinct",
        "made: a device with one block more than the first has too little room",
    ),
    (LAYOUT, 'facts.append(("sum_blocks", f"{blocks}"))', "pass", "made: a batch for other blocks"),
    (TIMELINE, "if history != steps.history:", "if False:", "made: maps of two engines, outside"),
    (ADMITTER, " & (now[1] == steps.history)", "", "made: maps of two engines, in a jit"),
    (TIMELINE, "if history != self.history or not", "if False and not", "made: of other maps"),
    ("tpu_embed/_calls.py", "if program not in self._results:", "if True:", "made: given twice"),
    (HOST_IDS, "1000, 2**20\n", "10**9, 2**40\n", "made: one id at a far column takes all memory"),
    (ADMITTER, "if not batch.admitted:", "if False:", "made: a forgotten admit is quiet in a jit"),
    (
        ADMITTER,
        "refused, jnp.nan, one)",
        "refused, 0, one)",
        "made: refused rows look right",
    ),
    (ADMITTER, " | (now[2:] <= steps.first).all()", "", "made: a lookup batch is refused in a jit"),
    (
        "tpu_embed/core/ids/feature_ids.py",
        "with numbers from 2**53 on, whose last digits are gone",
        "with gaps",
        "made: the remedy for keys in floats leads on",
    ),
    (
        "tpu_embed/core/lookup/segments.py",
        "row_splits[1:] - 1, row_splits[:-1] < row_splits[1:]",
        "row_splits[1:] - 1, row_splits[:-1] <= row_splits[1:]",
        "made: an empty history ends with its neighbour's last value",
    ),
    (HOST_IDS, 'config.keep == "last":', 'config.keep == "":', 'made: keep="last" is not heard'),
    (
        "tpu_embed/data/prefetcher.py",
        'not 0 <= position["batches"] < 2**63',
        'position["batches"] < 0',
        "made: a position of 2**70 batches is taken",
    ),
]
