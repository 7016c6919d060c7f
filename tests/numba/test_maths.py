"""Errors of the functions of mathematics, in units in the last place."""

import jax
import numpy as np
import pytest
import scipy.special
from jax import lax

import veneer as vn

#: Units in the last place that results may be off, as `veneer.numba.maths.elementary` has it.
ULPS = {
    "float32": {"exp": 2, "exp2": 2, "log": 2, "log1p": 2, "expm1": 5, "tanh": 5, "logistic": 5,
                "erf": 6, "rsqrt": 2, "erf_inv": 6},
    "float64": {"exp": 2, "exp2": 2, "log": 2, "log1p": 2, "expm1": 5, "tanh": 5, "logistic": 5,
                "rsqrt": 2, "erf_inv": 6},
}  # fmt: skip
EXACT = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
    "tanh": np.tanh, "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": scipy.special.erf, "erf_inv": lambda x: np.copysign(scipy.special.erfinv(x), x),
}  # fmt: skip


def _numbers(dtype):
    """Return numbers of all sizes, with denormals and special numbers."""
    random = np.random.default_rng(0)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    any_bits = random.integers(0, np.iinfo(bits).max, 20_000, dtype=bits).view(dtype)
    usual = np.concatenate([random.normal(size=10_000) * 10, random.uniform(-1, 1, 10_000)])
    small = 10.0 ** random.uniform(-30, 0, 5000) * random.choice([-1, 1], 5000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 88.7, -87.4, -103.9, 709.7, -745.0]
    return np.concatenate(
        [any_bits, usual.astype(dtype), small.astype(dtype), np.array(special, dtype)]
    )


@pytest.mark.parametrize("dtype", ULPS)
def test_errors_are_within_the_documented_bounds(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = _numbers(dtype)
        functions = {name: getattr(lax, name) for name in ULPS[dtype]}
        f = lambda x: {name: function(x) for name, function in functions.items()}
        results = vn.numba.compile(f, x)(x)
    with np.errstate(all="ignore"):
        wide = x.astype(np.longdouble if dtype == "float64" else np.float64)
    for name, result in results.items():
        with np.errstate(all="ignore"):
            own = x.astype(np.float64) if name.startswith("erf") else wide
            exact = EXACT[name](own)
            rounded = exact.astype(dtype)
        finite = np.isfinite(rounded) & np.isfinite(result)
        np.testing.assert_array_equal(result[~finite], rounded[~finite], name)
        off = np.abs(result[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite]))
        assert off.max() <= ULPS[dtype][name], name
        zeros = rounded == 0
        np.testing.assert_array_equal(np.signbit(result[zeros]), np.signbit(rounded[zeros]), name)
