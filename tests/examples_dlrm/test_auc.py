"""The area under the ROC curve that the DLRM-DCNv2 example computes from histograms."""

import jax
import numpy as np
import pytest
from dlrm_cases import dlrm_model, exact_auc

EMPTY = dlrm_model.Auc.empty(4)


@jax.jit
def add(auc, logits, label):
    """Return the metric with three examples more, so that it is compiled once."""
    return auc.add(logits, label)


def test_auc_over_batches_and_devices_is_within_its_error():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2.0, size=(10, 800)).astype(np.float32)
    logits[0, :4] = [-np.inf, np.inf, -20.0, 20.0]
    label = (rng.random((10, 800)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    label[:, ::5] = -1
    spread = jax.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), jax.P("x"))
    count, auc = jax.jit(dlrm_model.Auc.add), dlrm_model.Auc.empty(2**16)
    for batch in zip(logits, label, strict=True):
        auc = count(auc, *jax.device_put(batch, spread))
    (value, most), real = auc.value(), label >= 0
    assert abs(value - exact_auc(logits[real], label[real])) <= most + 1e-12
    assert 0 < most < 1e-4
    assert int(auc.clicks.sum() + auc.others.sum()) == real.sum()


def test_auc_counts_a_pair_in_one_bin_half():
    auc = add(EMPTY, np.float32([1, 1, 9]), np.float32([1, 0, 0]))
    assert auc.value() == (0.25, 0.25)  # a pair in one bin, and a pair in the wrong order


def test_auc_counts_exactly_past_float32():
    clicks, others = np.uint32([0, 0, 2**31 + 2**25, 0]), np.uint32([1, 0, 0, 0])
    auc = EMPTY._replace(clicks=clicks, others=others)
    auc = add(auc, np.float32([1, 0, 0]), np.float32([1, -1, -1]))
    assert int(auc.clicks[2]) == 2**31 + 2**25 + 1
    assert auc.value() == (1.0, 0.0)


@pytest.mark.parametrize(
    ("label", "logit", "seen"),
    [(0.0, np.nan, "1 clicks, 0 others, 1 NaN logits"), (1.0, 1.0, "2 clicks, 0 others, 0 NaN")],
)
def test_auc_refuses(label, logit, seen):
    auc = add(EMPTY, np.float32([0, logit, logit]), np.float32([1, label, -1]))
    with pytest.raises(ValueError, match=seen):
        auc.value()
