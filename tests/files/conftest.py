import pytest

# A program that needs its own environment, not a test.
collect_ignore = ["make_references.py"]


@pytest.fixture
def mutations(request):
    """Return how many damaged variants of a file a test tries."""
    return 1000 if request.config.getoption("all") else 100
