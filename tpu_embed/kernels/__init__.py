"""Reading, writing, sorting and summing rows, by the fastest means of each platform.

`dispatch` chooses the implementation of a kernel, `reference` defines its results.
"""
