"""Another name of `hash_ids`, which `tpu_embed` itself has too.

Input: keys, strings or large integers. Output: ids.
"""

from tpu_embed.core.ids import hash_ids

__all__ = ["hash_ids"]
