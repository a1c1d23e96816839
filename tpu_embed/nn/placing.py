"""Place a batch for several layers of a model, one after the other, and admit it.

A model with one `Embeddings` needs none of this: `model.rows.place(ids)` places all or nothing.

Input: a model, and keys or ids by the path of their layer. Output: batches by the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from tpu_embed._checks import message
from tpu_embed.nn.embedding import Embed
from tpu_embed.nn.gradients import path_of
from tpu_embed.nn.layer import TableLayer


def place(model: nnx.Module, features: Any, weights: Any = None, *, training: bool = True) -> Any:
    """Place one batch for the layers of a model and admit it; the jitted step takes the result.

    Call it outside of a jit. Layers are placed one after the other, so if one refuses its ids,
    those before it have learned theirs; `Embeddings` places the batch of a model as a whole.

    Args:
      model: a module with layers; or one layer.
      features: by the path of a layer (its keys joined by slashes, such as `films` or
        `user/tags`), what its `place` takes. For one layer, what its `place` takes.
      weights: one weight per id, by path as well; a path that is absent has none.
      training: False for a batch that is only looked up; living vocabularies learn nothing from it.

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

    def place_one(path: str, layer: Any, ids: Any) -> Any:
        if not isinstance(layer, Embed):
            return layer.place(ids, by_path.get(path), training=training)
        if path in by_path:
            raise ValueError(
                message(
                    f"weights of layer {path!r}",
                    expected="none for an Embed",
                    got="some",
                    remedy="use an EmbeddingBag",
                )
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

    def admit_one(path: str, layer: Any, batch: Any) -> Any:
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
    layers = {path: node for path, node in nodes if isinstance(node, Embed | TableLayer)}
    rows = [getattr(layers.get(path), "rows", layers.get(path)) for path in by_path]
    for path, one in zip(by_path, rows, strict=True):
        if one is None or rows.count(one) > 1:
            raise ValueError(
                message(
                    "features",
                    expected=f"paths among {sorted(layers)}",
                    got=f"{path!r}" if one is None else f"{path!r}, a layer that has two paths",
                    remedy="name each layer once",
                )
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
    if not isinstance(given, Mapping):
        raise TypeError(
            message(
                what,
                expected="a dict by layer",
                got=type(given).__name__,
                remedy='give {"films": keys}',
            )
        )
    return dict(given)
