"""Several processes save together in a bucket, and are told together."""

import bucket_fixtures
import bucket_processes
import numpy as np
import pytest
from process_runs import run

bucket, upstream = bucket_fixtures.bucket, bucket_fixtures.upstream


@pytest.mark.quick(1)
def test_two_processes_save_together(bucket, tmp_path_factory):
    url, _ = bucket
    cache = str(tmp_path_factory.mktemp("cache"))
    calls = [(bucket_processes.saved_and_restored, url)]
    calls += [(bucket_processes.published, f"{url}-served", cache)]
    found = run(2, tmp_path_factory.mktemp("two"), calls)
    for (rows, whole, position, steps, told), (trained, served) in found:
        np.testing.assert_array_equal(trained[0], served["a"])
        np.testing.assert_array_equal(trained[1], served["b"])
        for before, after in zip(rows[:2], rows[2:], strict=True):
            np.testing.assert_array_equal(before, after)
        assert whole
        assert position == 3
        assert steps == [2, 3]
        assert "no space left" in told
    assert bucket_fixtures.roots(url) == {"2", "3", "commits"}
