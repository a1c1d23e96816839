"""The estimated time of a step: the bytes and the cycles, at the chip's speed."""

import jax
import numpy as np
import pytest

from tpu_embed import FeatureConfig, TableConfig, optimizers, planning
from tpu_embed.planning.compiled import Compiled, estimate
from tpu_embed.planning.profile import Operation, Profile

MOVED = {"gather": 819_000, "copy": 819_000}
PROFILE = Profile([Operation("sort", 1_750_000, 2, ""), Operation("add", 7, 1, "")], 3)


def compiled(topology):
    feature = FeatureConfig(TableConfig(1000, 16, name="films"))
    batch = jax.ShapeDtypeStruct((64, 2), np.int32)
    plan = planning.plan(feature, optimizers.SGD(0.1), topology, batch)
    return Compiled(plan, 1.0, 2, 3, 4, dict.fromkeys(MOVED, 1), MOVED, "HloModule")


def test_the_longest_bound_is_the_estimate():
    found = estimate(compiled("v6e:2x2"), PROFILE)
    assert found.bounds == {"memory": 1e-6, "TensorCore": 3_500_007 / 1.75e9}
    assert found.seconds == found.bounds["TensorCore"]
    text = found.explain()
    assert (
        "estimated time of a step: at least 2.000 ms, the bound by the TensorCore; nothing was"
        in text
    )
    assert "3,500,007 cycles by libtpu's profile at 1.75 GHz; 3 operation(s) not counted" in text
    assert "1.6 MiB moved at 1,638 GB/s" in text
    short = Profile(PROFILE.operations[1:], 0)
    assert estimate(compiled("v6e:2x2"), short).seconds == 1e-6
    assert "the bound by the memory" in estimate(compiled("v6e:2x2"), short).explain()


@pytest.mark.parametrize(("topology", "profile"), [("v5e:2x2", PROFILE), ("v6e:2x2", None)])
def test_cycles_that_are_not_known_are_left_out(topology, profile):
    found = estimate(compiled(topology), profile)
    assert list(found.bounds) == ["memory"]
    assert "TensorCore  not known" in found.explain()
    figures = found.figures()
    assert (figures["cycles"], figures["seconds"]) == (None, figures["bounds"]["memory"])


def test_a_chip_of_two_devices_shares_its_bandwidth():
    chips = planning.CHIPS
    assert estimate(compiled("tpu7x:1x1x1")).bandwidth * 2 == 7.38e12
    assert chips["v3"].bandwidth * chips["v3"].devices == 900
    assert {name for name, chip in chips.items() if chip.clock} == {"v5p", "v6e"}
