"""What files of rows by id say of themselves is compared with the manifest, and leads nowhere."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from file_cases import mutations, resigned, rewrite
from flax import nnx

from tpu_embed import HostStorage, nn
from tpu_embed import optimizers as o
from tpu_embed.io import restore_modules, save_modules
from tpu_embed.io.checkpoint import manifest, tables

KEPT = Path(__file__).resolve().parents[2] / "data" / "0.2.0" / "living" / "tables"
"""Two tables on the host, whose rows are in segments of two saves."""


@pytest.fixture
def copy(tmp_path):
    for name in ("tables.json", "host_rows.0.json"):
        shutil.copy(KEPT / name, tmp_path)
    return tmp_path


def described(copy):
    """Return what is read of rows by id, before the first row is."""
    return tables.read_by_id(copy, *manifest.read_bound(copy / "tables.json", manifest._FORM))


FORGED = [
    lambda tables: tables["far"]["fields"][1].update(name="slot x"),
    lambda tables: tables["far"]["fields"][0].update(shape=[1]),
    lambda tables: tables["far"]["fields"][0].update(dtype="int32"),
    lambda tables: tables["both"]["fields"].pop(1),
    lambda tables: tables.update(query=tables.pop("far")),
    lambda tables: tables["far"]["segments"][0].update(name="a/../../../../elsewhere"),
]


@pytest.mark.parametrize("change", FORGED)
def test_what_is_forged_is_refused_by_name(copy, change):
    assert described(copy).keys() == {"both", "far"}
    rewrite(copy / "host_rows.0.json", lambda whole: change(whole["value"]))
    with pytest.raises(ValueError, match=r"host_rows\.0\.json.*: expected .*, got .*damaged"):
        described(copy)


def test_whatever_else_stands_there_is_refused_or_harmless(copy):
    path, accepted = copy / "host_rows.0.json", set()
    for place, changed in mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(resigned(changed)))
        try:
            described(copy)
            accepted.add((place[2], place[-1]))
        except ValueError as error:
            if not re.search(f"{path}.*expected .*, got ", str(error), re.DOTALL):
                raise
    # Lists may be of any length; a table that is not named is looked for among those saved whole.
    assert accepted == {("saved", "gone"), ("segments", "gone"), ("gone", "gone")}


def test_a_layer_of_any_path_is_saved_again_and_again(tmp_path):
    """Rows of the first save are linked by the second one, under the name that they have."""

    def model_of(seed):
        layer = nn.Embed(
            40, 2, optimizer=o.SGD(0.5), embedding_init=jax.nn.initializers.uniform(1.0),
            storage=HostStorage(device_rows=20), rngs=nnx.Rngs(seed),
        )  # fmt: skip
        return nnx.Dict({"..": nnx.Dict({"a/b": layer})}), layer

    model, layer = model_of(0)
    for number in range(2):
        batch = nn.admit(layer, nn.place(layer, np.arange(8) + 8 * number))
        nn.fused_value_and_grad(lambda layer, batch=batch: layer(batch).sum())(layer)
        save_modules(tmp_path / f"{number}", {"model": model})
    assert any(file.stat().st_nlink > 1 for file in (tmp_path / "1").rglob("c.*"))
    shutil.rmtree(tmp_path / "0")
    other, found = model_of(1)
    restore_modules(tmp_path / "1", {"model": other})
    found, layer = found.rows, layer.rows
    (name,) = layer.engine.table_configs
    assert found.engine.touched(name).tolist() == list(range(16))
    rows = (one.engine.rows(one.state, name, np.arange(40)) for one in (found, layer))
    np.testing.assert_array_equal(*rows)
