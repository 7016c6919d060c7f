"""Matrices for LAPACK, which has them column by column, and calls of it for stacks of them.

Those that it may take as they are are given to it transposed; of others it is given a transposed
copy.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...codegen import storage
from ...codegen.arrays import ArrayExpr, Buffer
from ...codegen.builder import Builder
from ...codegen.index import Index
from ...codegen.loop_nest import LoopNest
from ...maths import instructions
from ...registry import Unsupported
from . import lapack


def checked(x: ArrayExpr) -> np.dtype:
    dtype = x.dtype
    if lapack.letter_of(dtype) is None:
        raise Unsupported("dtype", f"{dtype} is not supported, numbers of 32 and 64 bits are.")
    return dtype


def call_lapack(
    b: Builder, name: str, dtype: np.dtype, n: int, args: Callable[[Callable[..., Any]], list[Any]]
) -> None:
    """Calls a function of LAPACK for each of `n` matrices.

    `args` gives its arguments: numbers, letters and buffers, given what takes the part of a buffer
    that is one matrix's.
    """
    with b.repeat(n) as step:
        pieces: list[str | Buffer] = [f"{b.function(lapack.function_of(name, dtype))}("]
        for arg in args(lambda buffer: buffer.part(step)):
            letter = isinstance(arg, str)
            text = (
                f"np.int8({ord(arg)})" if letter else arg if isinstance(arg, Buffer) else str(arg)
            )
            pieces += [text, ", "]
        b.line(*pieces[:-1], ")")


def stacked(value: Buffer, n_axes: int) -> tuple[int, Buffer]:
    """How many arrays of so many axes there are, and those, one after another."""
    inner = value.shape[value.ndim - n_axes :]
    n = math.prod(value.shape[: value.ndim - n_axes])
    return n, value.reshaped((n, *inner))


def transposed(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Matrices transposed."""
    entry = lambda k, index: k.read(x, (*index[:-2], index[-1], index[-2]))
    return b.lazy(entry, x, shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype)


def conjugate(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """The value, with the imaginary part of complex numbers negated."""
    if x.dtype.kind != "c":
        return x
    name = storage.type_name(x.dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        text = k.let(k.read(x, index))
        return f"{name}(complex({text}.real, -{text}.imag))"

    return b.lazy(entry, x, shape=x.shape, dtype=x.dtype, cost=1)


def known(b: Builder, x: ArrayExpr, info: Buffer, other: Any = np.nan) -> ArrayExpr:
    """The value where LAPACK was able to, and NaN elsewhere, or `other`."""
    n_batch = info.ndim
    filler = storage.literal(complex(other, other) if x.dtype.kind == "c" else other, x.dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        able = f"{k.read(info, index[:n_batch])} == 0"
        if x.dtype.kind == "c":  # which `select` is not of
            return k.let(f"{k.read(x, index)} if {able} else {filler}")
        return k.let(k.call(instructions.select, able, k.read(x, index), filler))

    return b.lazy(entry, x, info, shape=x.shape, dtype=x.dtype, cost=1)


class Text:
    """An argument that is an expression."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def of_each(function: Callable[..., Any], n_axes: int) -> Callable[..., Any]:
    """A function of arrays of so many axes, for stacks of them."""

    def of_all(x: Any) -> Any:
        inner = x.shape[x.ndim - n_axes :]
        batch = x.shape[: x.ndim - n_axes]
        results = [function(part) for part in x.reshape(math.prod(batch), *inner)]
        return np.asarray(results).reshape(*batch, *results[0].shape)

    return of_all
