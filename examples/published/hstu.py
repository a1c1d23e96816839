"""HSTU on Amazon's reviews: the next item of each user, of all items.

The file has no times, so attention has biases by position alone. The loss is a softmax over cosines
of the next item and of items drawn at random, divided by a temperature.
"""

import beside  # noqa: F401, finds the modules that examples share
from hstu_network import HSTU
from reviews import main

if __name__ == "__main__":
    main(__doc__, "hstu_amazon.py", HSTU)
