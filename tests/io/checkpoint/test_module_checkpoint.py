"""Checkpoints of flax modules, restored on other devices and placements."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import assert_same, mesh
from file_cases import chunks, swap
from flax import nnx

from tpu_embed import TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.io import ModuleCheckpointManager, restore, restore_modules, save_modules

V, D, B, BEFORE, AFTER = 11, 4, 8, 2, 12
"""Rows, dim, examples of a batch; steps until a checkpoint is saved; steps in all."""

LAYOUTS = [(2, "mod"), (1, "div"), (4, "replicated"), (8, "div")]
"""Devices and placement; the first is that of the run which saves."""


class Model(nnx.Module):
    """Two tables, one of them by two names, beside a network with statistics and random bits."""

    def __init__(self, devices=1, placement="mod", *, seed=0, rows=V, units=3):
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        where, rule = {"mesh": mesh(devices), "rngs": rngs}, o.Adam(0.25)
        given = {"name": "tags", "combiner": "sum", "optimizer": rule, "placement": placement}
        self.films = nn.Embed(V, D, optimizer=o.Adagrad(0.5), placement=placement, **where)
        self.tags = nn.EmbeddingBag(TableConfig(rows, D, **given), **where)
        self.seen = self.films
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(D, units, rngs=rngs)

    def __call__(self, features):
        return self.linear(self.dropout(self.norm(features)))


def modules_of(*args, **options):
    model = Model(*args, **options)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}


@functools.cache
def template(layout):
    """Return modules of a layout, whose copies share the programs that are compiled for them."""
    return modules_of(*layout, seed=7)


def copy_of(modules):
    graphdef, arrays = nnx.split(nnx.Dict(modules))
    return dict(nnx.merge(graphdef, jax.tree.map(jnp.copy, arrays)).items())


def contents(modules):
    """Return all that modules hold, on the host: rows of tables in their order, arrays by path."""
    model = modules["model"]
    tables = [(x.embedding, x.logical_slots, x.state.step) for x in (model.films.rows, model.tags)]
    own = (nn.Table, nn.Slot, nn.Counter)
    rest = nnx.to_flat_state(nnx.state(nnx.Dict(modules), nnx.Not(own)))
    return jax.tree.map(on_host, (tables, {path: x.get_raw_value() for path, x in rest}))


def on_host(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def batch(step):
    """Return ids, features, and gradients of activations, which depend on nothing but the step."""
    rng = np.random.default_rng(step)
    ids = rng.integers(-1, V, (B, 3)).astype(np.int32)
    return ids, *(rng.normal(size=shape).astype(np.float32) for shape in ((B, D), (2, B, D)))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, features, gradients):
    def loss_fn(model):
        looked_up = (model.films(ids[:, 0]) + model.seen(ids[:, 1])) * gradients[0]
        looked_up += model.tags(ids) * gradients[1]
        return looked_up.sum() + (model(features) ** 2).sum()

    optimizer.update(model, nn.fused_value_and_grad(loss_fn)(model)[1])


def trained(modules, first, last):
    """Return modules after steps [first, last), which are those that were given."""
    for step in range(first, last):
        with jax.numpy_dtype_promotion("standard"):  # for optax's Adam
            train_step(modules["model"], modules["optimizer"], *batch(step))
    return modules


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a checkpoint of a run, and what the run held then and ten steps later."""
    path = tmp_path_factory.mktemp("run") / "saved"
    modules = trained(copy_of(template(LAYOUTS[0])), 0, BEFORE)
    save_modules(path, modules, position={"batch": BEFORE})
    before = contents(modules)
    return path, before, contents(trained(modules, BEFORE, AFTER))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint of modules that were never trained, and what they held."""
    path, modules = tmp_path_factory.mktemp("modules") / "saved", modules_of(2)
    save_modules(path, modules)
    return path, contents(modules)


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.quick(1)
def test_a_run_goes_on_with_the_same_bits_in_any_layout(run, layout):
    """Gradients of activations are given, and the network sees whole batches on every device."""
    path, before, after = run
    for part in (("dropout", "rngs", "count"), ("norm", "mean"), ("linear", "kernel")):
        assert (before[1]["model", *part] != after[1]["model", *part]).any()
    modules = copy_of(template(layout))
    variables = modules["model"].linear.kernel, modules["model"].films.rows.state_variables
    assert restore_modules(path, modules) == {"batch": BEFORE}
    assert modules["model"].linear.kernel is variables[0]
    assert modules["model"].films.rows.state_variables == variables[1]
    assert_same(contents(modules), before)
    assert_same(contents(trained(modules, BEFORE, AFTER)), after)


def test_modules_that_hold_no_arrays_are_filled(saved):
    path, before = saved
    modules = nnx.eval_shape(lambda: nnx.Dict(modules_of(*LAYOUTS[-1])))
    restore_modules(path, dict(modules.items()))
    assert_same(contents(dict(modules.items())), before)


def test_arrays_keep_the_sharding_of_the_module(saved):
    modules = copy_of(template((8, "div")))
    model = modules["model"]
    halves = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("half",))
    split = jax.sharding.NamedSharding(halves, jax.sharding.PartitionSpec("half"))
    model.linear.kernel[...] = jax.device_put(model.linear.kernel[...], split)
    restore_modules(saved[0], modules)
    assert model.linear.kernel[...].sharding == split
    assert model.linear.bias[...].sharding == model.films.rows.engine.layout.axes.sharding(())
    assert_same(contents(modules), saved[1])


def test_other_things_of_flax_are_saved(tmp_path):
    """Arrays without a variable, of size 0, numbers, metrics, a variable by itself."""

    def made(value):
        holder = nnx.Dict(
            plain=nnx.data(jnp.full(2, value)),
            empty=nnx.Param(jnp.zeros((0, 3))),
            number=nnx.Variable(value),  # of Python
            host=nnx.Variable(np.full(2, value, np.int64)),
            none=nnx.Variable(None),
            tree=nnx.Variable({"a": jnp.full((), value), "b": [jnp.ones(1) * value]}),
        )
        metric = nnx.metrics.Average()
        metric.update(values=jnp.full(3, float(value)))
        return {"holder": holder, "metric": metric, "key": nnx.RngKey(jax.random.key(value))}

    saved, other = made(3), made(4)
    save_modules(tmp_path / "saved", saved)
    restore_modules(tmp_path / "saved", other)
    number = other["holder"].number
    assert number.get_raw_value().dtype == np.int32  # as a jit would return it
    number.set_raw_value(int(number.get_raw_value()))
    assert_same(*([on_host(x) for x in held(one)] for one in (other, saved)))


def held(modules):
    """Return the very arrays that modules hold."""
    return jax.tree.leaves(nnx.state(nnx.Dict(modules)))


def assert_refused(path, modules, pattern, error=ValueError, **options):
    """Restore; the modules hold the very same arrays afterwards, and none of them is gone."""
    arrays = held(modules)
    with pytest.raises(error, match=pattern):
        restore_modules(path, modules, **options)
    assert all(now is then for now, then in zip(held(modules), arrays, strict=True))
    assert not any(array.is_deleted() for array in arrays)


def test_nothing_is_half_restored(saved, tmp_path):
    """Whichever file is damaged, or lost; orbax's own notes are not read."""
    modules = copy_of(template((1, "div")))
    notes = ("_CHECKPOINT_METADATA", "commit_success.txt")
    files = [file for file in chunks(saved[0]) if file.name not in notes]
    items = {file.relative_to(saved[0]).parts[0] for file in files}
    assert items == {"layers", "position", "variables"}
    for file in files:
        data = file.read_bytes()
        try:
            half = len(data) // 2
            file.write_bytes(data[:half] + bytes([data[half] ^ 4]) + data[half + 1 :])
            assert_refused(saved[0], modules, str(saved[0]))
            file.unlink()
            assert_refused(saved[0], modules, str(saved[0]), (ValueError, FileNotFoundError))
        finally:
            file.write_bytes(data)
    restore_modules(saved[0], modules)
    assert_same(contents(modules), saved[1])


def test_layers_that_were_swapped_are_refused(tmp_path):
    bags = [nn.EmbeddingBag(TableConfig(V, D, name="t"), rngs=nnx.Rngs(i)) for i in range(2)]
    save_modules(tmp_path / "saved", {"a": bags[0], "b": bags[1]})
    assert len(json.loads((tmp_path / "saved/layers/layers.json").read_text())["value"]) == 2
    swap(*(tmp_path / "saved/layers" / name for name in "ab"))
    with pytest.raises(ValueError, match=r"expected a file of checkpoint \w+/a, got one of \w+/b"):
        restore_modules(tmp_path / "saved", {"a": bags[0], "b": bags[1]})


def test_another_model_is_one_error_with_all_differences(saved):
    modules = modules_of(rows=V + 1, units=2)
    modules["model"].extra = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    modules["model"].more = nn.Embed(3, 2, rngs=nnx.Rngs(0))
    modules["model"].norm.mean.set_raw_value(jnp.zeros(D, jnp.bfloat16))
    del modules["model"].dropout, modules["optimizer"]
    lines = [
        r"checkpoint .*: layer 'model/more/rows': expected one, got none",
        r"layer 'model/tags': table 'tags': expected 12 rows, got 11; give key= to make .*",
        r"leaf 'model/dropout/rngs/count': expected none, got one",
        r"leaf 'model/dropout/rngs/key': expected none, got one",
        r"leaf 'model/extra/kernel': expected one, got none",
        r"leaf 'model/linear/bias': expected shape \[2\], got shape \[3\]",
        r"leaf 'model/linear/kernel': expected shape \[4, 2\], got shape \[4, 3\]",
        r"leaf 'model/norm/mean': expected dtype bfloat16, got .* float32",
        r"leaf 'optimizer/opt_state/0/count': expected none, got one",
    ]
    pattern = r"\n.*".join(lines) + r"(\n.*)*\n  give the modules as they were saved; convert=True "
    assert_refused(saved[0], modules, pattern)


def test_parts_are_left_out(saved):
    modules = modules_of(seed=1, rows=V + 2, units=2)
    before = contents(modules)
    leave_out = ("optimizer", "model/tags", "model/linear")
    restore_modules(saved[0], modules, leave_out=leave_out)
    (films, tags), arrays = contents(modules)
    assert_same(films, saved[1][0][0])
    assert_same(tags, before[0][1])
    for path, array in arrays.items():
        out = path[0] == "optimizer" or path[1] == "linear"
        assert_same(array, (before if out else saved[1])[1][path])
    pattern = r"leave_out: expected \['model', 'optimizer'\], or paths below, got 'modell'"
    assert_refused(saved[0], modules, pattern, leave_out=("modell",))


def test_tables_grow_and_floats_are_converted(saved):
    modules = modules_of(rows=V + 2)
    modules["model"].norm.var.set_raw_value(jnp.zeros(D, jnp.bfloat16))
    restore_modules(saved[0], modules, key=jax.random.key(1), convert=True)
    (_, (rows, _, _)), arrays = contents(modules)
    assert rows.shape == (V + 2, D)
    assert_same(rows[:V], saved[1][0][1][0])
    assert arrays["model", "norm", "var"].dtype == jnp.bfloat16


def test_what_is_no_module_by_name_is_refused(tmp_path, saved):
    model = Model()
    refused = {
        r"modules: expected modules by name, got Model; give \{\"model\": model\}": model,
        r"modules: expected names, got 3": {3: model},
        r"modules\['x'\]: expected an nnx module, .*got Array": {"x": jnp.ones(2)},
    }
    for pattern, modules in refused.items():
        with pytest.raises(TypeError, match=pattern):
            save_modules(tmp_path / "saved", modules)
        with pytest.raises(TypeError, match=pattern):
            restore_modules(saved[0], modules)
    twice = nnx.Dict({"a": nnx.Dict(b=nnx.Param(jnp.ones(1))), "a/b": nnx.Param(jnp.ones(1))})
    with pytest.raises(ValueError, match="modules: 'x/a/b': expected one of this path, got 2"):
        save_modules(tmp_path / "saved", {"x": twice})
    assert not (tmp_path / "saved").exists()
    with pytest.raises(TypeError, match="got Model; save_modules, restore_modules and Module"):
        restore(tmp_path, model)


def test_a_save_in_the_background_has_the_bits_of_its_step(tmp_path):
    """What is saved is donated to the next step at once."""
    modules, restored, wanted = copy_of(template(LAYOUTS[0])), copy_of(template(LAYOUTS[0])), {}
    with ModuleCheckpointManager(tmp_path, every=2, keep=2) as manager:
        for step in range(1, 8):
            trained(modules, step - 1, step)
            wanted[step] = contents(modules)
            assert manager.save(step, modules, position=step) == (step % 2 == 0)
        manager.wait()
        assert manager.all_steps() == [4, 6]
        for step, saved in ((None, 6), (4, 4)):
            assert manager.restore(restored, step) == saved
            assert_same(contents(restored), wanted[saved])
        with pytest.raises(ValueError, match="leaf 'model/linear/bias'") as raised:
            manager.restore(modules_of(units=1))
        assert raised.value.__notes__ == [f"steps in {tmp_path}: [4, 6]"]


@pytest.mark.parametrize(
    "make",
    [lambda i: nnx.Param(jnp.full(2, float(i))), lambda i: nn.Embed(8, 2, rngs=nnx.Rngs(i))],
    ids=["variables", "layers"],
)
@pytest.mark.quick(1)
def test_what_places_share_is_part_of_the_structure(make, tmp_path):
    """The number of objects is the same, and their paths are: only who shares them differs."""

    def model(first, shared):
        made = nnx.Dict(x=make(first), y=make(first + 1))
        made.z = made[shared]
        return made

    saved, other, alike = model(0, "x"), model(2, "y"), model(2, "x")
    save_modules(tmp_path / "saved", {"model": saved})
    said = r"of several paths: expected \[\['model/x.*model/z"
    assert_refused(tmp_path / "saved", {"model": other}, said)
    restore_modules(tmp_path / "saved", {"model": alike})
    assert_same(*(jax.device_get(held({"": one})) for one in (saved, alike)))
