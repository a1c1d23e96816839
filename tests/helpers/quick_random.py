"""A short hash in place of the one that JAX's random numbers are made with, on CPUs.

In each program that draws, XLA takes a quarter of a second to compile the twenty rounds of
Threefry, ten times as long as this hash. It is replaced where JAX lowers it. So random keys have
their kind, and what is made of them (bits, splits, numbers of a distribution) is made as always;
only the bits are others. Nothing in the package depends on them. Programs that tests start by
themselves, such as the examples of several processes, draw with Threefry.
"""

import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir


def install():
    """Replace the hash in this process, in programs that are compiled from now on."""
    rule = mlir.lower_fun(_hash, multiple_results=True)
    mlir.register_lowering(threefry2x32_p, rule, platform="cpu")


def _hash(key_low, key_high, low, high):
    """Return two words of random bits for each key and counter, all uint32 of one shape.

    LLVM takes as long as there are ways through an expression, so there are few shifts.
    """
    key_low, key_high, low, high = jnp.broadcast_arrays(key_low, key_high, low, high)
    first = _mix(low + key_low * np.uint32(0x9E3779B1))
    second = _mix(high + key_high * np.uint32(0x85EBCA77) + first)
    return first + second * np.uint32(0xC2B2AE3D), second * np.uint32(0x27D4EB2F)


def _mix(word):
    word = (word + np.uint32(0x3C6EF372)) * np.uint32(0x7FEB352D)
    return (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
