"""Kernels are compiled by Numba, whatever the version of JAX: a share of a run tests some."""

import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.divided)
