"""Read what users give as ids and check it on the host: containers, structure, weights, bad ids."""

from tpu_embed.core.ids import structure
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids, refuse_masked
from tpu_embed.core.ids.feature_ids import (
    FeatureRules,
    FeatureShape,
    HostIds,
    check_dtype,
    dense_shape,
    narrow_ids,
    part_of_feature,
)
from tpu_embed.core.ids.gains import gains_in_program, host_gains, is_real
from tpu_embed.core.ids.host_ids import (
    check_coordinates,
    check_row_splits,
    host_ids,
    shift_rows,
)
from tpu_embed.core.ids.keys import (
    batch_order,
    give_rows,
    hash_ids,
    looked_up,
    split_keys,
)
from tpu_embed.core.ids.padding import (
    collect_leaves,
    count_rows,
    pad_batch,
    rebuild_nest,
)
from tpu_embed.core.ids.structure import Structure

__all__ = [
    "FeatureRules",
    "FeatureShape",
    "HostIds",
    "RaggedIds",
    "SparseIds",
    "Structure",
    "batch_order",
    "check_coordinates",
    "check_dtype",
    "check_row_splits",
    "collect_leaves",
    "count_rows",
    "dense_shape",
    "gains_in_program",
    "give_rows",
    "hash_ids",
    "host_gains",
    "host_ids",
    "is_real",
    "looked_up",
    "narrow_ids",
    "pad_batch",
    "part_of_feature",
    "read_ids",
    "rebuild_nest",
    "refuse_masked",
    "shift_rows",
    "split_keys",
    "structure",
]
