"""Plans against engines: the real bytes of arrays, the real exchange of batches, every error."""

import dataclasses
import json
import runpy
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from facade_cases import mesh
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, planning
from tpu_embed import optimizers as o
from tpu_embed.planning import Topology
from tpu_embed.planning.costs import readable, tiled_bytes, untiled_bytes

WORKLOAD = Path(__file__).resolve().parents[2] / "configs/dlrm_dcnv2.py"


@pytest.fixture(scope="module")
def dlrm():
    """Return the features, the optimizer and the shapes of a batch of a whole benchmark."""
    return runpy.run_path(str(WORKLOAD))["workload"]()


def of_tables(*tables):
    """Return a feature of each table, by the table's name."""
    return {table.name: FeatureConfig(table) for table in tables}


def one(rows, dim, **options):
    """Return a feature "x" of one table."""
    return of_tables(TableConfig(rows, dim, name="x", **options))


def shapes(features, *shape, dtype=np.int32):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name in features}


FEATURES = of_tables(
    TableConfig(1001, 8, name="mod"),
    TableConfig(333, 8, name="div", placement="div", optimizer=o.RowWiseAdagrad()),
    TableConfig(40, 4, name="everywhere", placement="replicated"),
    TableConfig(77, 16, name="narrow", dtype="bfloat16", optimizer=o.Adam()),
    TableConfig(50, 8, name="fixed", trainable=False),
)
PADDING = {"mod": 7, "div": 3, "everywhere": 0, "narrow": 3, "fixed": 6}
IDS = {name: np.zeros((8, 2), int) for name in FEATURES}

TWO_AXES = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
OF_TWO_AXES = of_tables(
    TableConfig(1001, 8, name="a", shard_axes="model"),
    TableConfig(33, 1, name="b", dtype="bfloat16", placement="div"),
    TableConfig(9, 130, name="c", placement="replicated"),
)
ENGINES = {
    "one axis": (FEATURES, o.Adagrad(), mesh(8), PADDING, 0),
    "two axes": (OF_TWO_AXES, optax.adam(0.1), TWO_AXES, {"a": 3, "b": 7, "c": 0}, 3 * 4),
}
"""Features, optimizer, mesh, padding rows by table, and the bytes of optax's counts of steps."""


@pytest.mark.parametrize("case", ENGINES)
def test_what_is_held_and_sent_is_that_of_the_engine(case):
    features, optimizer, axes, padding, counts = ENGINES[case]
    rng = np.random.default_rng(0)
    sizes = {name: feature.table.vocabulary_size for name, feature in features.items()}
    batch = {n: rng.integers(0, size, (64, 3)).astype(np.int32) for n, size in sizes.items()}
    found = planning.plan(features, optimizer, axes, batch)
    engine = tpu_embed.EmbeddingEngine(features, optimizer, mesh=axes)
    assert found.spec == engine.place(batch).spec
    state = engine.init(jax.random.key(0))
    for what, arrays in {"tables": state.tables, "slots": state.slots}.items():
        shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays)]
        assert found.held[what] == sum(shards)
    assert [table.name for table in found.tables] == sorted(features)
    assert sum(table.table_bytes for table in found.tables) == found.held["tables"]
    assert sum(table.slot_bytes for table in found.tables) == found.held["slots"] - counts
    assert found.stacks == len(engine.layout.stacks)
    assert {table.name: table.padding for table in found.tables} == padding


@pytest.mark.parametrize("rows", [1_000, 100_000])
def test_uniform_ids_ask_for_what_is_expected(rows):
    """Capacities of shapes hold those of drawn ids, and are no more than a quarter larger."""
    features = one(rows, 4)
    ids = np.random.default_rng(0).integers(0, rows, (512, 20)).astype(np.int32)
    engine = tpu_embed.EmbeddingEngine(features, o.Adagrad(), mesh=mesh(8))
    placed = engine.place({"x": ids}).spec.stacks[0]
    expected = planning.plan(features, o.Adagrad(), 8, shapes("x", 512, 20)).spec.stacks[0]
    # Buckets round up by an eighth; the fullest of 64 pairs is a little above the mean.
    assert placed.row_capacity * 0.85 <= expected.row_capacity <= placed.row_capacity * 1.25
    assert placed.partials * 0.85 <= expected.partials <= placed.partials * 1.25


def test_nothing_is_sent_on_one_device():
    found = planning.plan(FEATURES, o.Adagrad(), 1, IDS)
    assert not any(found.sent.values())
    assert found.memory is None
    assert found.fits


def test_dlrm_fits_a_cube_of_v5p_which_is_explained(dlrm):
    features, optimizer, batch = dlrm
    found = planning.plan(features, optimizer, "v5p:4x4x4", batch)
    found.check()
    assert found.devices == 64
    # 204,184,588 rows of 512 bytes over 64 devices, and as much again.
    assert found.held["tables"] == pytest.approx(204_184_588 * 512 / 64, rel=1e-3)
    assert found.held["slots"] == found.held["tables"]
    tiny = {t.name for t in found.tables if t.placement == "replicated"}
    assert tiny == {n for n, feature in features.items() if feature.table.vocabulary_size <= 128}
    text = found.explain()
    assert "v5p:4x4x4: 64 device(s), global batch 65,536, 26 table(s) in 2 stack(s)" in text
    (line,) = [line.split() for line in text.splitlines() if line.startswith("t05 ")]
    assert line == "t05 float32 replicated tiny, 1.5 KiB 3 128 3 0 4.0 KiB 4.0 KiB".split()
    assert text.splitlines()[2].endswith("of 95.7 GiB a device")


def test_dlrm_is_refused_on_four_v5e_with_figures(dlrm):
    features, optimizer, batch = dlrm
    found = planning.plan(features, optimizer, "v5e:2x2", batch)
    with pytest.raises(ValueError, match=r"at most 15\.8 GiB a device, got .*; .* devices"):
        found.check()
    read = json.loads(found.to_json())
    assert (read["held"], read["remedies"]) == (found.held, list(found.remedies))
    assert (read["fits"], read["tables"][5]["why"]) == (False, "tiny, 1.5 KiB")
    (devices,) = [remedy for remedy in found.remedies if "16 devices" in remedy]
    larger = planning.plan(features, optimizer, "v5e:4x4", batch)
    assert larger.fits
    assert devices.endswith(f": {readable(larger.bytes_per_device)}, would fit")


ALL = {"placement": "mod", "dtype": "bfloat16", "optimizer": o.RowWiseAdagrad()}
NAMES = {"no replicated": "placement", "bfloat16": "dtype", "row-wise": "optimizer"}
CHANGES = {"all changes": ALL} | {name: {key: ALL[key]} for name, key in NAMES.items()}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ids", ["real", "shapes"])
def test_a_remedy_is_what_a_plan_of_it_says(change, ids):
    tables = [
        TableConfig(2**14, 64, name="a"),
        TableConfig(2**11, 32, name="b", placement="replicated"),
    ]
    features = of_tables(*tables)
    changed = of_tables(*(dataclasses.replace(table, **CHANGES[change]) for table in tables))
    batch = {name: np.arange(64).reshape(32, 2) for name in features}
    if ids == "shapes":
        batch = jax.eval_shape(lambda: batch)
    whole = planning.plan(features, o.Adam(0.1), "v5e:2x2", batch)
    alike = planning.plan(changed, o.Adam(0.1), "v5e:2x2", batch)
    assert alike.bytes_per_device < whole.bytes_per_device
    for room, word in {0: "would fit", -1: "still too much"}.items():
        memory = alike.bytes_per_device + room
        found = planning.plan(features, o.Adam(0.1), "v5e:2x2", batch, memory=memory)
        (remedy,) = [remedy for remedy in found.remedies if remedy.startswith(change)]
        assert remedy.endswith(f": {readable(alike.bytes_per_device)}, {word}")


def test_remedies_are_only_those_there_are():
    """More devices hold no more replicated rows; SGD has no slots; int32 numbers no more rows."""
    features, batch = one(2**20, 128, dtype="bfloat16", placement="replicated"), shapes("x", 16, 2)
    found = planning.plan(features, o.SGD(), "v5e:2x2", batch, memory=2**27)
    first, second = found.remedies
    assert first.startswith("v5e:4x4 (16 devices), the same global batch: 256.0 MiB of tables and")
    assert first.endswith("still too much")
    assert second.startswith("no replicated tables")
    assert second.endswith("would fit")
    vast = one(2**31 - 8, 4, dtype="bfloat16")
    (on_host,) = planning.plan(vast, None, 8, batch, memory=2**20).remedies
    assert on_host.startswith("storage=HostStorage(device_rows=1_000_000) for x: ")
    two = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    assert planning.plan(vast, None, two, batch, memory=2**20).remedies == (on_host,)
    options = {"vocabulary": tpu_embed.DynamicVocabulary(), "dtype": "bfloat16"}
    resident = planning.plan(one(2**20, 128, **options), None, two, batch, memory=2**20)
    (remedy,) = resident.remedies
    assert remedy.startswith("storage=HostStorage(device_rows=31_000) for x: ")
    options |= {"storage": tpu_embed.HostStorage(device_rows=31_000)}
    planned = planning.plan(one(2**20, 128, **options), None, two, batch, memory=2**20)
    assert planned.fits
    # Two maps: of 2**20 keys, which wait as well, and of the rows on the devices.
    assert planned.on_host["maps"] > resident.on_host["maps"] > 0


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_a_mesh_of_tpus_is_planned_as_their_topology(topology):
    kind = Topology(topology).chip.device_kind
    device = AbstractDevice(kind, num_cores=None, platform="tpu")
    abstract = AbstractMesh((4,), ("d",), (AxisType.Auto,), abstract_device=device)
    found, expected = (
        planning.plan(FEATURES, o.Adagrad(), target, IDS) for target in (abstract, topology)
    )
    assert (found.held, found.passing) == (expected.held, expected.passing)
    assert found.target == f"4 × {kind}"
    assert found.memory is None


@pytest.mark.parametrize(("topology", "words"), [("v5p:2x2x1", 16), ("v5e:2x2", 32)])
def test_narrow_rows_waste_words_on_a_tpu(topology, words):
    """A row of 8 numbers takes 16 words for SparseCores, 32 in a TensorCore's line."""
    rows = 4 * 128 * 1000
    features, batch = one(rows, 8), shapes("x", 64)
    found = planning.plan(features, o.Adagrad(0.1), topology, batch)
    assert found.wasted["tables"] == found.wasted["slots"] == rows // 4 * (words - 8) * 4
    assert found.tables[0].wasted_bytes == 2 * found.wasted["tables"]
    # Two arrays of 16 activations, each of 128 words instead of 8.
    assert found.wasted["activations"] == 2 * 16 * (128 - 8) * 4
    assert not any(planning.plan(features, o.Adagrad(0.1), 4, batch).wasted.values())


TYPES = {
    "v2-8": "v2:2x2", "v3-32": "v3:4x4", "v4-8": "v4:2x2x1", "v4-16": "v4:2x2x2",
    "v5litepod-1": "v5e:1x1", "v5litepod-16": "v5e:4x4", "v5e-8": "v5e:2x4",
    "v5p-8": "v5p:2x2x1", "v5p-128": "v5p:4x4x4", "v5p-12288": "v5p:16x16x24",
    "v6e-8": "v6e:2x4", "v6e-256": "v6e:16x16", "tpu7x-128": "tpu7x:4x4x4",
}  # fmt: skip
"""Accelerator types of Google Cloud, and the topologies that its pages give them."""


def test_accelerator_types_are_topologies():
    for name, topology in TYPES.items():
        assert Topology(name) == Topology(topology)
    wrong = {"v5p-4": "TensorCores, .* 8, 16", "v6e-512": "chips, among 1, 4, 8"}
    wrong |= dict.fromkeys(("vp5:2x2x1", "v5pp-8", "v5P:2x2x1"), r"topology: .* did you mean v5p\?")
    for name, words in wrong.items():
        with pytest.raises(ValueError, match=words):
            Topology(name)


@pytest.mark.parametrize("kind", planning.CHIPS)
def test_larger_slices_are_topologies_in_order(kind):
    chip = planning.CHIPS[kind]
    first = Topology(f"{kind}:" + {2: "2x2", 3: "2x2x1"}[chip.axes])
    chips = [int(np.prod(one.shape)) for one in first.larger()]
    assert chips[:2] == [8, 16]
    assert chips == sorted(set(chips))
    assert chip.pod / 2 <= chips[-1] <= chip.pod


def test_a_remedy_names_a_topology_that_can_be_rented():
    """The next slice of v5e after 1x1 has 4 chips."""
    features = one(40_000_000, 128)
    found = planning.plan(features, o.SGD(0.1), "v5litepod-1", shapes("x", 1024, 2))
    assert found.target == "v5e:1x1"
    assert found.remedies[0].startswith("v5e:2x2 (4 devices), the same global batch: ")
    assert found.remedies[0].endswith(", would fit")
    # 12 examples are not shared by 8 devices or 16, and a mesh has no topology.
    found = planning.plan(features, o.SGD(0.1), "v5e:2x2", shapes("x", 12, 2), memory=2**30)
    assert not any("devices" in remedy for remedy in found.remedies)
    found = planning.plan(features, o.SGD(0.1), 2, shapes("x", 12, 2), memory=2**33)
    assert found.remedies[0].startswith("4 devices, the same global batch: ")


def test_explained_names_are_whole_and_no_markup(monkeypatch):
    """In a notebook, and where colours are asked for, it is plain text."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    long = "user/" * 20 + "id"
    names = ["[bold]x", ":smile:", long]
    sized = zip(names, (8, 16, 24), strict=True)  # equal tables would share a line
    features = of_tables(*(TableConfig(123_456_789, dim, name=n) for n, dim in sized))
    text = planning.plan(features, o.Adagrad(), 512, shapes(features, 512, 1)).explain()
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 120
    for name in names[:2]:
        assert any(line.startswith(f"{name}  ") for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("user/"))
    assert "".join(line.split(" ")[0] for line in lines[start:]).startswith(long)
    assert "\x1b" not in text


ERRORS = {
    "topology: expected": [
        {"target": name} for name in ("v9:2x2", "v5p", "v5p:2x2", "v5e:2x2x2", "v5e:0x2", "v5e:2x")
    ],
    "target: expected a mesh, a topology or a number": [
        {"target": target} for target in (0, -1, True, None, 2.0)
    ],
    "batch size: expected a positive multiple of 3": [{"target": 3}],
    "memory, bytes of a device: expected an integer >= 1": [
        {"memory": memory} for memory in (0, -1, True, 2.0, "16 GiB", float("nan"))
    ],
    "expected ids of an integer dtype": [
        {"batch": shapes(FEATURES, 8, 2, dtype=dtype)} for dtype in (np.float32, np.bool_)
    ],
    "batch: expected ids, or shapes": [{"batch": {**IDS, **shapes(["mod"], 8, 2)}}],
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words):
    for wrong in ERRORS[words]:
        with pytest.raises((TypeError, ValueError), match=words):
            planning.plan(FEATURES, o.Adagrad(), **{"target": 8, "batch": IDS, **wrong})


def test_no_array_of_a_sparse_core_has_more_than_16_gib():
    rows = 12 * 2**30 // (4 * 128)
    shape = jax.ShapeDtypeStruct((1024, 2), np.int32)
    halves = [FeatureConfig(TableConfig(rows, 128, name=name)) for name in ("half_0", "half_1")]
    assert planning.plan(halves, o.SGD(0.1), "v5p:1x1x1", [shape] * 2).stacks == 2
    whole = FeatureConfig(TableConfig(2 * rows, 128, name="whole"))
    assert planning.plan(whole, o.SGD(0.1), "v5p:2x1x1", shape).stacks == 1
    with pytest.raises(ValueError, match="table 'whole'"):
        planning.plan(whole, o.SGD(0.1), "v5p:1x1x1", shape)


def test_an_exchange_in_bfloat16_sends_half(dlrm):
    plans = [
        planning.plan(*dlrm[:2], "v5p:4x4x4", dlrm[2], exchange_dtype=dtype)
        for dtype in (None, "float32", "bfloat16")
    ]
    assert plans[0].sent == plans[1].sent
    exact, rounded = plans[0].sent, plans[2].sent
    assert rounded["ids"] == exact["ids"]
    assert rounded["rows"] * 2 == exact["rows"]
    # Row numbers, and the psums of replicated tables, have the same bytes as before.
    assert sum(rounded.values()) < 0.53 * sum(exact.values())
    moved = [sum(found.moved.values()) for found in plans]
    assert moved[2] < moved[0]


def test_copies_of_a_shard_get_rounded_sums():
    """Of a single shard too, whose sums would be added by a psum if they were exact."""
    features, ids = one(500, 32, shard_axes=("b",)), shapes("x", 64, 4)
    axes = Mesh(np.array(jax.devices()).reshape(8, 1), ("a", "b"))
    exact, rounded = (
        planning.plan(features, o.Adagrad(), axes, ids, exchange_dtype=dtype)
        for dtype in (None, "bfloat16")
    )
    rows = 8 * exact.spec.stacks[0].partials
    assert rounded.sent["gradients"] == rows * (32 * 2 + 4) < exact.sent["gradients"]


F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

# Argument bytes that libtpu 0.0.42 gave for v5p, less 512 for the ids beside them.
REPORTED = {
    ((1000, 16), F32): 65_536,
    ((1000, 16), BF16): 32_768,
    ((1000, 128), BF16): 256_000,
    ((1000, 100), F32): 425_984,
    ((1000,), F32): 4_096,
    ((4001, 130), F32): 2_228_224,
    ((4001, 128), F32): 2_052_096,
}


def test_tiled():
    assert {key: tiled_bytes(*key) for key in REPORTED} == REPORTED
    assert untiled_bytes((1000, 16), BF16) == 32_000


def test_readable():
    assert [readable(n) for n in (0, 1023, 1024, 2**20 - 1, 1.5 * 2**40, 2**60)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 TiB", "1048576.0 TiB",
    ]  # fmt: skip


# Devices that libtpu 0.0.42 describes.
DEVICES = {"v2:2x2": 8, "v3:2x2": 8, "v4:2x2x1": 4, "v5e:2x2": 4, "v5p:2x2x1": 4, "v6e:2x2": 4,
           "tpu7x:2x2x1": 8}  # fmt: skip


def test_topologies():
    assert {name: Topology(name).devices for name in DEVICES} == DEVICES


@pytest.mark.parametrize(("largest", "larger"), [("v5e:16x16", "v5e:32x16"),
                                                ("v5p:16x20x28", "v5p:16x24x28")])  # fmt: skip
def test_no_slice_is_larger_than_a_pod(largest, larger):
    Topology(largest)
    with pytest.raises(ValueError, match=r"topology: expected at most .* chips, a pod of v5"):
        Topology(larger)


# -- `placement="auto"`: what is replicated and why, and that nothing else changes -----------------


def _auto(rows, dim=4, **options):
    return TableConfig(rows, dim, placement="auto", **options)


EACH = o.SGD(use_gradient_accumulation=False)
CASES = {
    "tiny": (_auto(4096), 8, "replicated", "tiny, 64.0 KiB"),
    "large": (_auto(4097), 8, "mod", "64.0 KiB, over 64.0 KiB"),
    "narrow": (_auto(8192, dtype="bfloat16"), 8, "replicated", "tiny, 64.0 KiB"),
    "alone": (_auto(10), 1, "mod", "one device"),
    "axes": (_auto(10, shard_axes=("d",)), 8, "mod", "shard_axes given"),
    "each": (_auto(10, optimizer=EACH), 8, "mod", "its optimizer does not accumulate gradients"),
    "fixed": (_auto(10, optimizer=EACH, trainable=False), 8, "replicated", "tiny, 160 B"),
    "vast": (_auto(2**30), 8, "mod", "16.0 GiB, over 64.0 KiB"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case(case):
    table, devices, placement, why = CASES[case]
    batch = {"x": jax.ShapeDtypeStruct((8,), np.int32)}
    (found,) = planning.plan({"x": FeatureConfig(table)}, o.SGD(), mesh(devices), batch).tables
    assert (found.placement, found.why) == (placement, why)


def test_not_too_many_are_replicated():
    features = [FeatureConfig(_auto(4096, name=f"t{i:04d}")) for i in range(1025)]
    chosen = [feature.table.placement for feature in planning.resolve(features, mesh=mesh(2))]
    assert (chosen.count("replicated"), chosen.count("mod")) == (1024, 1)


def test_what_is_not_auto_is_the_same_object():
    shared, other = _auto(10), TableConfig(10, 4)
    features = {"a": FeatureConfig(shared), "b": [FeatureConfig(other), FeatureConfig(shared)]}
    resolved = planning.resolve(features, mesh=mesh(2))
    assert resolved["a"].table is resolved["b"][1].table
    assert resolved["a"].table.placement == "replicated"
    assert resolved["b"][0].table is other
    assert shared.placement == "auto"
    assert planning.resolve(resolved, mesh=mesh(2)) is resolved
    plain = {"b": FeatureConfig(other)}
    assert planning.resolve(plain, mesh=mesh(2)) is plain


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.quick(1)
def test_the_facade_resolves(devices):
    """Tables are keyed by what was declared, and have the bits of the placement chosen."""
    tiny, large = _auto(10, name="tiny"), _auto(5000, name="large")
    features = {"tiny": FeatureConfig(tiny), "large": FeatureConfig(large)}
    embedding = tpu_embed.TPUEmbedding(features, o.SGD(0.5), mesh=mesh(devices))
    embedding.enqueue({name: np.arange(4) for name in features})
    embedding.apply_gradients(jax.tree.map(np.ones_like, embedding.dequeue()))
    resolved = planning.resolve(features, o.SGD(0.5), mesh=mesh(devices))
    engine = tpu_embed.EmbeddingEngine(resolved, o.SGD(0.5), mesh=mesh(devices))
    before = engine.tables(engine.init(jax.random.key(0)))
    for table in (tiny, large):
        expected = np.array(before[table.name])
        expected[:4] -= 0.5
        np.testing.assert_array_equal(embedding.embedding_tables[table], expected)
    placed = embedding.describe()["tables"]
    assert placed["tiny"]["placement"] == ("replicated" if devices > 1 else "mod")
    assert placed["large"]["placement"] == "mod"
