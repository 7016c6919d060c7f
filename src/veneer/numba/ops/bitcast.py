"""Bits: entries taken for those of another dtype, and rounded to fewer bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..codegen import storage
from ..codegen.arrays import ArrayExpr
from ..codegen.builder import Builder
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths import instructions
from ..reference import evaluate_jaxpr
from ..registry import Unsupported, fused, perform


def _as_bits(k: LoopNest, text: str, dtype: np.dtype) -> str:
    """The bits of a number, as an unsigned one."""
    text = storage.stored(k, text, dtype)
    like = np.dtype(f"u{dtype.itemsize}")
    if storage.stored_dtype(dtype) == like:
        return k.let(text)
    return k.let(k.call(instructions.reinterpreted, text, storage.literal(0, like)))


def _of_bits(k: LoopNest, text: str, dtype: np.dtype) -> str:
    kept = storage.stored_dtype(dtype)
    if kept != np.dtype(f"u{dtype.itemsize}"):
        text = k.call(instructions.reinterpreted, text, storage.literal(0, kept))
    return k.let(storage.loaded(k, text, dtype))


@fused("bitcast_convert_type")
def _(b: Builder, x: ArrayExpr, *, new_dtype: Any) -> ArrayExpr:
    source, target = x.dtype, np.dtype(new_dtype)
    if "c" in (source.kind, target.kind):
        raise Unsupported("new_dtype", "bits of complex numbers are not supported.")
    wide, narrow = max(source, target, key=_size), min(source, target, key=_size)
    width, count = 8 * narrow.itemsize, wide.itemsize // narrow.itemsize
    unsigned = storage.type_name(np.dtype(f"u{target.itemsize}"))

    def same(k: LoopNest, index: tuple[Index, ...]) -> str:
        return _of_bits(k, _as_bits(k, k.read(x, index), source), target)

    def narrowed(k: LoopNest, index: tuple[Index, ...]) -> str:
        whole = _as_bits(k, k.read(x, index[:-1]), source)
        part = f"np.uint64({whole}) >> np.uint64({index[-1] * width})"
        return _of_bits(k, k.let(f"{unsigned}({part})"), target)

    def widened(k: LoopNest, index: tuple[Index, ...]) -> str:
        parts = [_as_bits(k, k.read(x, (*index, Index((), n))), source) for n in range(count)]
        shifted = [f"(np.uint64({part}) << np.uint64({n * width}))" for n, part in enumerate(parts)]
        return _of_bits(k, k.let(f"{unsigned}({' | '.join(shifted)})"), target)

    entry = same if count == 1 else narrowed if target == narrow else widened
    return b.lazy(entry, b.cheap(x) if entry is narrowed else x, cost=count)


def _size(dtype: np.dtype) -> int:
    return dtype.itemsize


@perform.register("bitcast_convert_type")
def _(x: Any, *, new_dtype: Any) -> Any:
    target = np.dtype(new_dtype)
    if target.itemsize == x.dtype.itemsize:
        return x.view(target)
    if target.itemsize < x.dtype.itemsize:
        return np.ascontiguousarray(x)[..., None].view(target)
    return np.ascontiguousarray(x).view(target)[..., 0]


def _with_fewer_bits(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    """Floats rounded as XLA rounds them: to even, and what would be denormal is zero."""
    limits = jnp.finfo(x.dtype)
    like = np.dtype(f"u{x.dtype.itemsize}").type
    bits = lax.bitcast_convert_type(x, like)
    left_out = limits.nmant - mantissa_bits
    if left_out > 0:
        odd = (bits >> like(left_out)) & like(1)
        bits = bits + odd + like((1 << (left_out - 1)) - 1)
        bits = bits & like((1 << limits.bits) - (1 << left_out))
    rounded = lax.bitcast_convert_type(bits, x.dtype)
    if exponent_bits < limits.nexp:
        most = (1 << (exponent_bits - 1)) - 1  # of exponents, by what XLA takes them for
        size = jnp.abs(rounded)
        rounded = jnp.where(size >= 2.0 ** (most + 1), jnp.copysign(jnp.inf, x), rounded)
        rounded = jnp.where(size < 2.0 ** (1 - most), jnp.copysign(0, x), rounded)
    return jnp.where(jnp.isnan(x), x, rounded)


def _steps(x: Any, params: Any) -> Any:
    function = functools.partial(_with_fewer_bits, **params)
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))


@fused("reduce_precision")
def _(b: Builder, x: ArrayExpr, **params: Any) -> list[ArrayExpr]:
    return b.inline(_steps(x, params), b.cheap(x))


@perform.register("reduce_precision")
def _(x: Any, **params: Any) -> Any:
    return evaluate_jaxpr(_steps(x, params), x)
