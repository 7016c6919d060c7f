"""Of the formats, shapes and programs of a test here, a share has some: see support/shares.py."""

import pytest


def pytest_itemcollected(item):
    # What depends on the version of JAX is in the tests of transformations, for every type.
    if hasattr(item, "callspec"):
        item.add_marker(pytest.mark.divided)
