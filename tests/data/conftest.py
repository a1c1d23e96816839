"""No test of this folder leaves a thread behind."""

import gc

import pytest
from data_cases import threads, wait_for


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if threads():
        gc.collect()
    wait_for(lambda: not threads())
