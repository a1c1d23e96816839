"""The stateful API: one object holds the state and a queue of batches.

Input: batches of ids, then gradients. Output: activations; the tables change.
"""

from tpu_embed.stateful.tpu_embedding import TPUEmbedding

__all__ = ["TPUEmbedding"]
