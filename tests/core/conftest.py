"""What tests of the core share."""

import pytest


@pytest.fixture(scope="session")
def refused():
    """Return a function that checks that a call is refused with an error that says something."""

    def check(says, call, *given, error=ValueError, **options):
        with pytest.raises(error, match=says):
            call(*given, **options)

    return check
