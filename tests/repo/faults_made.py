"""Faults that the package once had, for `faults.py`: each is put back by a change of its file.

Input: none. Output: `MADE`, a list of (file, text, text that it becomes, what was wrong).
"""

_ADMITTER = "tpu_embed/core/engine/admitter.py"
_TIMELINE = "tpu_embed/vocabulary/timeline.py"
_PLACED_FOR = "tpu_embed/core/layout/layout.py"

MADE = [
    (
        "tpu_embed/core/layout/layout.py",
        "            for r in range(replicas)\n            for size in distinct",
        "            for r in range(1)\n            for size in distinct",
        "made: a device with one block more than the first has too little room",
    ),
    (
        _TIMELINE,
        "if history != steps.history:",
        "if False:",
        "made: the maps of two engines pass for each other outside a jit",
    ),
    (
        _ADMITTER,
        "(steps.first <= now[0]) & (now[1] == steps.history)",
        "steps.first <= now[0]",
        "made: the maps of two engines pass for each other in a jit",
    ),
    (
        _TIMELINE,
        "if history != self.history or not self._holds(keys):",
        "if False:",
        "made: admit takes a batch of other maps",
    ),
    (
        _PLACED_FOR,
        '        facts.append(("sum_blocks", f"{blocks}"))',
        "        pass",
        "made: a batch placed for other blocks is taken",
    ),
    (
        "tpu_embed/_calls.py",
        "if program not in self._results:",
        "if True:",
        "made: what was interrupted gives arrays away twice",
    ),
    (
        "tpu_embed/core/ids/host_ids.py",
        "_PLACES_PER_ID, _FEW_PLACES = 1000, 2**20",
        "_PLACES_PER_ID, _FEW_PLACES = 10**9, 2**40",
        "made: one id at a far column takes all memory",
    ),
    (_ADMITTER, "if not batch.admitted:", "if False:", "made: a forgotten admit is quiet in a jit"),
    (
        _ADMITTER,
        "jnp.where(refused, jnp.nan, one)",
        "jnp.where(refused, 0, one)",
        "made: refused activations look like an answer",
    ),
    (
        _ADMITTER,
        " | (now[2:] <= steps.first).all()",
        "",
        "made: a lookup batch is refused in a jit though no row was taken",
    ),
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
    (
        "tpu_embed/core/ids/host_ids.py",
        'if config.keep == "last":',
        'if config.keep == "":',
        'made: keep="last" is not heard',
    ),
    (
        "tpu_embed/data/prefetcher.py",
        'not 0 <= position["batches"] < 2**63',
        'position["batches"] < 0',
        "made: a position of 2**70 batches is taken",
    ),
]
