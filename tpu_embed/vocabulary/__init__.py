"""Living vocabularies: keys that nobody knew yesterday get rows of a table, and lose them again."""

from tpu_embed.kernels.vocabulary_reference import COUNTERS, MapState, Taken
from tpu_embed.vocabulary.config import DynamicVocabulary
from tpu_embed.vocabulary.fixed import FixedVocabulary
from tpu_embed.vocabulary.map import VocabularyMap
from tpu_embed.vocabulary.states import fit

__all__ = [
    "COUNTERS",
    "DynamicVocabulary",
    "FixedVocabulary",
    "MapState",
    "Taken",
    "VocabularyMap",
    "fit",
]
