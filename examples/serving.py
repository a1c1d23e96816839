"""Train a small ranker, export it, and call it in a second process with only JAX and NumPy.

    python examples/serving.py --directory build/ranker

The second process runs this file with `--serve`. It must not import tpu_embed, so the imports of
the first process are inside functions.
"""

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

USERS, FILMS, BATCH, BAG = 200, 1_000, 64, 5
KINDS = ("float32", "int8")


def draw(rng):
    """Return the ids of one batch, and whether each user liked the film.

    Users like films of the genre (id mod 4) that they have seen more often.
    """
    user, film = rng.integers(0, USERS, BATCH), rng.integers(0, FILMS, BATCH)
    seen = rng.integers(0, FILMS, (BATCH, BAG))
    seen[rng.random((BATCH, BAG)) < 0.3] = -1  # padding
    alike = ((seen % 4 == (film % 4)[:, None]) & (seen >= 0)).sum(1)
    liked = rng.random(BATCH) < np.where(alike > 1, 0.9, 0.1)
    return {"user": user, "film": film, "seen": seen}, liked.astype(np.float32)


def score(parameters, activations):
    """Return the logit `[B]` of the probability that each user likes the film."""
    user, film, seen = activations["user"], activations["film"], activations["seen"]
    return ((user + seen) * film) @ parameters["kernel"] + parameters["bias"]


def train(steps):
    """Train; return the feature configs, the engine, its state and the model's parameters."""
    from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
    from tpu_embed.optimizers import Adagrad

    users, films = TableConfig(USERS, 16, name="users"), TableConfig(FILMS, 16, name="films")
    features = jax.tree.map(FeatureConfig, {"user": users, "film": films, "seen": films})
    engine = EmbeddingEngine(features, Adagrad(0.3))
    state = engine.init(jax.random.key(0))
    parameters = {"kernel": jnp.ones(16), "bias": jnp.zeros(())}

    def loss_fn(parameters, activations, liked):
        logit = score(parameters, activations)
        return jnp.mean(jnp.logaddexp(0.0, logit) - liked * logit)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, parameters, batch, liked):
        activations = engine.lookup(state, batch)
        loss, gradients = jax.value_and_grad(loss_fn, (0, 1))(parameters, activations, liked)
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients[0])
        return engine.update(state, batch, gradients[1]), parameters, loss

    rng = np.random.default_rng(0)
    for i in range(steps):
        ids, liked = draw(rng)
        state, parameters, loss = step(state, parameters, engine.place(ids), liked)
        if i in (0, steps - 1):
            print(f"step {i + 1}: loss {loss:.4f}")
    return features, engine, state, parameters


def export(root, features, engine, state, parameters):
    """Export the model twice: with its tables as they are, and with quantized tables."""
    from tpu_embed.io import export_model, quantize_rows

    def model(activations):
        return jax.nn.sigmoid(score(parameters, activations))

    ids, _ = draw(np.random.default_rng(1))
    tables = {name: np.asarray(table) for name, table in engine.tables(state).items()}
    small = {name: quantize_rows(table) for name, table in tables.items()}
    export_model(root / "float32", model, tables, features, ids)
    export_model(root / "int8", model, small, features, ids)


def serve(root):
    """Call an exported model with JAX and NumPy alone; print its outputs for three examples."""
    from jax import export as jax_export

    metadata = json.loads((root / "metadata.json").read_text())
    program = jax_export.deserialize(bytearray((root / "model.stablehlo").read_bytes()))
    tables = {
        name: {part: np.load(root / f["file"], mmap_mode="r") for part, f in table["files"].items()}
        for name, table in metadata["tables"].items()
    }
    ids, _ = draw(np.random.default_rng(2))
    ids = {path: array[:3].astype(np.int32) for path, array in ids.items()}
    likely = jax.jit(program.call)(tables, ids, {})
    assert "tpu_embed" not in sys.modules
    size = sum(file.stat().st_size for file in root.rglob("*.npy"))
    print(f"{root.name}: {size} bytes of tables,", *(f"{p:.6f}" for p in likely))


def main():
    parser = argparse.ArgumentParser(description="Train, export, serve.")
    parser.add_argument("--directory", type=Path, default=Path("build/ranker"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--serve", type=Path, help="call the model in this directory")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from tpu_embed.io import serving_lookup

    for kind in KINDS:
        if (arguments.directory / kind).exists():
            parser.error(f"{arguments.directory / kind} is there: remove it, or give --directory")
    features, engine, state, parameters = train(arguments.steps)
    export(arguments.directory, features, engine, state, parameters)
    ids, _ = draw(np.random.default_rng(2))
    activations = serving_lookup(engine.tables(state), ids, features)
    likely = jax.nn.sigmoid(score(parameters, activations))[:3]
    print("this process:", *(f"{p:.6f}" for p in likely), flush=True)
    for kind in KINDS:
        command = [sys.executable, __file__, "--serve", str(arguments.directory / kind)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
