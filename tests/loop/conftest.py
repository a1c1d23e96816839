"""What all tests of `fit` run under."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promote():
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        yield
