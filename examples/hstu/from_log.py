"""From a log of events to a served model: cut it into histories, train a ranker, export it, ask it.

A log is three columns: who, what and when. A request is a history, the time now, and some
candidates, of which one is chosen. To learn from the log, each user's history is cut somewhere: the
next event is the candidate that was chosen, and the others are drawn. The model cannot tell
candidates by their order, so the chosen one may come first.

Writes a checkpoint, `recommender`, and the export, `served`, into the folder where it runs.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ranker import Ranker, Requests, feature_config, listwise_losses, served

import tpu_embed
from tpu_embed import RaggedIds, TableConfig
from tpu_embed.data import EventValues
from tpu_embed.io import export_model, load_model, save
from tpu_embed.nn import on_each_replica

rng = np.random.default_rng(0)
log = {"user": rng.integers(80, size=2_000), "time": np.sort(rng.integers(10**6, size=2_000))}
log["item"] = (np.arange(2_000) + 7 * log["user"]) % 500

order = np.lexsort((log["time"], log["user"]))
user, item, when = (log[name][order].astype(np.int32) for name in ("user", "item", "time"))
ends = np.flatnonzero(np.diff(user)) + 1
bought, whens = np.split(item, ends), np.split(when, ends)

LONGEST, SHOWN = 64, 8


def requests_of(rng, count):
    """Return features, times of the events and times of the requests."""
    seen, times, now = [], [], np.zeros(count, np.int32)
    shown = rng.integers(500, size=(count, SHOWN)).astype(np.int32)
    for i, user in enumerate(rng.choice(len(bought), count)):
        end = rng.integers(1, len(bought[user]))
        begin = max(end - LONGEST, 0)
        seen.append(bought[user][begin:end])
        times.append(whens[user][begin:end])
        shown[i, 0], now[i] = bought[user][end], whens[user][end]
    return {"history": RaggedIds.from_lists(seen), "candidates": shown}, times, now


features = feature_config(TableConfig(500, 16, name="items"))
engine = tpu_embed.EmbeddingEngine(features, tpu_embed.optimizers.Adam(0.01))


def batches():
    """Yield features, times of the events and times of the requests."""
    for _ in range(30):
        ids, times, now = requests_of(rng, 32)
        yield ids, EventValues("history", np.concatenate(times)), now


def loss(network, found, times, now):
    """Return the mean loss of the requests; candidate 0 of each was chosen."""
    graph, params = nnx.split(network)

    def of_replica(params, found, times, now):
        requests = Requests(found["history"], found["candidates"], times, now)
        chosen = jnp.zeros(len(now), jnp.int32)
        return listwise_losses(nnx.merge(graph, params)(requests), chosen)

    each = on_each_replica(engine, of_replica)
    return each(params, found, times, now.reshape(len(times.values), -1)).mean()


network = Ranker(1, 16, 2, longest=LONGEST, buckets=24, block=32, rngs=nnx.Rngs(0))
trained = tpu_embed.fit(
    engine, loss, batches(), model=network, optimizer=optax.adam(0.01), report_every=5
)

# Tables and network, for one request of up to 64 events and 500 candidates, each padded with -1;
# the history is computed once, not 500 times.
state, network = trained.state, trained.model
save("recommender", engine, state)
tables = {name: np.asarray(table) for name, table in engine.tables(state).items()}
example = {"history": np.zeros((1, LONGEST), np.int32), "candidates": np.zeros((1, 500), np.int32)}
times, now = np.zeros((1, LONGEST), np.int32), np.zeros(1, np.int32)
export_model("served", served(network), tables, features, example, inputs=(times, now), batch=1)

events = len(bought[3][-LONGEST:])
seen = np.full((1, LONGEST), -1, np.int32)
seen[0, :events], times[0, :events] = bought[3][-LONGEST:], whens[3][-LONGEST:]
request = {"history": seen, "candidates": np.arange(500, dtype=np.int32)[None]}
scores = load_model("served")(request, times, np.array([10**6], np.int32))
best = np.argsort(-np.asarray(scores)[0])[:10]
print("the ten best for user 3:", *best)
