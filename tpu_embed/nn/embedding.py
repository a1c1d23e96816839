"""Layers that look ids up: `Embeddings` has all tables of a model, the others have one.

`Embed` gives a row per id, `EmbeddingBag` one per bag. The activations of a layer can be
differentiated by weights but not by the tables, which `gradients.py` trains.

`place` and `admit` do so for several layers of a model, one after the other. A model with one
`Embeddings` needs neither: `model.rows.place(ids)` places all or nothing.

Input: ids as integers, sparse or ragged ids, or a placed batch; a model, and ids by the path of
their layer. Output: activations; batches by the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpu_embed._checks import check_choice, check_type, refuse
from tpu_embed._types import Array, ArrayLike, PyTree, as_array
from tpu_embed.config import FeatureConfig, Keep, OnBadId, TableConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.ids import RaggedIds, SparseIds, read_ids
from tpu_embed.nn.layer import FEATURE, Activations, TableLayer, path_of
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import DynamicVocabulary

Ids = ArrayLike | Batch | SparseIds | RaggedIds | Mapping[str, Any]


@final
class Embeddings(TableLayer):
    """All tables of a model, sharded over a mesh: one engine, one lookup of all features.

    Tables of one size and optimizer are stacked, so a step has few kernels and is compiled fast.
    Its variables are `Table`s, `Slot`s and `Counter`s. None of them is an `nnx.Param`:
    `fused_value_and_grad` trains them, `nnx.value_and_grad` and `nnx.Optimizer` leave them alone.
    With keys, or with rows on the host, it takes only batches that `place` returned.

    Args:
      features: `FeatureConfig`s in any nesting; several may share a table.
      optimizer: the optimizer of tables that have none of their own.
      mesh: the devices; None means the mesh of `jax.set_mesh`, or else one axis over all devices.
      batch_axes: the mesh axes that split a batch; None means all.
      lookahead: with dynamic vocabularies; see `EmbeddingEngine`.
      rngs: random streams; `params` initializes the rows.
      options: further arguments of `EmbeddingEngine`, such as `exchange_dtype`.

    Attributes:
      engine: the `EmbeddingEngine`, which a `Prefetcher` takes.

    Raises:
      ValueError: whatever `EmbeddingEngine` refuses; a learning rate that is a callable without
        arguments.

    Example:
      >>> import tpu_embed
      >>> films = tpu_embed.FeatureConfig(tpu_embed.TableConfig(100, 4, combiner="mean"))
      >>> rule = tpu_embed.optimizers.SGD(0.1)
      >>> rows = Embeddings({"film": films, "seen": films}, rule, rngs=nnx.Rngs(0))
      >>> found = rows({"film": np.array([3, 5]), "seen": np.array([[3, 5, -1], [7, -1, -1]])})
      >>> found["film"].shape, found["seen"].shape
      ((2, 4), (2, 4))
    """

    def __init__(
        self,
        features: PyTree,
        optimizer: Any = None,
        *,
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        lookahead: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.begin(
            features,
            optimizer,
            rngs,
            mesh=mesh,
            batch_axes=batch_axes,
            lookahead=lookahead,
            **options,
        )

    def __call__(
        self, ids: PyTree | Batch | Activations, weights: PyTree | None = None
    ) -> PyTree:
        """Return the activations of all features.

        Args:
          ids: a batch that `place` returned; or integers `[B, …]`, columns, `SparseIds` or
            `RaggedIds`, in the structure of the features; or what `fit` has looked up.
          weights: one weight per id, in the same structure; they can be differentiated by.

        Returns:
          in the same structure `[B, …, D]`, float32 at least, or a `Jagged`.

        Raises:
          ValueError, TypeError: whatever `EmbeddingEngine.lookup` refuses; keys, or a batch of keys
            that is not admitted.
        """
        if isinstance(ids, Activations):
            if weights is not None:
                refuse(
                    "weights",
                    expected="None with what was looked up",
                    got="a value",
                    remedy="weights belong to ids",
                )
            return ids.found
        return self.look_up(ids, weights)


@final
class EmbeddingBag(TableLayer):
    """A table, sharded over a mesh, whose rows are looked up and combined bag by bag.

    Its variables are a `Table`, `Slot`s and `Counter`s. None of them is an `nnx.Param`:
    `fused_value_and_grad` trains them, `nnx.value_and_grad` and `nnx.Optimizer` leave them alone.
    The map of a table with `vocabulary=DynamicVocabulary(…)` is `engine.vocabularies`, which is no
    variable; the layer then takes only batches that `place` returned, as with rows on the host.

    Args:
      table: the table's vocabulary, dim, combiner, initializer, dtype, placement and optimizer.
      optimizer: the optimizer of a table that has none itself.
      max_sequence_length: L; if L > 0, a bag is a sequence, whose activation has L rows.
      jagged: whether a bag is a sequence whose activation is a `Jagged`; L > 0 cuts it.
      keep: of a sequence longer than L, the "first" rows or the "last" ones are kept.
      on_bad_id: "error", "drop" or "clip". Inside a jit "error" drops the id, and a training step
        counts it in `bad_ids`.
      mesh: the devices; None means the mesh of `jax.set_mesh`, or else one axis over all devices.
      batch_axes: the mesh axes that split a batch; None means all.
      lookahead: of a table with a dynamic vocabulary; see `EmbeddingEngine`.
      rngs: random streams; `params` initializes the rows.

    Raises:
      ValueError: whatever `EmbeddingEngine` refuses; a learning rate that is a callable without
        arguments.

    Example:
      >>> import tpu_embed
      >>> tags = tpu_embed.TableConfig(100, 4, combiner="sum", optimizer=tpu_embed.optimizers.SGD())
      >>> bag = EmbeddingBag(tags, rngs=nnx.Rngs(0))
      >>> bag(np.array([[3, 5, -1], [7, -1, -1]])).shape
      (2, 4)
    """

    only = FEATURE

    def __init__(
        self,
        table: TableConfig,
        *,
        optimizer: Any = None,
        max_sequence_length: int = 0,
        jagged: bool = False,
        keep: Keep = "first",
        on_bad_id: OnBadId = "error",
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        lookahead: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("on_bad_id", on_bad_id, get_args(OnBadId))
        feature = FeatureConfig(
            table, max_sequence_length, on_bad_id=on_bad_id, jagged=jagged, keep=keep
        )
        self.begin(
            {FEATURE: feature},
            optimizer,
            rngs,
            mesh=mesh,
            batch_axes=batch_axes,
            lookahead=lookahead,
        )

    def __call__(self, ids: Ids, weights: ArrayLike | None = None) -> Any:
        """Return the activations of bags.

        Args:
          ids: integers `[…, H]`, where -1 is padding; integers `[B]`, one id per example, which are
            not combined; a batch that `place` returned; `SparseIds` or `RaggedIds` of NumPy arrays;
            several of these by name.
          weights: floats or integers in the shape of the ids. They can be differentiated by.

        Returns:
          `[…, D]`, float32 at least; `[…, L, D]` for sequences; a `Jagged` for jagged ones, whose
          dense ids are `[B, H]`; a dictionary of them for several inputs by name.

        Raises:
          TypeError: the ids are not integers.
          ValueError: ids outside the table whose values are known; shapes that do not fit; sparse
            or ragged ids that are traced; keys, or a batch of keys that is not admitted.
        """
        if not isinstance(ids, (Batch, SparseIds, RaggedIds, Mapping)):
            ids, weights = _array(ids), None if weights is None else as_array(weights)
        return self.look_up(ids, weights)

    @property
    def embedding(self) -> Array:
        """A copy of the rows `[V, D]` by row id, in the table's dtype."""
        return next(iter(self.engine.tables(self.state).values()))

    @property
    def logical_slots(self) -> dict[str, Array]:
        """Copies of the optimizer's slots by name, `[V, D]` or `[V]`, in the order of the rows."""
        return next(iter(self.engine.slots(self.state).values()), {})

    def load(
        self, rows: ArrayLike, slots: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """Replace all rows, and those slots that are given.

        Args:
          rows: `[V, D]`.
          slots: slots by name, as `logical_slots` returns them.

        Raises:
          ValueError: an array has another shape, or a slot is unknown. Nothing is replaced then.
        """
        (name,) = self.engine.table_configs
        given = {name: dict(slots)} if slots else None
        self.set_state(self.engine.load_arrays(self.state, {name: rows}, given))


@final
class Embed(nnx.Module):
    """A table of vectors, sharded over a mesh, to be used in place of an `nnx.Embed`.

    It differs from `nnx.Embed` in these points. -1 is padding and gives a zero row. Ids outside the
    table are errors if their values are known; inside a jit they give a zero row, which a training
    step counts, and not NaN. Activations are float32 at least. There is no `attend`, whose gradient
    is as large as the table, and no `promote_dtype` or `embedding_metadata`. The layer inside is
    `rows`, an `EmbeddingBag`.

    Args:
      num_embeddings: V, the number of rows.
      features: D, the length of a row.
      optimizer: one of `tpu_embed.optimizers`, or a row-separable optax transform. With None the
        table is not trained; the first training step warns unless `trainable` is False.
      trainable: whether the table may change. With False it stays as it is even if there is an
        optimizer.
      dtype: the dtype of the result; None means float32 (float64 for a float64 table).
      param_dtype: the dtype of the table: float32 or bfloat16 (float64 if x64 is on).
      embedding_init: `(key, shape, dtype) -> rows`, called for one row at a time; None means a
        normal distribution with σ = 1/√D, truncated at 2 σ.
      name: the name of the table, for messages.
      on_bad_id: as in `EmbeddingBag`.
      placement: "mod", "div" or "replicated".
      mesh: the devices; None means the mesh of `jax.set_mesh`, or else one axis over all devices.
      batch_axes: the mesh axes that split a batch; None means all.
      vocabulary: a `DynamicVocabulary`, if ids are keys; then `num_embeddings` is its capacity.
      storage: a `HostStorage`, if the rows are at home on the host.
      lookahead: of a table with a dynamic vocabulary; see `EmbeddingEngine`.
      rngs: random streams; `params` initializes the rows.

    Raises:
      ValueError: whatever `TableConfig` and `EmbeddingEngine` refuse, such as another dtype, or an
        initializer that reads the fan-in; a learning rate that is a callable without arguments.

    Example:
      >>> import tpu_embed
      >>> films = Embed(1000, 8, optimizer=tpu_embed.optimizers.Adagrad(0.1), rngs=nnx.Rngs(0))
      >>> films(np.array([[3, 5], [7, 3]])).shape
      (2, 2, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        optimizer: Any = None,
        trainable: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Callable[..., Array] | None = None,
        name: str | None = None,
        on_bad_id: OnBadId = "error",
        placement: Literal["mod", "div", "replicated"] = "mod",
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        vocabulary: DynamicVocabulary | None = None,
        storage: HostStorage | None = None,
        lookahead: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        table = TableConfig(
            num_embeddings,
            features,
            initializer=embedding_init,
            optimizer=optimizer,
            name=name,
            dtype=np.dtype(param_dtype).name,
            placement=placement,
            trainable=trainable and optimizer is not None,
            vocabulary=vocabulary,
            storage=storage,
        )
        self.rows = EmbeddingBag(
            table,
            on_bad_id=on_bad_id,
            mesh=mesh,
            batch_axes=batch_axes,
            lookahead=lookahead,
            rngs=rngs,
        )
        self.trainable = trainable
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = dtype

    def __call__(self, inputs: ArrayLike | Batch) -> Array:
        """Return the rows of ids.

        Args:
          inputs: integers of any shape, -1 is padding; or a batch that `place` returned.

        Returns:
          `[*inputs.shape, D]`.

        Raises:
          TypeError: the ids are not integers.
          ValueError: ids outside the table whose values are known; keys, or a batch of keys that is
            not admitted.
        """
        if isinstance(inputs, Batch) or self.rows.engine.vocabularies is not None:
            found = self.rows(inputs)
        else:
            # One id each is not combined: [3, 5] -> [15] -> [15, D] -> [3, 5, D].
            ids, reshape = _array(inputs), self.rows.engine.layout.axes.reshape
            flat = (
                reshape(ids, (ids.size,))
                if isinstance(ids, jax.Array)
                else ids.reshape(-1)
            )
            found = reshape(self.rows(flat), (*ids.shape, self.features))
        return found if self.dtype is None else found.astype(self.dtype)

    def place(
        self, ids: ArrayLike, *, spec: BatchSpec | None = None, training: bool = True
    ) -> Batch:
        """Check ids on the host and send them to the devices; see `EmbeddingBag.place`.

        Args:
          ids: integers or keys `[B, …]`; the number of devices divides B.
          spec: the exact shape of the batch, or None.
          training: False for a batch that is only looked up.

        Raises:
          TypeError: sparse or ragged ids; whatever `EmbeddingBag.place` refuses.
          ValueError: whatever `EmbeddingBag.place` refuses.
        """
        array: Any = read_ids(FEATURE, ids)  # masked where ids are missing
        check_type(
            FEATURE,
            array,
            np.ndarray,
            expected="an array",
            remedy="an EmbeddingBag takes bags of any length",
        )
        bags = array if array.ndim == 1 else array[..., None]  # one id is not combined
        return self.rows.place(bags, spec=spec, training=training)

    @property
    def embedding(self) -> Array:
        """A copy of the rows `[V, D]` by row id."""
        return self.rows.embedding

    def load(
        self, rows: ArrayLike, slots: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """Replace all rows; see `EmbeddingBag.load`."""
        self.rows.load(rows, slots)


def _array(ids: Any) -> Any:
    # NumPy arrays stay on the host, where their values can be checked.
    if isinstance(ids, jax.Array):
        return ids
    array = np.asarray(ids)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def place(
    model: nnx.Module, features: Any, weights: Any = None, *, training: bool = True
) -> Any:
    """Place one batch for the layers of a model and admit it; the jitted step takes the result.

    Call it outside of a jit. Layers are placed one after the other, so if one refuses its ids,
    those before it have learned theirs; `Embeddings` places the batch of a model as a whole.

    Args:
      model: a module with layers; or one layer.
      features: by the path of a layer (its keys joined by slashes, such as `films` or
        `user/tags`), what its `place` takes. For one layer, what its `place` takes.
      weights: one weight per id, by path as well; a path that is absent has none.
      training: False for a batch that is only looked up; dynamic vocabularies learn nothing
        from it.

    Returns:
      a `Batch` by path; for one layer, its `Batch`.

    Raises:
      ValueError: a path without a layer, a layer under two paths, whatever the layer's `place`
        refuses.
      TypeError: features of a model that are not given by path; ids that are not integers.

    Example:
      >>> import numpy as np, tpu_embed
      >>> rule, keys = tpu_embed.optimizers.SGD(1.0), tpu_embed.DynamicVocabulary()
      >>> films = Embed(100, 2, optimizer=rule, vocabulary=keys, rngs=nnx.Rngs(0))
      >>> model = nnx.Dict(films=films)
      >>> batches = place(model, {"films": np.arange(10**12, 10**12 + 8)})
      >>> model.films(batches["films"]).shape, len(films.rows.engine.vocabularies)
      ((8, 2), 8)
    """
    by_path = {} if weights is None else _given(model, weights, "weights")

    def place_one(path, layer, ids):
        if not isinstance(layer, Embed):
            return layer.place(ids, by_path.get(path), training=training)
        if path in by_path:
            refuse(
                f"weights of layer {path!r}",
                expected="none for an Embed",
                got="some",
                remedy="use an EmbeddingBag",
            )
        return layer.place(ids, training=training)

    return _each(model, features, "features", place_one)


def admit(model: nnx.Module, batches: Any) -> Any:
    """Bring the layers' tables to the step of placed batches, one layer after the other.

    It is for batches that a `Prefetcher` has placed ahead; `place` admits them itself.

    Args:
      model: the module or layer that they were placed for.
      batches: a `Batch` by path, or the `Batch` of one layer.

    Returns:
      the admitted batches, in the same form.

    Raises:
      ValueError: whatever the layer's `admit` refuses.
      TypeError: batches of a model that are not given by path.
    """

    def admit_one(path, layer, batch):
        return (layer.rows if isinstance(layer, Embed) else layer).admit(batch)

    return _each(model, batches, "batches", admit_one)


def _each(
    model: nnx.Module, given: Any, what: str, function: Callable[[str, Any, Any], Any]
) -> Any:
    """Return `function(path, layer, one)` of all that is given, by path; of one layer the result.

    Raises:
      ValueError: a path without a layer, or two paths of one layer.
    """
    by_path = _given(model, given, what)
    nodes = ((path_of(keys), node) for keys, node in nnx.iter_graph(model))
    layers = {
        path: node for path, node in nodes if isinstance(node, Embed | TableLayer)
    }
    rows = [getattr(layers.get(path), "rows", layers.get(path)) for path in by_path]
    for path, one in zip(by_path, rows, strict=True):
        if one is None or rows.count(one) > 1:
            refuse(
                "features",
                expected=f"paths among {sorted(layers)}",
                got=f"{path!r}"
                if one is None
                else f"{path!r}, a layer that has two paths",
                remedy="name each layer once",
            )
    found = {path: function(path, layers[path], one) for path, one in by_path.items()}
    return found[""] if isinstance(model, Embed | TableLayer) else found


def _given(model: nnx.Module, given: Any, what: str) -> dict[str, Any]:
    """Return what is given by path; for one layer, under the empty path.

    Raises:
      TypeError: it is no mapping.
    """
    if isinstance(model, Embed | TableLayer):
        return {"": given}
    check_type(
        what, given, Mapping, expected="a dict by layer", remedy='give {"films": keys}'
    )
    return dict(given)
