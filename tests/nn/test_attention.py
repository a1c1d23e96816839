"""Attention over jagged sequences against loops in float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.nn import jagged_attention, on_each_replica
from tpu_embed.nn.attention import time_bucket

HEADS, D, P, T, LONGEST = 2, 3, 9, 6, 10
CASES = {  # lengths, how many of them are candidates, N, W
    "several blocks": ([7, 0, 13, 1, 0, 4], [0] * 6, 29, 4),
    "an end that no example has": ([5, 0, 6], [0] * 3, 23, 4),
    "one block": ([3, 2], [0] * 2, 5, 8),
    "blocks without examples": ([2, 0], [0] * 2, 17, 4),
    "candidates": ([9, 0, 3, 8], [4, 0, 3, 1], 22, 4),
    "candidates of several blocks": ([14, 12], [11, 12], 26, 4),
    "nothing at all": ([0, 0], [0] * 2, 6, 4),
}
BUCKETS = {  # of times: of JAX's integers, and of Python's
    "log₂": (time_bucket, lambda x: max(x, 1).bit_length() - 1),
    "sevens": (lambda x: jnp.maximum(x, 0) // 7, lambda x: max(x, 0) // 7),
}


def case_of(lengths, candidates, events):
    """Return what is differentiated, a cotangent, and the rest of the arguments."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (events, HEADS, D)) | {"position": (HEADS, P), "time": (HEADS, T)}
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given = rng.normal(size=(events, HEADS, D)).astype(np.float32)
    times = np.sort(rng.integers(0, 60, events)).astype(np.int32)
    asked = times + rng.integers(0, 20, events).astype(np.int32)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flags = np.zeros(events, bool)
    for end, count in zip(splits[1:], candidates, strict=True):
        flags[end - count : end] = True
    about = {"splits": splits, "times": times, "query_times": asked, "candidate": flags}
    return inputs, given, about


def attend(inputs, **options):
    biases = {"position_bias": inputs["position"], "time_bias": inputs["time"]}
    return jagged_attention(*(inputs[n] for n in "qkv"), longest=LONGEST, **biases, **options)


def pairs(lengths, candidates):
    """Yield query, key and their distance: candidates are the last events of their example."""
    begin = 0
    for length, count in zip(lengths, candidates, strict=True):
        history = begin + length - count
        for query in range(begin, begin + length):
            for key in range(begin, query + 1):
                if key < history or key == query:
                    yield query, key, min(query, history) - min(key, history)
        begin += length


def attention_by_loops(inputs, given, lengths, candidates, asked, times, bucket_of):
    """Return results and gradients, by a loop over pairs of events.

    Args:
      inputs: `q`, `k`, `v` [N, heads, d], `position` [heads, P], `time` [heads, T], float64.
      given: the gradient of the results, [N, heads, d].
      lengths, candidates: of each example, how many events it has, and how many are candidates.
      asked, times: integers [N], when a query attends, and when a key happened.
      bucket_of: the bucket of the time between key and query, before the last one takes the rest.
    """
    q, k, v, position, time = (inputs[name] for name in ("q", "k", "v", "position", "time"))
    out = np.zeros_like(v)
    gradients = {name: np.zeros_like(x) for name, x in inputs.items()}
    for i, j, distance in pairs(lengths, candidates):
        place = min(distance, P - 1)
        bucket = min(bucket_of(int(asked[i]) - int(times[j])), T - 1)
        score = (q[i] * k[j]).sum(-1) + position[:, place] + time[:, bucket]  # [heads]
        sigmoid = 1 / (1 + np.exp(-score))
        weight = (score * sigmoid / LONGEST)[:, None]  # SiLU
        out[i] += weight * v[j]
        gradients["v"][j] += weight * given[i]
        slope = sigmoid * (1 + score * (1 - sigmoid)) / LONGEST
        of_score = slope * (given[i] * v[j]).sum(-1)
        gradients["q"][i] += of_score[:, None] * k[j]
        gradients["k"][j] += of_score[:, None] * q[i]
        gradients["position"][:, place] += of_score
        gradients["time"][:, bucket] += of_score
    return out, gradients


@pytest.mark.parametrize(
    ("name", "buckets"), [*((name, "log₂") for name in CASES), ("several blocks", "sevens")]
)
@pytest.mark.quick(4)
def test_attention_is_that_of_loops(name, buckets):
    bucket, bucket_of = BUCKETS[buckets]
    lengths, candidates, events, block = CASES[name]
    inputs, given, about = case_of(lengths, candidates, events)

    @jax.jit
    def both(inputs, given, about):
        options = about | {"block": block, "time_bucket": bucket}
        out, pull = jax.vjp(lambda x: attend(x, **options), inputs)
        return out, pull(given)[0]

    out, gradients = both(inputs, given, about)
    wide = {key: x.astype(np.float64) for key, x in inputs.items()}
    rest = candidates, about["query_times"], about["times"], bucket_of
    expected, wanted = attention_by_loops(wide, given, lengths, *rest)
    # Sums of at most 14 · 29 products of 3 in float32.
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert not np.any(np.asarray(out)[sum(lengths) :])
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[key], atol=1e-5, err_msg=key)


def test_times_are_asked_for():
    inputs, _, about = case_of([4], [0], 4)
    with pytest.raises(ValueError, match=r"times: expected int32 \[N\] with a time_bias, got None"):
        attend(inputs, splits=about["splits"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_each_replica_takes_what_lies_elsewhere(kind):
    """Arrays that are whole on every device are split, and what is shared is not."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    features = {"x": FeatureConfig(TableConfig(8, 2, name="t"))}
    engine = EmbeddingEngine(features, mesh=mesh)

    @jax.jit
    def sums(shared):
        each = on_each_replica(engine, lambda shared, number: shared.sum() + number)
        return each(shared, jnp.arange(8.0))

    assert sums(jnp.ones(4)).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
