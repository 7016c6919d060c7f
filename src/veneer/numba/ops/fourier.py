"""Fourier transforms of any length.

A transform of length n makes one pass per prime factor of n, or per factor 4, each from one buffer
to another. The passes also sort (Stockham, "High-speed convolution and correlation", 1966). If a
factor is a large prime, the transform is a convolution with a chirp, whose length is a power of two
(Bluestein, "A linear filtering approach to the computation of discrete Fourier transform", 1970).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..codegen.arrays import ArrayExpr, Buffer
from ..codegen.builder import Builder
from ..codegen.registry import funcify, perform
from ..maths.instructions import scalar

#: A pass takes `radix` products per entry. For larger radices, Bluestein's algorithm takes fewer.
_LARGEST_RADIX = 43


# Passes. Entry q + s * (p + m * k) of `x` is entry k of transform p of m, in sequence q of s.


@scalar
def fourier_pass_2(to, x, roots, m, s):
    """Compute one radix-2 pass of an FFT, from the buffer `x` to the buffer `to`.

    `roots` are the n-th roots of unity, where n is the length of the FFT. `x` holds `s` interleaved
    sequences of length 2 * `m`.
    """
    for p in range(m):
        w = roots[p * s]
        for q in range(s):
            a, b = x[q + s * p], x[q + s * (p + m)]
            to[q + s * 2 * p] = a + b
            to[q + s * (2 * p + 1)] = (a - b) * w


@scalar
def fourier_pass_4(to, x, roots, m, s):
    """Compute one radix-4 pass of an FFT, from the buffer `x` to the buffer `to`.

    `roots` are the n-th roots of unity, where n is the length of the FFT. `x` holds `s` interleaved
    sequences of length 4 * `m`.
    """
    quarter = roots[m * s]
    for p in range(m):
        w1, w2, w3 = roots[p * s], roots[2 * p * s], roots[3 * p * s]
        for q in range(s):
            a, b = x[q + s * p], x[q + s * (p + m)]
            c, d = x[q + s * (p + 2 * m)], x[q + s * (p + 3 * m)]
            even, odd = a + c, b + d
            less, turned = a - c, (b - d) * quarter
            to[q + s * 4 * p] = even + odd
            to[q + s * (4 * p + 1)] = (less + turned) * w1
            to[q + s * (4 * p + 2)] = (even - odd) * w2
            to[q + s * (4 * p + 3)] = (less - turned) * w3


@scalar
def fourier_pass(to, x, roots, radix, m, s):
    """Compute one pass of an FFT with any radix, from the buffer `x` to the buffer `to`.

    `roots` are the n-th roots of unity, where n is the length of the FFT. `x` holds `s` interleaved
    sequences of length `radix` * `m`.
    """
    for p in range(m):
        for j in range(radix):
            w = roots[j * p * s]
            for q in range(s):
                total = x[q + s * p]
                for k in range(1, radix):
                    total += x[q + s * (p + m * k)] * roots[j * k % radix * (m * s)]
                to[q + s * (radix * p + j)] = total * w


_BY_RADIX = {2: fourier_pass_2, 4: fourier_pass_4}


def radices(n: int) -> list[int]:
    """Return factors of `n`, the length of an FFT: as many fours as possible, then primes."""
    factors = []
    for radix in (4, 2, *range(3, n + 1, 2)):
        while n % radix == 0 and n > 1:
            factors.append(radix)
            n //= radix
        if n == 1:
            break
    return factors


def roots_of_unity(n: int, turns: Any, dtype: np.dtype) -> np.ndarray:
    """Return the roots of unity `exp(-2 i pi turns / n)`, correctly rounded to a complex dtype.

    `turns` are integers.
    """
    angles = 2 * np.pi * (np.asarray(turns, np.int64) % n).astype(np.longdouble) / n
    parts = np.stack([np.cos(angles), -np.sin(angles)], -1)
    parts[np.abs(parts) < 1e-15] = 0  # exactly 0 at quarters of a turn
    return parts.astype(f"f{dtype.itemsize // 2}").view(dtype)[..., 0]


def _transform_rows(b: Builder, x: ArrayExpr, inverse: bool) -> ArrayExpr:
    """Transform each row of `complex[rows, n]`. An inverse transform is not divided by n."""
    n, factors = x.shape[-1], radices(x.shape[-1])
    if max(factors, default=1) > _LARGEST_RADIX:
        return _transform_by_chirps(b, x, inverse)
    table = roots_of_unity(n, np.arange(n), x.dtype)
    roots = b.constant(np.conj(table) if inverse else table)
    assert isinstance(roots, Buffer)
    here, there = b.copy(x), b.buffer(x.shape, x.dtype)
    with b.repeat(x.shape[0]) as row:
        m, s = n, 1
        for radix in factors:
            m //= radix
            arguments = f"{m}, {s})" if radix in _BY_RADIX else f"{radix}, {m}, {s})"
            function = b.function(_BY_RADIX.get(radix, fourier_pass))
            b.line(f"{function}(", there.part(row), ", ", here.part(row), ", ", roots, ", ",
                   arguments)  # fmt: skip
            here, there, s = there, here, s * radix
    return here


def _transform_by_chirps(b: Builder, x: ArrayExpr, inverse: bool) -> ArrayExpr:
    """Transform each row by Bluestein's algorithm, for a length with a large prime factor."""
    n = x.shape[-1]
    size = 1 << (2 * n - 2).bit_length()
    squares = np.arange(n, dtype=np.int64) ** 2
    chirp = roots_of_unity(2 * n, -squares if inverse else squares, np.dtype(np.complex128))
    around = np.zeros(size, np.complex128)
    around[:n] = np.conj(chirp)
    around[size - n + 1 :] = np.conj(chirp[:0:-1])
    tables = [b.constant(np.asarray(t, x.dtype)) for t in (chirp, np.fft.fft(around) / size)]
    padded = lambda x, chirp: [jnp.pad(x * chirp, [(0, 0), (0, size - n)])]
    # The inverse transform is the conjugate of the transform of the conjugate.
    multiplied = lambda x, table: [jnp.conj(x * table)]
    cut = lambda x, chirp: [jnp.conj(x[:, :n]) * chirp]
    (x,) = b.inline_function(padded, x, tables[0])
    (x,) = b.inline_function(multiplied, _transform_rows(b, x, False), tables[1])
    return b.inline_function(cut, _transform_rows(b, x, False), tables[0])[0]


def _transform_axis(b: Builder, x: ArrayExpr, axis: int, inverse: bool) -> ArrayExpr:
    """Transform a complex array along an axis. An inverse transform is divided by the length."""
    n = x.shape[axis]
    moved = (*x.shape[:axis], *x.shape[axis + 1 :], n)
    (rows,) = b.inline_function(lambda x: [jnp.moveaxis(x, axis, -1).reshape(-1, n)], x)
    rows = _transform_rows(b, rows, inverse)

    def back(x: Any) -> list[Any]:
        return [jnp.moveaxis((x / n if inverse else x).reshape(moved), -1, axis)]

    return b.inline_function(back, rows)[0]


@funcify.register("fft")
def _(b: Builder, x: ArrayExpr, *, fft_type: Any, fft_lengths: tuple[int, ...]) -> ArrayExpr:
    kind, n = jax.lax.FftType(fft_type), fft_lengths[-1]
    inverse = kind in (jax.lax.FftType.IFFT, jax.lax.FftType.IRFFT)
    last, others = x.ndim - 1, [*range(x.ndim - len(fft_lengths), x.ndim - 1)]
    if kind == jax.lax.FftType.RFFT:
        x = _transform_axis(b, b.convert(x, b.out.dtype), last, inverse)
        (x,) = b.inline_function(lambda x: [x[..., : n // 2 + 1]], x)
    elif kind != jax.lax.FftType.IRFFT:
        others = [*others, last]
    for axis in others:
        x = _transform_axis(b, x, axis, inverse)
    if kind == jax.lax.FftType.IRFFT:
        (x,) = b.inline_function(lambda x: [_full_spectrum(x, n)], x)
        (x,) = b.inline_function(lambda x: [jax.lax.real(x)], _transform_axis(b, x, last, inverse))
    return x


def _full_spectrum(x: Any, n: int) -> Any:
    """Return all `n` frequencies of a real signal, given the frequencies from 0 to n // 2.

    The frequencies are along the last axis of `x`.
    """
    k = jnp.arange(n // 2 + 1)
    x = jnp.where((k == 0) | (2 * k == n), jax.lax.real(x).astype(x.dtype), x)
    return jnp.concatenate([x, jnp.conj(x[..., 1 : (n + 1) // 2][..., ::-1])], -1)


@perform.register("fft")
def _(x: Any, *, fft_type: Any, fft_lengths: tuple[int, ...]) -> Any:
    transform = getattr(np.fft, f"{jax.lax.FftType(fft_type).name.lower()}n")
    axes = range(-len(fft_lengths), 0)
    result = transform(x.astype(np.result_type(x, np.float64)), fft_lengths, axes)
    if x.dtype in (np.float64, np.complex128):
        return result
    return result.astype(np.complex64 if result.dtype.kind == "c" else np.float32)
