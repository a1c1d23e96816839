"""The programs of `examples/published`: small runs on planted data, losses on 1 and 8 devices."""

import functools
import re
import sys

import jax
import numpy as np
import pytest
from example_cases import ROOT, load_from

PUBLISHED = ROOT / "configs" / "published"
ITEMS, USERS, GROUPS = 40, 96, 4
OF_HISTORIES = """
batch_size, epochs, evaluate_every, drawn = 32, 10, 5, 40
longest, dim, hidden, init_scale, learning_rate = 12, 16, 16, 0.1, 0.02
"""
OF_PAIRS = """
batch_size, epochs, drawn, longest, dim, hidden, learning_rate = 128, 8, 40, 10, 16, 16, 0.03
"""


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        yield


def run(main, arguments, numbers, config, tmp_path, monkeypatch, capsys):
    """Return the first number that a program prints of "test" and of "validation"."""
    small = tmp_path / config
    small.write_text((PUBLISHED / config).read_text() + numbers)
    monkeypatch.setattr(sys, "argv", ["program", *arguments, "--config", str(small)])
    monkeypatch.chdir(tmp_path)
    main()
    pattern = r"^(test|validation).* \S+@\d+ (\S+) NDCG"
    return dict(re.findall(pattern, capsys.readouterr().out, re.M))


def walks(rng):
    """Return histories in which item i is followed by i + 1, or by i + 2 every fifth time."""
    lengths = rng.integers(8, 20, size=USERS)
    return [(rng.integers(ITEMS) + np.cumsum(1 + (rng.random(n) < 0.2))) % ITEMS for n in lengths]


@pytest.mark.whole
@pytest.mark.parametrize("program", ["sasrec", "hstu"])
def test_the_next_item_is_found(program, tmp_path, monkeypatch, capsys):
    """Of 40 items, at least 20 of which are unseen, the best ten have the next one."""
    rows = walks(np.random.default_rng(0))
    lines = [" ".join(map(str, [user, *row + 1])) for user, row in enumerate(rows)]
    (tmp_path / "walks.txt").write_text("\n".join(lines))
    load_from("published", program, monkeypatch)
    module, name = {"sasrec": ("sasrec", "SASRec"), "hstu": ("hstu_network", "HSTU")}[program]
    network, config = getattr(sys.modules[module], name), f"{program}_amazon.py"
    main = functools.partial(sys.modules["reviews"].main, None, config, network)
    given = ["--data", "walks.txt"]
    found = run(main, given, OF_HISTORIES, config, tmp_path, monkeypatch, capsys)
    assert found.keys() == {"validation", "test"}
    assert float(found["test"]) > 0.8, found


@pytest.mark.whole
def test_times_decide(tmp_path, monkeypatch, capsys):
    """After an hour comes the next film, after a day the next but one: HSTU knows both times."""
    rng, lines = np.random.default_rng(1), []
    for user in range(USERS):
        film, when = rng.integers(ITEMS), 10**9
        for _ in range(rng.integers(8, 20)):
            late = rng.random() < 0.5
            film, when = (film + 1 + late) % ITEMS, when + (86_400 if late else 3_600)
            lines.append(f"{user + 1}::{film * 7 + 3}::{rng.integers(1, 6)}::{when}")
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    program = load_from("published", "ml1m_hstu", monkeypatch)
    monkeypatch.setattr(sys.modules["next_item"], "TOP", 1)
    given, numbers = ["--data", "ratings.dat"], OF_HISTORIES + "epochs = 25\n"
    found = run(program.main, given, numbers, "hstu_ml1m.py", tmp_path, monkeypatch, capsys)
    assert float(found["test"]) > 0.75, found  # 0.5 without the times


@pytest.mark.parametrize("program", ["factors", "towers"])
@pytest.mark.quick(1)
def test_unseen_places_of_a_group_are_found(program, tmp_path, monkeypatch, capsys):
    """A user has been to 14 of the 24 places of a group, and 4 others are the test.

    By chance, 20 of the 82 others hold a quarter of them.
    """
    rng = np.random.default_rng(2)
    chosen = [rng.permutation(24)[:18] + 24 * (user % GROUPS) for user in range(USERS)]
    for name, part in (("train", slice(12)), ("valid", slice(12, 14)), ("test", slice(14, 18))):
        lines = [" ".join(map(str, [user, *row[part]])) for user, row in enumerate(chosen)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    module, config = load_from("published", program, monkeypatch), f"{program}_gowalla.py"
    main = functools.partial(sys.modules["gowalla"].main, None, config, module.prepare)
    found = run(main, ["--data", "."], OF_PAIRS, config, tmp_path, monkeypatch, capsys)
    assert float(found["test"]) > 0.9, found
