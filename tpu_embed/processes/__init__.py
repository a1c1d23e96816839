"""What the processes of one run tell each other: raise together, agree, leave, whose turn it is."""

from tpu_embed.processes.conversations import Conversation, Monologue, check_all_have_a_batch
from tpu_embed.processes.departures import listen
from tpu_embed.processes.messages import (
    FILES_SECONDS,
    WAIT_SECONDS,
    agree_on,
    check_same,
    exchange_bytes,
    gather_bytes,
    gather_from_all,
    own_state,
    raise_on_all,
)
from tpu_embed.processes.turns import Turns, new_turns

__all__ = [
    "FILES_SECONDS",
    "Conversation",
    "Monologue",
    "Turns",
    "WAIT_SECONDS",
    "agree_on",
    "check_all_have_a_batch",
    "check_same",
    "exchange_bytes",
    "gather_bytes",
    "gather_from_all",
    "listen",
    "new_turns",
    "own_state",
    "raise_on_all",
]
