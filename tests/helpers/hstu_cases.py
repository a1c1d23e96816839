"""HSTU attention as loops in float64 over examples, events and heads."""

import numpy as np


def silu_and_slope(x):
    """Return SiLU of a number, and its derivative."""
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


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


def log2_bucket(elapsed):
    return max(elapsed, 1).bit_length() - 1


def attention_by_loops(
    inputs, given, lengths, candidates, asked, times, longest, bucket_of=log2_bucket
):
    """Return results and gradients.

    Args:
      inputs: `q`, `k`, `v` [N, heads, d], `position` [heads, P], `time` [heads, T], float64.
      given: the gradient of the results, [N, heads, d].
      lengths, candidates: of each example, how many events it has, and how many are candidates.
      asked, times: integers [N], when a query attends, and when a key happened.
      longest: L.
      bucket_of: the bucket of the time between key and query, before the last one takes the rest.
    """
    q, k, v, position, time = (inputs[name] for name in ("q", "k", "v", "position", "time"))
    out = np.zeros_like(v)
    gradients = {name: np.zeros_like(x) for name, x in inputs.items()}
    for i, j, distance in pairs(lengths, candidates):
        place = min(distance, position.shape[1] - 1)
        bucket = min(bucket_of(int(asked[i]) - int(times[j])), time.shape[1] - 1)
        for h in range(q.shape[1]):
            score = q[i, h] @ k[j, h] + position[h, place] + time[h, bucket]
            weight, slope = (x / longest for x in silu_and_slope(score))
            out[i, h] += weight * v[j, h]
            gradients["v"][j, h] += weight * given[i, h]
            of_score = slope * (given[i, h] @ v[j, h])
            gradients["q"][i, h] += of_score * k[j, h]
            gradients["k"][j, h] += of_score * q[i, h]
            gradients["position"][h, place] += of_score
            gradients["time"][h, bucket] += of_score
    return out, gradients
