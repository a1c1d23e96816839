"""Read what the command line says of tables on the host: hit rates, samples, touched rows.

Input: texts such as `items=0.9`. Output: the arguments of `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.ids import structure
from tpu_embed.planning.host import count_hits
from tpu_embed.planning.host import HitRate


def read_options(
    feature_config: PyTree,
    *,
    hit_rates: Sequence[str],
    samples: Sequence[str],
    touched_rows: Sequence[str],
) -> tuple[dict[str, HitRate], dict[str, int]]:
    """Return `hit_rates` and `touched_rows` as `plan` takes them.

    Args:
      feature_config: as for `EmbeddingEngine`.
      hit_rates: `0.9`, for all tables on the host, or `TABLE=0.9`; later ones count.
      samples: `TABLE=FILE`, a file that `count_hits` reads. Its first batch fills the places on the
        devices and is not counted.
      touched_rows: `TABLE=ROWS`.

    Raises:
      ValueError: a text has another form, or `count_hits` refuses a file.
    """
    declared = structure.flatten(feature_config)
    named = zip(declared.table_names, declared.tables, strict=True)
    stored = {name: table.storage for name, table in named if table.storage is not None}
    rates: dict[str, HitRate] = {}
    for text in hit_rates:
        name, _, number = text.rpartition("=")
        rate = _number("--hit-rate", number, "a share such as 0.9, or TABLE=0.9")
        rates |= {name: rate} if name else dict.fromkeys(stored, rate)
    for text in samples:
        name, _, path = text.partition("=")
        if name not in stored or not path:
            expected = f"TABLE=FILE, of the tables on the host {sorted(stored)}"
            raise ValueError(message("--sample", expected=expected, got=text))
        rates[name] = count_hits(path, stored[name], warm_up=1)
    touched: dict[str, int] = {}
    for text in touched_rows:
        name, _, number = text.partition("=")
        touched[name] = int(_number("--touched", number, "TABLE=ROWS, such as items=1e9"))
    return rates, touched


def _number(option: str, text: str, expected: str) -> float:
    try:
        found = float(text)
        int(found)  # refuses what is not finite
    except (ValueError, OverflowError) as error:
        raise ValueError(message(option, expected=expected, got=text or "nothing")) from error
    return found
