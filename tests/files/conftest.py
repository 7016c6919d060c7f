import pytest

# A program for an environment of its own, and no test.
collect_ignore = ["make_references.py"]


@pytest.fixture
def mutations(request):
    """How many changes a file is spoilt by."""
    return 1000 if request.config.getoption("all") else 100
