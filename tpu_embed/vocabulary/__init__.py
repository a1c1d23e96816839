"""Dynamic vocabularies: keys that nobody knew yesterday get rows, and lose them again."""

from tpu_embed.kernels.vocabulary_reference import (
    COUNTERS,
    MapState,
    Taken,
    empty_state,
)
from tpu_embed.vocabulary.batch_keys import (
    BatchKeys,
    KeyedRows,
    MapStates,
    NewOwners,
    ValidSteps,
    check_vocabulary,
    map_version,
    states_to_load,
)
from tpu_embed.vocabulary.config import (
    DynamicVocabulary,
    KeyTable,
    check_lookahead,
)
from tpu_embed.vocabulary.map import FixedVocabulary, RowMoves, VocabularyMap, fit_rows
from tpu_embed.vocabulary.table_maps import (
    QUANTILES,
    FoundKeys,
    KeyChanges,
    KeyScores,
    Moves,
    describe_keys,
)
from tpu_embed.vocabulary.timeline import Pin
from tpu_embed.vocabulary.vocabularies import (
    Vocabularies,
    choose_vocabularies,
    load_together,
    read_keys,
)

__all__ = [
    "COUNTERS",
    "QUANTILES",
    "BatchKeys",
    "DynamicVocabulary",
    "FixedVocabulary",
    "FoundKeys",
    "KeyChanges",
    "KeyScores",
    "KeyTable",
    "KeyedRows",
    "MapState",
    "MapStates",
    "Moves",
    "NewOwners",
    "Pin",
    "RowMoves",
    "Taken",
    "ValidSteps",
    "Vocabularies",
    "VocabularyMap",
    "check_lookahead",
    "check_vocabulary",
    "choose_vocabularies",
    "describe_keys",
    "empty_state",
    "fit_rows",
    "load_together",
    "map_version",
    "read_keys",
    "states_to_load",
]
