"""Losses with two lookups of one table, one of which is cut from the value in some way.

`look(ids)` is any lookup: `embedding_lookup` of a plain table, or a layer. Every case looks up
`KEPT`, which reaches the value by the sum of squares, and `CUT`, which does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

KEPT, CUT = np.array([4, 1, 4]), np.array([5, 4, 0])


def _drop(rows):
    return jnp.float32(0)


FORMS = {
    "stop_gradient": lambda rows: lax.stop_gradient(rows).sum(),
    "unused": _drop,
    "argmax": lambda rows: rows.argmax().astype(jnp.float32),
    "comparison": lambda rows: jnp.where(rows > 0, 1.0, 2.0).sum(),
    "rounded": lambda rows: (jnp.floor(rows) + jnp.ceil(rows) * jnp.round(rows)).sum(),
    "aux": _drop,
}
"""What happens to the rows of the cut lookup; those of "aux" are returned beside the value."""

CONNECTED = {
    "times zero": lambda rows: 0 * rows.sum(),
    "not chosen": lambda rows: jnp.where(rows > 99, rows, 1.0).sum(),
    "sign": lambda rows: jnp.sign(rows).sum(),
    "relu of negative numbers": lambda rows: jax.nn.relu(rows - 99).sum(),
}
"""Uses whose gradient is zero; they count as uses nevertheless."""


def _in_scan(step, kept, cut):
    def body(total, ids):
        value, aux = step(*ids)
        return total + value, aux

    return lax.scan(body, jnp.float32(0), (kept[:, None], cut[:, None]))


def _in_dropped_carry(step, kept, cut):
    """Carry the result of the cut rows through a scan, and drop its last value."""

    def body(carry, ids):
        value, aux = step(ids[0], ids[1])
        return (carry[0] + value, carry[1] + aux.sum()), None

    (total, _), _ = lax.scan(body, (jnp.float32(0), jnp.float32(0)), (kept[:, None], cut[:, None]))
    return total, None


def _in_cond(step, kept, cut):
    def other(kept, cut):
        return jnp.float32(1), jnp.zeros_like(jax.eval_shape(step, kept, cut)[1])

    return lax.cond(kept.sum() > 0, step, other, kept, cut)


def _in_vmap(step, kept, cut):
    values, aux = jax.vmap(step)(kept[:, None], cut[:, None])
    return values.sum(), aux


PLACES = {
    "plain": lambda step, kept, cut: step(kept, cut),
    "jit": lambda step, kept, cut: jax.jit(step)(kept, cut),
    "remat": lambda step, kept, cut: jax.checkpoint(step)(kept, cut),
    "scan": _in_scan,
    "dropped carry": _in_dropped_carry,
    "cond": _in_cond,
    "vmap": _in_vmap,
    "jit of scan of remat": lambda step, *ids: jax.jit(_in_scan, static_argnums=0)(
        jax.checkpoint(step), *ids
    ),
}
"""Where both lookups are made. Each is called with a step from both ids to a value and the rows."""

PAIRS = [(form, "plain") for form in FORMS] + [("stop_gradient", place) for place in PLACES]
PAIRS = list(dict.fromkeys([*PAIRS, ("argmax", "scan"), ("aux", "cond"), ("unused", "jit")]))
"""Every form and every place at least once, for tests that are slow to compile."""


def loss_of(form, place="plain"):
    """Return a loss `(look) -> (value, aux)`; `form` is a name, or a function of the cut rows."""
    use = FORMS.get(form, form)

    def loss(look):
        def step(kept, cut):
            rows = look(cut)
            return (look(kept) ** 2).sum() + use(rows), rows

        value, aux = PLACES[place](step, jnp.asarray(KEPT), jnp.asarray(CUT))
        return value, aux if form == "aux" else None

    return loss
