"""Read what users give as ids and check it on the host: containers, structure, weights, bad ids."""

from tpu_embed.core.ids import bad_ids, structure, weights
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype
from tpu_embed.core.ids.columns import (
    arrow_of,
    bags_of,
    dictionary_of,
    flat_column,
    with_missing,
)
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids, refuse_masked
from tpu_embed.core.ids.host_ids import (
    FeatureShape,
    HostIds,
    dense_shape,
    host_ids,
    part_of_feature,
)
from tpu_embed.core.ids.narrow import narrow_ids
from tpu_embed.core.ids.padding import pad_batch
from tpu_embed.core.ids.rescale import rescale_bags, rescale_dense_bags, rescale_flat_bags
from tpu_embed.core.ids.structure import Structure, children, flatten
from tpu_embed.core.ids.weights import is_real

__all__ = [
    "FeatureRules",
    "FeatureShape",
    "HostIds",
    "RaggedIds",
    "SparseIds",
    "Structure",
    "arrow_of",
    "bad_ids",
    "bags_of",
    "check_dtype",
    "children",
    "dense_shape",
    "dictionary_of",
    "flat_column",
    "flatten",
    "host_ids",
    "is_real",
    "narrow_ids",
    "pad_batch",
    "part_of_feature",
    "read_ids",
    "refuse_masked",
    "rescale_bags",
    "rescale_dense_bags",
    "rescale_flat_bags",
    "structure",
    "weights",
    "with_missing",
]
