"""Calls of compiled functions, with and without a known memory layout of Python objects."""

import subprocess
import sys
import sysconfig
import warnings

import numpy as np
import pytest

import veneer as vn
from veneer.numba import entry as layout

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def has_known_layout():
    """Return `has_known_layout`, with an empty cache before and after the test."""
    layout.has_known_layout.cache_clear()
    yield layout.has_known_layout
    layout.has_known_layout.cache_clear()


@pytest.fixture
def unknown_layout(monkeypatch, has_known_layout):
    monkeypatch.setattr(layout, "_CPYTHON_VERSIONS", ((2, 7), (3, 0)))
    with pytest.warns(RuntimeWarning, match="does not know the memory layout"):
        assert not has_known_layout()


def test_the_layout_of_this_python_and_numpy_is_known(has_known_layout):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert has_known_layout()


@pytest.mark.parametrize("offset", "TYPE SCALAR DATA NDIM DIMENSIONS DESCR FLAGS".split())
def test_a_wrong_offset_is_noticed(monkeypatch, has_known_layout, offset):
    monkeypatch.setattr(layout, offset, getattr(layout, offset) + 8)
    with pytest.warns(RuntimeWarning, match="does not know the memory layout"):
        assert not has_known_layout()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (sys, "version_info", (3, 15, 0)),
        (np, "__version__", "1.26.4"),
        (sysconfig, "get_config_var", lambda name: 1),
        (layout, "_NUMPY_ABI_VERSION", 0x03000000),
    ],
    ids=["Python", "NumPy", "no GIL", "ABI"],
)
def test_another_version_is_not_probed(monkeypatch, has_known_layout, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(layout, "_offsets_match", lambda: pytest.fail("probed"))
    with pytest.warns(RuntimeWarning, match="does not know the memory layout"):
        assert not has_known_layout()


@pytest.mark.usefixtures("unknown_layout")
def test_a_function_is_called_without_a_known_layout():
    f = vn.numba.compile(lambda x, n: (x * n, x.sum()), X, np.float32(1))
    for x, n in [(X, np.float32(2)), (X.astype(np.float64), 2.0), (np.asfortranarray(X), 2.0)]:
        product, total = f(x, n)
        np.testing.assert_array_equal(product, X * 2)
        assert (product.dtype, total.shape, total) == (np.float32, (), 15)
    np.testing.assert_array_equal(f.raw(X, 2.0)[0], X * 2)


@pytest.mark.usefixtures("unknown_layout")
def test_arguments_are_checked_without_a_known_layout():
    f = vn.numba.compile(lambda x: x + 1, np.ones(3, np.int32))
    np.testing.assert_array_equal(f(np.arange(3)), [1, 2, 3])
    with pytest.raises(TypeError, match="takes 1 array"):
        f(X, X)
    with pytest.raises(TypeError, match="keyword 'x'"):
        f(x=X)
    with pytest.raises(TypeError, match="Argument 0"):
        f(np.ones(4, np.int32))
    with pytest.raises(OverflowError, match="cannot hold"):
        f(np.full(3, 2**40))


@pytest.mark.usefixtures("unknown_layout")
def test_large_work_memory_is_freed_without_a_known_layout():
    f = vn.numba.compile(lambda x: (x @ x @ x).sum(), np.ones((128, 128), np.float32))
    for _ in range(3):
        assert f(np.eye(128, dtype=np.float32)) == 128


def test_the_warning_is_given_once():
    code = """
import numpy as np, veneer as vn
from veneer.numba import entry as layout
layout._CPYTHON_VERSIONS = (2, 7), (3, 0)
for scale in (2, 3):
    print(vn.numba.compile(lambda x: x * scale, np.ones(1, np.float32))(np.ones(1, np.float32)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[2.]", "[3.]"], result.stderr
    assert result.stderr.count("does not know the memory layout") == 1
