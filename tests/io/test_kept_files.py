"""Files that 0.2.0 wrote are restored, loaded and applied, and give the numbers of that time.

`tests/helpers/kept_cases.py` says how they were made. They are never written anew: a change that
cannot read them breaks the files of users, too.
"""

import shutil
from pathlib import Path

import jax
import kept_cases as kept
import numpy as np
import pytest
from facade_cases import assert_same
from jax import export as jax_export

from tpu_embed import io
from tpu_embed.io.serving import model_files

FILES = Path(__file__).resolve().parents[1] / "data" / "0.2.0"


def expected(start):
    """Return the numbers that were recorded under names with this start, without it."""
    with np.load(FILES / "expected.npz") as numbers:
        chosen = {name: numbers[name] for name in numbers.files if name.startswith(f"{start} ")}
    assert chosen
    return {name.removeprefix(f"{start} "): one for name, one in chosen.items()}


# -- checkpoints: each is restored on several numbers of devices, and goes on on one of them -------


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_rows_are_restored_and_a_run_goes_on(devices):
    engine = kept.static_engine(devices)
    touched = io.TouchedRows(engine)
    found = io.restore(FILES / "static", engine, model=kept.NETWORK, touched=touched)
    assert_same(kept.of_static(engine, found.state), expected("static saved"))
    assert_same(kept.bits(found.model), kept.bits(kept.NETWORK))
    assert found.position == kept.POSITION
    if devices == 1:
        state = kept.train(engine, found.state, kept.MORE, touched=touched)
        assert_same(kept.of_static(engine, state), expected("static after"))


@pytest.mark.parametrize("devices", [1, 8])
def test_keys_are_restored_and_a_run_goes_on_and_a_server_follows(devices, tmp_path, readable):
    engine = kept.living_engine(devices)
    touched, after = io.TouchedRows(engine), expected("living after")
    state = io.restore(FILES / "living", engine, touched=touched).state
    assert_same(kept.of_rows(engine, state), expected("living saved"))
    if devices == 1:
        return
    state = kept.train(engine, state, kept.MORE, touched=touched)
    assert_same(kept.of_rows(engine, state), after)
    served = io.load_model(FILES / "by_key").apply(FILES / "by_key_delta")
    io.export_delta(tmp_path / "delta", engine, state, touched, since=served.version)
    served = served.apply(tmp_path / "delta")
    keys, rows = served.keys("both")
    assert_same(keys, after["both keys"])
    assert_same(np.asarray(served.tables["both"]["values"])[rows], after["both None"])


@pytest.mark.parametrize("devices", [1, 8])
def test_modules_are_restored_and_a_run_goes_on(devices):
    modules = kept.modules_of(devices)
    assert io.restore_modules(FILES / "modules", modules) == kept.POSITION
    assert_same(kept.of_modules(modules), expected("modules saved"))
    if devices == 1:
        kept.train_modules(modules, range(kept.SAVED, kept.SAVED + kept.MORE))
        assert_same(kept.of_modules(modules), expected("modules after"))


@pytest.mark.parametrize(("devices", "steps", "when"), [(1, 2, "saved"), (8, 4, "after")])
def test_a_run_of_fit_goes_on(devices, steps, when, tmp_path):
    shutil.copytree(FILES / "fit", tmp_path / "fit")
    assert_same(kept.run_fit(tmp_path / "fit", steps, devices), expected(f"fit {when}"))


# -- exports and deltas --------------------------------------------------------------------------


@pytest.fixture
def readable():
    """Fail if JAX reads these programs no longer: it promises to for six months only.

    The format of these files is JAX's own, so nothing here can mend this. Say in CHANGELOG.md and
    docs/serving.md which exports have to be made anew; then remove by_row, by_key and their numbers
    from this folder and this test, and keep exports that this JAX has written, of this version, in
    its own folder.
    """
    for file in [*FILES.rglob("*.stablehlo")]:
        try:
            jax_export.deserialize(bytearray(file.read_bytes()))
        except Exception as error:
            wrote = model_files.read_metadata(FILES / file.relative_to(FILES).parts[0])["jax"]
            said = f"cannot read {file.name} of JAX {wrote}: {error}; see `readable` for what to do"
            pytest.fail(f"JAX {jax.__version__} {said}")


@pytest.mark.parametrize(
    ("name", "request_of"), [("by_row", kept.row_request), ("by_key", kept.key_request)]
)
def test_an_export_answers_and_takes_its_delta(name, request_of, readable):
    asked, said = request_of(), {f"{name} {what}": one for what, one in expected(name).items()}
    assert_same(kept.answers(FILES, name, asked), said)
    model = io.FollowingModel(io.load_model(FILES / name))
    model.apply(FILES / f"{name}_delta")
    for feature, one in model(asked).items():
        assert_same(np.asarray(one), said[f"{name} after {feature}"])


def test_arrays_take_a_delta():
    before, after = expected("static saved"), expected("static after")
    name = "['films.v1/EU']"
    version = io.Version(**model_files.read_metadata(FILES / "by_row")["version"])
    tables = {"films.v1/EU": before[name].copy()}
    assert io.apply_delta(tables, FILES / "by_row_delta", version).step == kept.SAVED + kept.MORE
    np.testing.assert_array_equal(tables["films.v1/EU"], after[name])
