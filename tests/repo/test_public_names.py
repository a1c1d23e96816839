"""The public names of the package: none is added, renamed or lost without a change here."""

import importlib

import pytest

NAMES = {
    "tpu_embed": (
        "Batch BatchSpec DynamicVocabulary EmbeddingEngine FeatureConfig FixedVocabulary "
        "HostStorage IndexedSlices Jagged QuantizationConfig "
        "RaggedIds RowIdInitializer ShardInfo SparseIds Stop TPUEmbedding TableConfig TableState "
        "embedding_lookup fit hash_ids initializers ngram_ids optimizers pad_batch sparse_grad "
        "sparse_value_and_grad split_activations training"
    ),
    "tpu_embed.check": "PARTS PartReport run_parts",
    "tpu_embed.data": ("EventValues Place Prefetcher balance_replicas place_values reorder_batch"),
    "tpu_embed.io": (
        "CheckpointManager FollowingModel ModuleCheckpointManager QuantizedTable Restored "
        "ServedModel TouchedRows Version apply_delta export_delta export_model follow "
        "host_table load_model publish quantize_rows restore restore_modules save "
        "save_modules serving_lookup"
    ),
    "tpu_embed.loop": "Best Report fit",
    "tpu_embed.metrics": (
        "auc batch_statistics counters ndcg_at_k normalized_entropy recall_at_k table_statistics "
        "vocabulary_scalars vocabulary_statistics write_scalars"
    ),
    "tpu_embed.nn": (
        "ActivationGradient Activations Counter Embed EmbeddingBag Embeddings MapVersion Slot "
        "Table TableGradients admit apply_table_gradients fused_value_and_grad "
        "jagged_attention on_each_replica place sparse_value_and_grad"
    ),
    "tpu_embed.optimizers": (
        "Adadelta Adagrad AdagradMomentum Adam CenteredRMSProp CustomOptimizer FTRL LAMB "
        "LearningRateKind Lion Momentum OptaxOptimizer ProximalAdagrad RMSProp RowOptimizer "
        "RowWiseAdagrad SGD SlotShape TableOptimizer Yogi as_table_optimizer learning_rate_kind "
        "row_mean row_norm row_sum"
    ),
    "tpu_embed.initializers": (
        "RowIdInitializer ShardInfo TruncatedNormal VarianceScaling check resolve "
        "variance_scaling wants_shard_info"
    ),
    "tpu_embed.planning": (
        "CHIPS Chip HitCount HostPlan Plan TablePlan Topology count_hits plan resolve"
    ),
    "tpu_embed.retrieval": (
        "TopK counted_log_q in_batch_softmax keyed_rows keys_of log_uniform_log_q sampled_softmax "
        "top_k"
    ),
    "tpu_embed.training": (
        "AggregationMethod CrossShardOptimizer IndexedSlices OptState Optimizer Tag TreeOptimizer "
        "UnconnectedGradients clip_by_global_norm create_dummy_table_variables cross_shard "
        "get_gradients_through_compute_gradients get_gradients_through_dummy_table_variables "
        "global_norm gradients hook is_indexed_slices scale tag"
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module].split())
    assert all(hasattr(found, name) for name in found.__all__)
