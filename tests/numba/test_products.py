"""Products and reductions over any axes and of any dtype."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

SIZES = dict(zip("abcdehijklmnst", [2, 2, 3, 5, 70, 3, 7, 11, 6, 5, 50, 67, 4, 8], strict=True))
PRODUCTS = [
    "ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "bij,bjk->bik", "bthd,bshd->bhts", "i,i->", "ij,j->i",
    "j,jk->k", "ijk,jkl->il", "ab,cd->abcd", "bthd,hdk->btk", "ij,kl->", "ij,jij->i",
]  # fmt: skip
LARGE = ["mn,ne->me", "nm,ne->me", "mn,en->me", "bmn,ben->bme", "ntm,nme->te"]


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _products(specs, dtype):
    def f(*operands):
        pairs = zip(specs, operands[::2], operands[1::2], strict=True)
        return [jnp.einsum(spec, x, y) for spec, x, y in pairs]

    sides = [side for spec in specs for side in spec.split("->")[0].split(",")]
    args = [normal(*(SIZES[letter] for letter in side)) * 3 for side in sides]
    return f, [x.astype(dtype) for x in args]


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64", "bool", "bfloat16"])
def test_python_runs_small_products_as_numpy_does(dtype):
    f, args = _products(PRODUCTS if dtype == "float32" else PRODUCTS[:3], jnp.dtype(dtype))
    vn.numba.compare_numba_and_py(f, args, native=False)
    vn.numba.compare_jax_and_py(f, args)


def test_native_products_agree_with_the_references():
    vn.numba.compare_numba_and_py(*_products(PRODUCTS, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_products_use_vectors_or_blas(dtype):
    import jax

    with jax.enable_x64(dtype == "float64"):
        f, args = _products(LARGE, dtype)
        compiled = vn.numba.compile(f, *args)
        assert f"products_f{dtype[-2:]}" in compiled.source
        for found, expected in zip(compiled(*args), f(*args), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_small_integers_are_summed_in_the_requested_dtype():
    x, y = (normal(4, 300) * 50).astype(np.int8), (normal(300, 5) * 50).astype(np.int8)
    f = lambda x, y: (jnp.dot(x, y, preferred_element_type=jnp.int32), x @ y)
    vn.numba.compare_numba_and_py(f, [x, y], native=False)
    vn.numba.compare_jax_and_py(f, [x, y])


def _reductions(x):
    results = []
    for axes in [None, 0, 1, 2, (0, 2), (1, 2), (0, 1)]:
        results += [x.sum(axes), x.max(axes), x.min(axes), (x != 1).all(axes), (x == 1).any(axes)]
        results += [x.prod(axes), jnp.mean(x, axes, keepdims=True)]
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_reductions_agree_with_numpy(dtype):
    x = (normal(2, 3, 5) * 2).astype(jnp.dtype(dtype))
    vn.numba.compare_jax_and_py(_reductions, [x], rtol=1e-2 if dtype == "bfloat16" else None)
    vn.numba.compare_numba_and_py(_reductions, [x], native=dtype == "float32")


def test_extremes_of_nan_are_nan():
    x = normal(3, 40)
    x[1, 7] = np.nan
    f = lambda x: (x.max(1), x.min(1), x.max(), x.sum(0))
    vn.numba.compare_numba_and_py(f, [x])


def test_bitwise_reductions_agree_with_numpy():
    f = lambda x: [jnp.bitwise_and.reduce(x), jnp.bitwise_or.reduce(x), jnp.bitwise_xor.reduce(x)]
    vn.numba.compare_numba_and_py(f, [np.array([12, 13, 6], np.int32)], native=False)


def test_algorithms_in_another_dtype_raise():
    x = np.eye(3, dtype=np.float32)
    f = lambda name: lambda x: jnp.dot(x, x, precision=getattr(lax.DotAlgorithmPreset, name))
    vn.numba.compare_numba_and_py(f("F32_F32_F32"), [x], native=False)
    with pytest.raises(NotImplementedError, match="precision: F16_F16_F16 is not supported"):
        vn.numba.compile(f("F16_F16_F16"), x)
