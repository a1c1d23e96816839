"""Random bags of ids as lists, with weights, for tests of all kinds of input."""


def draw_bags(rng, count, rows, longest=4):
    """Return `count` lists of up to `longest` ids in [0, rows)."""
    return [rng.integers(0, rows, rng.integers(0, longest + 1)).tolist() for _ in range(count)]


def draw_weights(rng, lists):
    """Return weights of lists of ids, with zeros and negative ones among them."""
    return [[float(w) for w in rng.choice([-1.5, 0.0, 0.5, 2.0], len(bag))] for bag in lists]
