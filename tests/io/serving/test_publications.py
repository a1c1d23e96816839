"""A trainer publishes in one place, a server follows it: deltas, whole models, restarts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import publication_cases
import pytest
from publication_cases import IDS

from tpu_embed import fit, io
from tpu_embed.io.serving.following import publications
from tpu_embed.io.store import place_of


class Trainer(publication_cases.Trainer):
    """Trains with `fit`, and publishes in a place."""

    def __init__(self, root, **options):
        super().__init__(**options)
        self.place, self.saved = f"{root}/published", f"{root}/saved"

    def fit(self, steps, *, at=(), **options):
        """Train, and publish after some steps."""

        def publish(report):
            self.state = report.state
            if report.step in at:
                self.publish(**options)

        source = [({"x": IDS[n : n + 4]}, np.float32(n)) for n in range(8)]
        loss = lambda rows, n: (rows["x"].sum(-1) - n).mean()  # noqa: E731
        given = {"touched": self.touched, "directory": self.saved, "save_every": 2}
        given |= {"report_every": 1, "callback": publish, "progress": False, "depth": 1}
        self.state = fit(self.engine, loss, source, steps=steps, **given).state

    def publish(self, **options):
        return io.publish(self.place, self.engine, self.state, self.touched, self.export, **options)

    def names(self):
        return [one.name for one in publications(place_of(self.place))]


@pytest.mark.parametrize("keys", [False, True])
def test_a_server_follows_a_run_and_the_run_that_goes_on_from_it(tmp_path, keys):
    trainer = Trainer(tmp_path, keys=keys)
    with pytest.raises(FileNotFoundError, match="published: expected a whole model, got none"):
        io.follow(trainer.place)
    trainer.fit(4, at=(1, 2, 4))
    assert trainer.names() == ["00000000-full", "00000001-delta", "00000002-delta"]
    trainer.check(served := io.follow(trainer.place))
    again = Trainer(tmp_path, keys=keys)  # another process, which resumes at step 4
    again.fit(6, at=(5, 6))
    assert again.names()[3:] == ["00000003-delta", "00000004-delta"]
    assert not again.exports
    served.poll()
    again.check(served)
    again.publish()  # nothing has changed
    assert len(again.names()) == 5


def test_whole_models_come_after_so_many_deltas_and_a_few_stay(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.fit(1, at=(1,))
    served, slow = io.follow(trainer.place), io.follow(trainer.place)
    loads = []
    served._begin_anew = loads.append
    for step in range(2, 7):
        trainer.fit(step, at=(step,), deltas=2, keep=2)
        served.poll()
        trainer.check(served)
    kinds = ["full", "delta", "delta", "full", "delta"]
    assert trainer.names() == [f"{3 + n:08d}-{kind}" for n, kind in enumerate(kinds)]
    assert not loads  # whole models of what it has
    slow.poll()  # which lacks deltas that are gone
    trainer.check(slow)
    trainer.fit(7, at=(7,), deltas=0, keep=None)
    assert trainer.names()[5:] == ["00000008-full"]
    slow.poll()
    trainer.check(slow)


def test_a_run_that_was_taken_back_publishes_a_whole_model(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.fit(4, at=(4,))
    served = io.follow(trainer.place)
    manager = io.CheckpointManager(trainer.saved, trainer.engine)
    trainer.state = manager.restore(2, touched=trainer.touched).state
    trainer.publish()
    assert trainer.names() == ["00000000-full", "00000001-full"]
    answered = served({"x": IDS})
    served.poll()
    trainer.check(served)
    assert not np.array_equal(answered, served({"x": IDS}))


def test_a_checkpoint_without_a_record_begins_it_anew(tmp_path):
    trainer = Trainer(tmp_path)
    touched, trainer.touched = trainer.touched, None
    trainer.fit(2)
    trainer.touched = touched
    trainer.fit(4, at=(3, 4))
    assert trainer.names() == ["00000000-full", "00000001-delta"]
    trainer.check(io.follow(trainer.place))


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.fit(1)
    left = tmp_path / "published" / ".00000000-full.0123"
    left.mkdir(parents=True)
    trainer.publish()
    assert not left.exists()
    assert trainer.names() == ["00000000-full"]


def test_bad_exports_are_refused_and_nothing_is_published(tmp_path):
    trainer, other = Trainer(tmp_path), Trainer(tmp_path / "other")
    trainer.fit(1)
    old = trainer.touched.version(trainer.state)._replace(step=0)

    def publish(export, touched=trainer.touched, **options):
        io.publish(trainer.place, trainer.engine, trainer.state, touched, export, **options)

    for export, options, error, said in (
        (lambda path, _: trainer.export(path, old), {}, ValueError, "a model of Version"),
        (lambda path, version: None, {}, FileNotFoundError, "00000000-full"),
        (lambda path, version: 1 // 0, {}, ZeroDivisionError, "zero"),
        (trainer.export, {"deltas": -1}, ValueError, "deltas: expected"),
        (trainer.export, {"keep": 0}, ValueError, "keep: expected"),
        (trainer.export, {"touched": other.touched}, ValueError, "the record of this engine"),
    ):
        with pytest.raises(error, match=said):
            publish(export, **options)
        assert trainer.names() == []
    trainer.publish()
    model = io.FollowingModel(io.load_model(f"{trainer.place}/00000000-full"))
    with pytest.raises(ValueError, match=r"poll: expected a model of io\.follow"):
        model.poll()


def test_answers_stay_whole_while_a_whole_model_is_taken(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.fit(1, at=(1,))
    served, ended = io.follow(trainer.place), threading.Event()

    def answer():
        return np.asarray(served({"x": IDS})).tobytes()

    def ask():
        found = set()
        while not ended.is_set():
            found.add(answer())
        return found

    wanted = {answer()}
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for step in range(2, 5):
                trainer.fit(step, at=(step,), deltas=0)
                served.poll()
                wanted.add(answer())
        finally:
            ended.set()
        assert all(one.result() <= wanted for one in asking)
    assert len(wanted) == 4
