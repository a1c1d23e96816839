"""What the processes of one run tell each other: raise together, agree, leave, in which order."""

from tpu_embed.processes.messages import (
    Conversation,
    Order,
    agree_on,
    check_same,
    gather_bytes,
    gather_from_all,
    raise_on_all,
    who,
)

__all__ = [
    "Conversation",
    "Order",
    "agree_on",
    "check_same",
    "gather_bytes",
    "gather_from_all",
    "raise_on_all",
    "who",
]
