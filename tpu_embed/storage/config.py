"""Declaration of a table that is at home on the host: how many of its rows the devices hold.

Input: what the user writes. Output: a frozen, validated object.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, get_args

from tpu_embed._checks import check_choice, check_int, local_path, refuse

EvictFromDevice = Literal["lru", "lfu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStorage:
    """Keep the rows of a table, and their slots, on the host, and the busy ones on the devices.

    Every row has its home on the host; `device_rows` of them have a place on the devices. A
    training batch brings its rows to the devices, and sends home those that it displaces.
    Activations and updates are, to the bit, those of a table that is wholly on the devices,
    whatever is given here. A row that no training batch has had takes no memory: it is drawn, as
    `init` draws it, when it is looked up. With a dynamic vocabulary, V is how many keys have a row
    at home; which keys have one is decided as if all V rows were on the devices.

    Args:
      device_rows: C, the rows that the devices hold together; a batch must find room for its
        distinct rows, and those of the `lookahead` batches before it.
      path: a folder on a fast local disk, for a scratch file that holds the rows; None: the host's
        memory holds them.
      evict: the row that goes home when a place is needed. "lru": the one that was seen longest
        ago; "lfu": the one that the fewest training batches have had since it came.
      groups: G, into how many groups ids are divided by a hash; each has its part of the rows on
        the devices, and a batch must find room in every group. None: as many as there are different
        sets of processes that hold shards of the table, so 1 in a single process.

    Raises:
      ValueError: an argument is outside its range; the path is a URL.

    Example:
      >>> HostStorage(device_rows=1_000_000).evict
      'lru'
    """

    device_rows: int
    path: str | None = None
    evict: EvictFromDevice = "lru"
    groups: int | None = None

    def __post_init__(self) -> None:
        rows = check_int("HostStorage.device_rows", self.device_rows, minimum=1)
        object.__setattr__(self, "device_rows", rows)
        check_choice("HostStorage.evict", self.evict, get_args(EvictFromDevice))
        if self.groups is not None:
            count = check_int("HostStorage.groups", self.groups, minimum=1)
            if count > rows:
                refuse(
                    "HostStorage.groups",
                    expected=f"at most {rows}, the device_rows",
                    got=f"{count}",
                )
            object.__setattr__(self, "groups", count)
        if self.path is not None:
            local_path(self.path, "HostStorage.path")
            object.__setattr__(self, "path", os.fspath(self.path))
