"""Shared by tests of the stateful API: a small configuration, batches, exact comparison."""

import jax
import numpy as np
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import optimizers as o

ITEM = tpu_embed.TableConfig(6, 2, name="item", combiner="sum")
USER = tpu_embed.TableConfig(5, 2, name="user", optimizer=o.Momentum(0.25), placement="div")
FEATURES = {
    "clicks": tpu_embed.FeatureConfig(ITEM, max_sequence_length=2),
    "shown": tpu_embed.FeatureConfig(ITEM),
    "user": tpu_embed.FeatureConfig(USER),
}


def mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("d",))


def make_embedding_of(feature_config, optimizer, devices: int = 2, **options):
    return tpu_embed.TPUEmbedding(feature_config, optimizer, mesh=mesh(devices), **options)


def make_embedding(**options) -> tpu_embed.TPUEmbedding:
    """Return a fresh embedding of `FEATURES` on two devices."""
    return make_embedding_of(FEATURES, o.Adagrad(0.5), **options)


def batch(number: int, size: int = 4):
    """Return the features of a batch; another number gives other ids."""
    rng = np.random.default_rng(number)
    return {
        "clicks": rng.integers(-1, 6, (size, 3)).astype(np.int32),
        "shown": rng.integers(-1, 6, (size, 2)).astype(np.int32),
        "user": rng.integers(0, 5, size).astype(np.int32),
    }


def gradients(activations):
    return jax.tree.map(lambda a: 2 * np.asarray(a) + 1, activations)


def train(embedding, numbers) -> None:
    """Enqueue, dequeue and update with one batch after the other."""
    for number in numbers:
        embedding.enqueue(batch(number))
        embedding.apply_gradients(gradients(embedding.dequeue()))


def snapshot(embedding):
    """Return, on the host, everything that an exception must leave unchanged."""
    return embedding.retrieve(), int(embedding.state.step), embedding.waiting


def at_64_bytes(array):
    """Return a copy in memory that JAX's CPU backend would use as its own."""
    array = np.asarray(array)
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def assert_same(a, b) -> None:
    """Assert that two nestings of arrays have the same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), where, strict=True)
