"""Models with keys that follow a run by deltas, while threads ask them."""

import concurrent.futures
import threading

import jax
import numpy as np
import pytest
from interrupt_cases import Interrupt, ends_within, from_a_signal
from keyed_cases import Keyed, changed_rows, export, looked_up, table, version, write_delta

from tpu_embed import FeatureConfig, TableConfig, io
from tpu_embed.io import Version
from tpu_embed.io.serving import served_tables

CONFIG = table("t", size=500, dim=4, unseen="shared")
PLAIN = TableConfig(6, 2, name="plain")
ASKED = 60
FEATURES = {"x": FeatureConfig(CONFIG, max_sequence_length=ASKED), "y": FeatureConfig(PLAIN)}
GIVEN = {"x": np.arange(2 * ASKED).reshape(2, ASKED), "y": np.array([0, 5])}


def keys_at(step):
    """Return the keys at a version: they wander, and become more and fewer."""
    return range(step, step + 12 + 7 * step % 16)


class Source:
    """A run that publishes.

    At each version all rows are its number, and that of unseen keys is its negative.
    """

    def __init__(self, root):
        self.root, self.step, self.table = root, 0, Keyed(CONFIG)
        self.table.rows = dict.fromkeys(keys_at(0), self.row(0))
        self.table.shared = self.row(0)

    def row(self, number):
        return np.full(4, number, np.float32)

    def model(self):
        plain = {"plain": np.zeros((6, 2), np.float32)}
        return export(self.root / "model", [self.table], FEATURES, GIVEN, arrays=plain)

    def delta(self):
        """Write what changes from this version to the next."""
        self.step += 1
        old, keys = set(self.table.rows), keys_at(self.step)
        said = self.table.change(keys, sorted(old - set(keys)), shared=True)
        said.arrays["values"][:] = self.step
        said.arrays["shared"][:] = -self.row(self.step)
        plain = changed_rows(range(6), NUMBERS * self.step)
        tables = {"t": said, "plain": plain}
        first, last = version(self.step - 1), version(self.step)
        return write_delta(self.root / f"{self.step}", first, last, tables)


NUMBERS = np.ones((6, 2), np.float32)


def check_whole(found):
    """Check that an answer is of one version, and return that."""
    step = int(found["y"][0, 0])
    assert (np.asarray(found["y"]) == step).all()
    keys = [step if key in keys_at(step) else -step for key in range(ASKED)]
    np.testing.assert_array_equal(found["x"][0], np.repeat(keys, 4).reshape(ASKED, 4))
    return step


def test_every_answer_is_wholly_of_one_version(tmp_path, monkeypatch):
    monkeypatch.setattr(served_tables, "_LEAST_ROOM", 4)
    source, deltas = Source(tmp_path), 30
    served = io.FollowingModel(source.model())
    seen, ended, answered = [set() for _ in range(4)], threading.Event(), threading.Semaphore(0)

    def ask(mine):
        last = 0
        while not ended.is_set():
            step = check_whole(served(GIVEN))
            assert step >= last  # time does not go back
            last = step
            mine.add(step)
            keys = served.keys("t")[0].tolist()
            assert keys == [*keys_at(keys[0])]
            answered.release()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, mine) for mine in seen]
        try:
            for step in range(1, deltas + 1):
                while not answered.acquire(timeout=1):  # somebody asks in between
                    assert not all(one.done() for one in asking)
                assert served.apply(source.delta()) == served.version == version(step)
                assert check_whole(served(GIVEN)) == step
        finally:
            ended.set()
            for one in asking:
                one.result()
    assert len(set().union(*seen)) > 3
    assert served.keys("t")[0].tolist() == [*keys_at(deltas)]


def test_a_delta_waits_for_the_calls_of_the_copy_that_it_writes(tmp_path, monkeypatch):
    source = Source(tmp_path)
    served, real = io.FollowingModel(source.model()), io.ServedModel.keys
    began, go = threading.Event(), threading.Event()

    def slow(model, name):
        began.set()
        assert go.wait(60)
        return real(model, name)

    with concurrent.futures.ThreadPoolExecutor(2) as threads, monkeypatch.context() as patched:
        patched.setattr(io.ServedModel, "keys", slow)
        asked = threads.submit(served.keys, "t")
        assert began.wait(60)
        served.apply(source.delta())  # into the other copy
        second = threads.submit(served.apply, source.delta())
        concurrent.futures.wait([second], timeout=0.5)
        waits, answered = not second.done(), served.version
        go.set()
        assert second.result() == version(2)
    assert (waits, answered) == (True, version(1))
    assert asked.result()[0].tolist() == [*keys_at(0)]
    assert check_whole(served(GIVEN)) == 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.quick(1)
def test_it_answers_as_a_model_that_is_copied(tmp_path, monkeypatch, seed):
    """With growth, keys that are only lost, and deltas of nothing."""
    monkeypatch.setattr(served_tables, "_LEAST_ROOM", 4)
    rng = np.random.default_rng(seed)
    one = Keyed(table("t", size=6000), range(10), seed)
    features, given = {"x": FeatureConfig(one.config)}, {"x": np.arange(6000).reshape(6000, 1)}
    model = first = export(tmp_path / "model", [one], features, given)
    answer = np.array(first(given)["x"])
    served, live = io.FollowingModel(model), io.FollowingModel(model)
    for step in range(1, 13):
        kind = rng.integers(4)
        lost = rng.permutation(np.array([*one.rows]))[: 3 if kind else 0].tolist()
        fresh = rng.integers(0, 6000, 2000 if step == 7 else 5) if kind > 1 or step == 7 else []
        changes = {"t": one.change(sorted({*map(int, fresh)} - {*lost}), lost)}
        delta = write_delta(tmp_path / f"{step}", version(step - 1), version(step), changes)
        before, kept = model, np.array(model(given)["x"])
        model = model.apply(delta)
        served.apply(delta)
        expected = looked_up([one], features, given)["x"]
        for answering, rows in ((model, expected), (served, expected), (before, kept)):
            np.testing.assert_array_equal(answering(given)["x"], rows)
        np.testing.assert_array_equal(served.keys("t"), model.keys("t"))
        assert served.keys("t")[0].tolist() == sorted(one.rows)
        assert served.metadata["version"]["step"] == step
    assert len(served._copies[0].model.tables["t"]["values"]) > 1 + 10 + 1024  # it has grown
    for old in (first, live):  # those that others were made from are as they were
        np.testing.assert_array_equal(old(given)["x"], answer)
        assert old.version == version(0)


WRONG = {
    "twice": (version(1), version(2), (), "these tables have it already"),
    "older": (version(0), version(1), (), "version: expected a delta to a later moment"),
    "a gap": (version(3), version(4), (), "since: expected at most 2, the step of"),
    "a gap of batches": (Version("run", 2, 0, 3), version(4), (), "at most 2 admitted .* got 3"),
    "of another run": (version(2, "x"), version(3, "x"), (), "run: expected run 'run', as"),
    "of a run that went on earlier": (
        version(1, "new"), version(3, "new"), (version(1),),
        "expected run 'run', as the tables of step 2, got 'new', which goes on from step 1 of it; ",
    ),
    "of fewer batches": (version(1), Version("run", 2, 0, 1), (), "a later moment"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.quick(2)
def test_a_delta_that_does_not_fit_changes_nothing(tmp_path, case):
    source, other = Source(tmp_path), Source(tmp_path / "other")
    model = source.model()
    served = io.FollowingModel(model)
    for _ in range(2):
        delta = source.delta()
        model, now = model.apply(delta), served.apply(delta)
    assert now == version(2)
    answer = jax.tree.map(np.array, model(GIVEN))
    assert check_whole(answer) == 2
    first, last, ancestors, text = WRONG[case]
    changes = {"t": other.table.change([1, 2, 3], [5], shared=True)}
    changes["plain"] = changed_rows(range(6), NUMBERS * 7)
    delta = write_delta(tmp_path / "wrong", first, last, changes, ancestors)
    for apply in (model.apply, model.apply_in_place, served.apply):
        with pytest.raises(ValueError, match=text):
            apply(delta)
    for one in (model, served):
        assert one.version == version(2)
        jax.tree.map(np.testing.assert_array_equal, one(GIVEN), answer)
    np.testing.assert_array_equal(served.keys("t"), model.keys("t"))
    assert served.keys("t")[0].tolist() == sorted(source.table.rows)
    delta = source.delta()
    served.apply(delta)
    for one in (model.apply(delta), served):
        assert check_whole(one(GIVEN)) == 3


def test_a_run_that_goes_on_from_the_models_moment_is_followed(tmp_path):
    source = Source(tmp_path)
    served = io.FollowingModel(source.model())
    served.apply(source.delta())
    tables = {"t": source.table.change([1, 2], [3]), "plain": changed_rows([], np.zeros((0, 2)))}
    # Restored twice: from the moment of step 2 of its first run, then from step 5 of the second.
    ancestors = (version(2), Version("second", 5, 0, 5))
    delta = write_delta(tmp_path / "d", version(1, "third"), version(6, "third"), tables, ancestors)
    assert served.apply(delta) == version(6, "third")
    for again, text in ((delta, "have it already"), (tmp_path / "1", "expected run 'third'")):
        with pytest.raises(ValueError, match=text):
            served.apply(again)
    same = version(6, "third"), version(6, "fourth"), tables, (version(6, "third"),)
    assert served.apply(write_delta(tmp_path / "same", *same)).run == "fourth"


FORMS = {
    "another width": ({"size": 500, "dim": 3, "unseen": "shared"}, "float32 .keys, 3., unseen"),
    "another dtype": ({"dim": 4, "unseen": "shared", "dtype": "bfloat16"}, "got bfloat16"),
    "another rule": ({"size": 500, "dim": 4}, "got float32 .keys, 4., unseen='zero'"),
    "none": ({"name": "u"}, "table 't': expected .*, got none"),
}


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.quick(1)
def test_a_delta_of_other_tables_is_refused(tmp_path, case):
    options, text = FORMS[case]
    config = table(**{"name": "t", **options})
    plain = changed_rows([], np.zeros((0, 2)))
    tables = {config.name: Keyed(config).change([1]), "plain": plain}
    delta = write_delta(tmp_path / "d", version(0), version(1), tables)
    with pytest.raises(ValueError, match=text + ".*publish a full export of these tables"):
        Source(tmp_path).model().apply(delta)


def test_rows_by_number_do_not_become_keys(tmp_path):
    one = Keyed(table("t", size=6))
    model = export(tmp_path / "m", [one], {"x": FeatureConfig(one.config)}, {"x": GIVEN["y"]})
    changes = {"rows": changed_rows([1], np.ones((1, 3))), "keys": one.change([1])}
    rows, keys = (
        write_delta(tmp_path / name, version(0), version(1), {"t": change})
        for name, change in changes.items()
    )
    with pytest.raises(ValueError, match=r"expected float32 \[keys, 3\], .* got float32 \[6, 3\]"):
        model.apply(rows)
    array = np.zeros((6, 3), np.float32)
    with pytest.raises(ValueError, match=r"tables whose ids are row numbers, got \['t'\], whose"):
        io.apply_delta({"t": array}, keys, version(0))
    assert not array.any()


def test_a_model_of_no_version_follows_nobody(tmp_path):
    one = Keyed(table("t"))
    features = {"x": FeatureConfig(one.config)}
    model = export(tmp_path / "m", [one], features, {"x": GIVEN["y"]}, version=None)
    delta = write_delta(tmp_path / "d", version(0), version(1), {"t": one.change([1])})
    for served in (model, io.FollowingModel(model)):
        assert served.version is None
        with pytest.raises(ValueError, match="expected a model of a known version, got none; exp"):
            served.apply(delta)


# -- Ctrl-C anywhere: it answers, and follows the next time ---------------------------------------


def interrupted(at):
    in_following = lambda code: code.co_filename.endswith("io/serving/following.py")  # noqa: E731
    return Interrupt(in_following, at, from_a_signal, only_signals=True)


def test_interrupted_calls_keep_no_delta_waiting(tmp_path):
    source = Source(tmp_path)
    served, hit, kept = io.FollowingModel(source.model()), 0, []
    for at in range(1, 200):
        with interrupted(at) as interrupt:
            try:
                served(GIVEN)
            except KeyboardInterrupt as error:
                kept.append(error)  # as a notebook does, with all frames
        if interrupt.seen < at:
            break
        hit += 1
    with ends_within(60):
        for step in range(1, 5):
            served.apply(source.delta())
            assert check_whole(served(GIVEN)) == step
    assert hit == len(kept) > 8


def test_an_interrupted_delta_is_there_or_not(tmp_path):
    source, hit = Source(tmp_path), 0
    served = io.FollowingModel(source.model())
    for at in range(1, 31):
        delta = source.delta()
        with interrupted(at) as interrupt:
            served.apply(delta)
        hit += interrupt.seen >= at
        assert served.version in (version(at - 1), version(at))
        assert check_whole(served(GIVEN)) == served.version.step
        with ends_within(60):
            if served.version == version(at - 1):
                served.apply(delta)
            assert check_whole(served(GIVEN)) == at
    assert 5 < hit < 30, "every place of a call was reached"
