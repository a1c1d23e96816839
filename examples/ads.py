"""From a CSV file to predictions: strings, several numbers in one string, a price, a network.

Each row is an advertisement that a user was shown: the user, a string; the pages that the user had
seen, in one string, or none; a price; and whether it was clicked. Two such files are made in the
folder where the program runs, beside `ads`, which has the run: started again, it only predicts.
"""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from flax import nnx

from tpu_embed import (
    EmbeddingEngine,
    FeatureConfig,
    TableConfig,
    fit,
    hash_ids,
    metrics,
    optimizers,
    pad_batch,
)

SIZE, STEPS = 256, 400
users, pages = TableConfig(2_000, 8, name="users"), TableConfig(40, 8, combiner="sum", name="pages")
features = {"user": FeatureConfig(users), "pages": FeatureConfig(pages)}
engine = EmbeddingEngine(features, optimizers.Adagrad(0.1, initial_accumulator_value=1e-6))


def write(path, num_rows, seed):
    """Write a file such as one of yours: advertisements, and who clicked on them."""
    rng = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["user", "pages", "price", "clicked"])
        for _ in range(num_rows):
            user, price = rng.integers(500), rng.gamma(2, 10)
            pages = rng.integers(40, size=rng.integers(5))
            liking = np.where((pages + user) % 2, -1, 1).sum() - 0.1 * (price - 20)
            clicked = rng.random() < 1 / (1 + np.exp(-liking))
            lines.writerow([f"u{user}", " ".join(map(str, pages)), f"{price:.2f}", int(clicked)])


def split_columns(rows):
    """Return ids, prices and labels of some rows."""
    ids = {
        "user": hash_ids(rows["user"], users.vocabulary_size),
        "pages": [[int(page) for page in text.split()] for text in rows["pages"]],
    }
    price = np.log1p(rows["price"].to_numpy(np.float32))
    return ids, price, rows["clicked"].to_numpy(np.float32)


def batches(rows):
    for epoch in range(1_000):
        rows = rows.sample(frac=1, random_state=epoch)
        for first in range(0, len(rows) - SIZE + 1, SIZE):
            yield split_columns(rows[first : first + SIZE])


class Network(nnx.Module):
    """What is made of the activations and the price."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(8 + 8 + 1, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, activations, price):
        inputs = [activations["user"], activations["pages"], price[:, None]]
        return self.out(nnx.relu(self.hidden(jnp.concatenate(inputs, axis=-1))))[:, 0]


def loss(network, activations, price, clicked):
    return optax.sigmoid_binary_cross_entropy(network(activations, price), clicked).mean()


def predict(trained, rows):
    """Return the probability of a click for each row."""
    scores = []
    for first in range(0, len(rows), SIZE):
        some = rows[first : first + SIZE]
        ids, price, _ = pad_batch(split_columns(some), SIZE)
        activations = engine.lookup(trained.state, ids)
        scores.append(trained.model(activations, price)[: len(some)])
    return jax.nn.sigmoid(np.concatenate(scores))


def train(source):
    model, optimizer = Network(nnx.Rngs(0)), optax.adam(1e-2)
    return fit(engine, loss, source, model=model, optimizer=optimizer, steps=STEPS, directory="ads")


def read(path):
    return pd.read_csv(path, dtype={"pages": str}).fillna({"pages": ""})


if not Path("train.csv").exists():
    write("train.csv", 20_000, seed=0)
    write("test.csv", 2_000, seed=1)
trained, test = train(batches(read("train.csv"))), read("test.csv")
clicks = predict(trained, test)
print(f"AUC of the test set: {metrics.auc(clicks, test['clicked'].to_numpy()):.4f}")
print("first rows:", *(f"{click:.3f}" for click in clicks[:3]))
