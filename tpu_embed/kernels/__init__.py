"""Kernels: arrays in, arrays out. `dispatch` is what the core calls; `reference` is what every
kernel means.
"""
