"""The cache keys of programs, and the arguments that `.raw` rejects."""

import importlib
import sys

import numpy as np
import pytest

import veneer as vn
from veneer.numba.maths import instructions

X = np.ones(2, np.float32)

MODULE = """
import numpy as np
from veneer.numba.maths.instructions import scalar

SHIFT, TABLE = {shift}, np.array([{shift}])

@scalar
def number(x):
    return x + np.float32(SHIFT)

@scalar
def table(x):
    return x + np.float32(TABLE[0])

@scalar
def default(x, by=SHIFT):
    return x + np.float32(by)

@scalar
def calls(x):
    return number(x)
"""


def test_the_key_depends_on_global_values_of_functions(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    modules = []
    for shift in (1, 2):
        (tmp_path / f"shifts{shift}.py").write_text(MODULE.format(shift=shift))
        modules.append(importlib.import_module(f"shifts{shift}"))
    for name in ("number", "table", "default", "calls"):
        first, second = (instructions.key_of(getattr(module, name)) for module in modules)
        assert first != second, name  # their lines are the same


def test_raw_rejects_numbers_that_it_would_round():
    import numba

    raw = vn.numba.compile(lambda n, x: n * x, np.int32(1), X).raw
    assert raw(3, X)[0] == 3
    with pytest.raises(numba.TypingError, match="an argument is float64, for a number of int32"):
        raw(1.5, X)
    with pytest.raises(numba.TypingError, match=r"array\(int32, 1d, C\), for .* with 0 axes"):
        raw(np.ones(2, np.int32), X)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_raw_rejects_integers_that_do_not_fit(dtype):
    raw = vn.numba.compile(lambda n: n, np.zeros((), dtype)).raw
    limits = np.iinfo(dtype)
    for number in (limits.min, limits.max, np.uint64(limits.max)):
        assert raw(number) == number
    for number in (limits.min - 1, limits.max + 1, np.uint64(2**64 - 1)):
        with pytest.raises(OverflowError, match=f"argument 0 does not fit into {dtype}"):
            raw(number)


def test_raw_rejects_half_precision():
    half = vn.numba.compile(lambda x: x + 1, X.astype(np.float16))
    with pytest.raises(NotImplementedError, match=r"float16.*no \.raw.*float32"):
        _ = half.raw


def test_a_dict_with_another_key_raises():
    doubled = vn.numba.compile(lambda tree: tree["x"] * 2, {"x": X})
    np.testing.assert_array_equal(doubled({"x": X}), X * 2)
    with pytest.raises(TypeError, match="structure"):
        doubled({"y": X})
