"""Of the formats, shapes and programs of a test here, a share has some: see support/shares.py."""

import pytest


def pytest_itemcollected(item):
    # They cost the most, and little of what they say depends on the version of JAX: what does is
    # in tests of the transformations, and in most tests here together.
    if hasattr(item, "callspec"):
        item.add_marker(pytest.mark.divided)
