"""Kernels, arrays in, arrays out: the core calls `dispatch`; `reference` says what they mean."""
