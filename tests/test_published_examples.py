"""The programs of `examples/published`: small runs on planted data, losses on 1 and 8 devices."""

import functools
import re
import sys

import jax
import numpy as np
import pytest
from example_cases import ROOT, config_of, load_from
from facade_cases import mesh
from flax import nnx

import tpu_embed

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


def test_some_places_of_a_user(monkeypatch):
    """Of a user with five places, three stand one after another in the ring of all five."""
    towers = load_from("published", "towers", monkeypatch)
    item, begin = np.arange(10, 17, dtype=np.int32), np.array([0, 2, 7])
    visits = sys.modules["gowalla"].Visits(np.repeat([0, 1], [2, 5]), item, begin, np.zeros(2), 17)
    rng = np.random.default_rng(0)

    def drawn(most):
        found = towers.some_places(visits, np.array([1, 0]), most, rng)
        return [tuple(row.tolist()) for row in np.split(found.values, found.row_splits[1:-1])]

    ring = [12, 13, 14, 15, 16, 12, 13]
    assert {drawn(3)[0] for _ in range(50)} == {tuple(ring[n : n + 3]) for n in range(5)}
    assert {tuple(sorted(drawn(5)[0])) for _ in range(5)} == {(12, 13, 14, 15, 16)}
    assert {tuple(sorted(drawn(3)[1])) for _ in range(5)} == {(10, 11)}


@pytest.mark.whole
def test_20_losses_on_1_and_8_devices(monkeypatch):
    """Dropout drops the same; only the sums of the network's gradients are in another order."""
    sasrec = load_from("published", "sasrec", monkeypatch)
    module, histories = sys.modules["next_item"], sys.modules["histories"]
    config = config_of((PUBLISHED / "sasrec_amazon.py").read_text())
    vars(config).update(batch_size=16, epochs=4, drawn=40, longest=12, dim=8, hidden=8)
    rows = [row.astype(np.int32) for row in walks(np.random.default_rng(3))]
    whole, sgd = histories.Histories(rows, ITEMS), tpu_embed.optimizers.SGD
    monkeypatch.setattr(tpu_embed.optimizers, "Adam", lambda rate, **_: sgd(0.05))
    runs = []
    for devices in (1, 8):
        engine, losses = module.make_engine(config, whole, mesh(devices)), []
        module.train(
            module.NextItem(config, engine),
            whole,
            sasrec.SASRec(config, nnx.Rngs(0)),
            steps=20,
            report_every=1,
            callback=lambda report, losses=losses: losses.append(report.loss),
            progress=False,
        )
        runs.append(losses[:20])
    assert runs[0][-1] < runs[0][0]
    np.testing.assert_allclose(*runs, rtol=1e-6)
