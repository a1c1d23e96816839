"""Run the examples at small size, each in its own process, on 1 and on 8 emulated devices."""

import dataclasses
import re
import types

import numpy as np
import pytest
from example_cases import EXAMPLES, ROOT, load, numbers, run, table

USERS, ITEMS, RATINGS = 30, 50, 800
GENRES = ("Action", "Comedy", "Drama")
PEOPLE = [(u + 1, 10 + 2 * u, "FM"[u % 2], ("writer", "doctor")[u % 2], 0) for u in range(USERS)]
TOWERS = (ROOT / "configs" / "two_tower.py").read_text() + "\nbatch_size, epochs = 80, 3\n"
CONFIG = (ROOT / "configs" / "movielens.py").read_text() + "\nbatch_size, epochs = 80, 3\n"


def test_quickstart(tmp_path):
    out = run("quickstart.py", cwd=tmp_path)
    functional = numbers(r"loss (\S+) by functions", out)
    assert len(functional) == 5
    assert (np.diff(functional) < 0).all()
    np.testing.assert_array_equal(functional, numbers(r"(\S+) by enqueue", out))


@pytest.mark.whole
def test_ads(tmp_path):
    """A second run finds the first one finished, and predicts the same."""
    first = run("ads.py", cwd=tmp_path)
    assert numbers(r"test set: (\S+)", first)[0] > 0.78  # the best that is possible has 0.85
    assert run("ads.py", cwd=tmp_path).splitlines()[-2:] == first.splitlines()[-2:]


@pytest.mark.whole
def test_custom_loop(tmp_path):
    out = run("custom_loop.py", "--steps", 40, "--batch-size", 256, "--devices", 8, cwd=tmp_path)
    first, last = numbers(r"(\S+) at (?:first|last)", out)
    assert last < first


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 8])
def test_candidates(devices, tmp_path):
    """A user once, many candidates: what is served is what the last step of training knew."""
    out = run("candidates.py", "--steps", 150, "--devices", devices, cwd=tmp_path)
    learned, best = numbers(r"(?:first:|preferences) (\S+?),?\s", out)
    assert 0.2 < learned < best  # 1 / 32 by chance
    assert re.search(r"user \d+ gets( \d+){5}$", out.strip())


@pytest.fixture(scope="module")
def ratings():
    """Return columns (user, item, rating, second): what a user makes of an item, rounded."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(USERS, size=RATINGS), rng.integers(ITEMS, size=RATINGS)
    liked, harsh = rng.normal(size=ITEMS), rng.normal(size=USERS)
    rating = np.clip(np.round(3 + liked[item] - harsh[user]), 1, 5).astype(int)
    return np.stack([user + 1, item + 1, rating, 880_000_000 + np.arange(RATINGS)], axis=1)


@pytest.fixture(scope="module")
def directory(ratings, tmp_path_factory):
    """Return a directory in the form that the wheel holds."""
    path = tmp_path_factory.mktemp("ml")
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    table(path / "ml-100k.inter", header, ratings, "\t")
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
    items = [(i + 1, f"Title {i}", 1930 + i, " ".join(GENRES[: 1 + i % 3])) for i in range(ITEMS)]
    table(path / "ml-100k.item", header, items[::-1], "\t")
    header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
    table(path / "ml-100k.user", header, PEOPLE, "\t")
    return path


def test_movielens_data_reads_both_forms(directory, ratings, tmp_path, monkeypatch):
    """The wheel's, and that of the original archive, whose films have 19 flags for genres."""
    table(tmp_path / "u.data", "", ratings, "\t")
    flags = np.zeros((ITEMS, 19), int)
    for i in range(ITEMS):
        flags[i, [1, 5, 8][: 1 + i % 3]] = 1
    items = [(i + 1, f"Title {i}", f"01-Jan-{1930 + i}", "", "", *flags[i]) for i in range(ITEMS)]
    table(tmp_path / "u.item", "", items, "|")
    table(tmp_path / "u.user", "", PEOPLE, "|")
    module = load("movielens_data", monkeypatch)
    ours, theirs = (dataclasses.asdict(module.load(path)) for path in (directory, tmp_path))
    for name, column in ours.items():
        np.testing.assert_array_equal(column, theirs[name], err_msg=name)
    assert ours["decade"][[0, 20, 49]].tolist() == [1, 3, 5]
    assert ours["age"][:5].tolist() == [0, 0, 0, 0, 1]  # 10, 12, 14, 16 | 18
    train, test = module.load(directory).split(seed=0)
    assert sorted([*train, *test]) == list(range(RATINGS))
    some = module.load(directory).only(test)
    np.testing.assert_array_equal(some.timestamp, ours["timestamp"][test])
    assert len(some.user) == len(some.rating) == len(test)
    with pytest.raises(SystemExit, match=r"expected ml-100k.inter or u.data"):
        module.load(EXAMPLES)


def train(example, text, directory, folder, devices, *options):
    """Return what an example prints that reads the ratings, with a config of this text."""
    config = folder / "small.py"
    config.write_text(text)
    given = ["--devices", devices, "--data", directory, "--config", config, *options]
    return run(example, *given, cwd=folder)


@pytest.mark.whole
def test_movielens_learns_the_same_on_1_and_8_devices(directory, tmp_path):
    curves = []
    for devices in (1, 8):
        out = train("movielens.py", CONFIG, directory, tmp_path, devices)
        assert f"{devices} device(s), 640 ratings" in out
        curves.append(numbers(r"test RMSE (\S+)  ", out))
    assert len(curves[0]) == 3
    assert curves[0][-1] < curves[0][0]
    # The tower's gradients are summed over devices in another order: the last printed digit.
    np.testing.assert_allclose(curves[0], curves[-1], atol=2e-4)
    assert (tmp_path / "build" / "movielens.png").stat().st_size > 1000


@pytest.mark.whole
def test_two_tower_learns_the_same_on_1_and_8_devices(directory, tmp_path):
    losses = []
    for devices in (1, 8):
        out = train("two_tower.py", TOWERS, directory, tmp_path, devices)
        assert f"{devices} device(s), 640 ratings" in out
        losses.append(numbers(r"loss (\S+)  ", out))
        recalls = numbers(r"recall@50 (\S+)", out)
        assert len(recalls) == 4  # of popularity, then of every epoch
        assert ((recalls > 0) & (recalls <= 1)).all()
    assert losses[0][-1] < losses[0][0]
    # Sums over the batch are in another order: Adam's steps differ in their last digits.
    np.testing.assert_allclose(*losses, atol=1e-3)


@pytest.mark.whole
def test_two_tower_predicts_the_last_rating(directory, tmp_path):
    out = train("two_tower.py", TOWERS, directory, tmp_path, 1, "--leave-one-out")
    assert f"1 device(s), {RATINGS - USERS} ratings" in out
    for name in ("recall", "NDCG"):
        found = numbers(rf"{name}@10 (\S+)", out)
        assert len(found) == 4  # of popularity, then of every epoch
        assert ((found > 0) & (found <= 1)).all()


def test_items_by_user_and_by_popularity(monkeypatch):
    ranking = load("ranking", monkeypatch)
    user, item = np.array([2, 0, 2, 0, 3]), np.array([4, 1, 1, 2, 1])
    seen = ranking.by_user(user, item, 4)
    assert seen.tolist() == [[1, 2], [-1, -1], [4, 1], [1, -1]]
    # Three users have item 1, one each items 2 and 4, none items 0 and 3.
    best = ranking.most_popular(seen, 5, 2)
    assert best.tolist() == [[4, 0], [1, 2], [2, 0], [2, 4]]
    assert ranking.most_popular(seen, 5, 4)[0].tolist() == [4, 0, 3, -1]
    # User 0 finds one of two at the first place, user 1 none of one.
    text = ranking.describe(best, np.array([[4, 3], [0, -1], [-1, -1], [-1, -1]]))
    first = 1 / (1 + 1 / np.log2(3))
    assert text == f"recall@2 0.2500  NDCG@2 {first / 2:.4f}"


def test_the_last_rating_of_each_user_is_left_out(monkeypatch):
    user, timestamp = np.array([1, 0, 1, 0, 1, 2]), np.array([5, 9, 5, 3, 4, 1])
    data = types.SimpleNamespace(user=user, timestamp=timestamp)
    rest, last = load("ranking", monkeypatch).leave_one_out(data)
    assert (rest.tolist(), last.tolist()) == ([3, 4, 0], [1, 2, 5])
