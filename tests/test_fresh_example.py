"""The example of a model that stays fresh: both processes, killed and started again too."""

import pytest
from example_cases import ROOT, numbers, run

CONFIG = (ROOT / "configs" / "stream.py").read_text()
SMALL = """
births, lifetime, users, rows, batch_size = 20, 30, 50, 300, 512
"""


@pytest.mark.parametrize("kills", [0, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.whole
def test_a_server_that_follows_scores_better_than_one_of_full_exports(tmp_path, kills):
    config = tmp_path / "small.py"
    config.write_text(CONFIG + SMALL)
    batches = 2_000 if kills else 200
    given = ["--config", config, "--batches", batches, "--every", 20, "--full", 100]
    out = run("fresh.py", *given, "--kills", kills, cwd=tmp_path)
    assert numbers(r"(\S+) by deltas", out)[0] > numbers(r"(\S+) by full", out)[0] + 0.005
    assert numbers(r"(\d+) times with the trainer's keys", out) == batches // 20
    assert numbers(r"(\d+) kills", out) == kills
