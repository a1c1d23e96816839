"""What the processes of one run tell each other: raise together, agree, leave, whose turn it is."""

from tpu_embed.processes.departures import client, listen
from tpu_embed.processes.messages import (
    FILES_SECONDS,
    WAIT_SECONDS,
    agree_on,
    check_all_have_a_batch,
    check_same,
    exchange,
    exchange_bytes,
    gather_bytes,
    gather_from_all,
    raise_on_all,
    raise_refusals,
    refusal_of,
)
from tpu_embed.processes.turns import Turns, turns_of

__all__ = [
    "FILES_SECONDS",
    "Turns",
    "WAIT_SECONDS",
    "agree_on",
    "check_all_have_a_batch",
    "check_same",
    "client",
    "exchange",
    "exchange_bytes",
    "gather_bytes",
    "gather_from_all",
    "listen",
    "raise_on_all",
    "raise_refusals",
    "refusal_of",
    "turns_of",
]
