"""Fourier transforms of all types, of lengths with small and with large prime factors."""

import jax
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.numba.ops.fourier import radices

#: By whether numbers have 64 bits.
RTOL = {False: 1e-4, True: 1e-11}
#: Lengths with each kind of pass. 97 and 3 * 53 take Bluestein's algorithm.
LENGTHS = [1, 2, 3, 4, 5, 8, 12, 30, 43, 64, 97, 159]


@pytest.fixture(params=RTOL, ids=["single", "double"])
def double(request):
    with jax.enable_x64(request.param):
        yield request.param


def operand(kind, shape, double):
    """Return numbers whose transform has a shape."""
    if kind == "IRFFT":
        shape = (*shape[:-1], shape[-1] // 2 + 1)
    parts = np.random.default_rng(0).normal(size=(2, *shape))
    x = parts[0] if kind == "RFFT" else parts[0] + 1j * parts[1]
    return x.astype(x.dtype if double else {"f": "f4", "c": "c8"}[x.dtype.kind])


def check(operands, lengths, double, native=False):
    def f(operands):
        return {
            kind: lax.fft(x, getattr(lax.FftType, kind), lengths) for kind, x in operands.items()
        }

    vn.numba.compare_jax_and_py(f, [operands], rtol=RTOL[double])
    vn.numba.compare_numba_and_py(f, [operands], rtol=RTOL[double], native=native)


KINDS = ["FFT", "IFFT", "RFFT", "IRFFT"]


@pytest.mark.parametrize("n", LENGTHS)
def test_transforms_of_many_lengths_agree_with_jax(n, double):
    operands = {kind: operand(kind, (2, n), double) for kind in KINDS}
    check(operands, (n,), double)


@pytest.mark.parametrize("shape", [(3, 4), (5, 4, 3), (2, 0, 3, 5), (0, 6), (2, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("n_axes", [1, 2, 3])
def test_transforms_along_any_axes_agree_with_jax(shape, n_axes, double):
    lengths = shape[-n_axes:]
    if n_axes > len(shape) or 0 in lengths:
        pytest.skip("JAX has no such transform")
    check({kind: operand(kind, shape, double) for kind in KINDS}, lengths, double)


def test_native_code_agrees_with_the_references(double):
    for shape in [(2, 60, 7), (3, 106)]:
        operands = {kind: operand(kind, shape, double) for kind in KINDS}
        check(operands, shape[1:], double, native=True)


def test_a_derivative_and_a_convolution_agree_with_jax():
    def f(x):
        return jax.numpy.fft.irfft(jax.numpy.fft.rfft(x) * jax.numpy.fft.rfft(x[::-1]), x.size)

    x = np.arange(9, dtype=np.float32)
    program = lambda x: [f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)]
    vn.numba.compare_numba_and_py(program, [x], native=False, rtol=1e-4)
    np.testing.assert_allclose(vn.numba.compile(f, x)(x), f(x), 1e-4)


def test_the_product_of_the_radices_is_the_length():
    assert [radices(n) for n in (1, 2, 8, 12, 49, 97)] == [[], [2], [4, 2], [4, 3], [7, 7], [97]]
