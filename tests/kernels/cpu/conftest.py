"""Kernels are compiled by Numba, whatever the version of JAX: of a file's, one share tests all."""

import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.divided(by="file"))
