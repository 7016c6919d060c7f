"""Programs of one array `w` of any shape, and a dense one `d` of it: a primitive each, or few."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax.primitives import find_primitive

Shape = tuple[int, ...]
Program = Callable[..., Any]

ELEMENTWISE = (
    *("abs", "sign", "floor", "ceil", "round", "square", "integer_pow", "is_finite", "not"),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "logistic"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "erf_inv", "lgamma", "digamma", "neg", "real", "imag", "conj"),
)


#: Those of which no derivative is compared: it jumps where two entries are the same, or is large
#: where they are near the end of a domain; or it is of less precision than the rest.
KINKED = frozenset(
    (
        *("abs", "sign", "floor", "ceil", "round", "sqrt", "rsqrt", "cbrt", "max", "compare"),
        *("where", "sort", "max over axes", "min over axes", "prod over axes", "cumprod"),
        *("cummax", "cummin", "rem", "pow", "log", "any, all", "over", "erf_inv", "acosh"),
        *("asin", "acos", "atanh", "lgamma", "digamma", "tan", "halves"),
    )
)


def programs_of(shape: Shape) -> dict[str, Program]:
    """Those that an array of this shape has; some of them its dtype may not have."""
    found: dict[str, Program] = {
        name: partial(lambda w, d, name: getattr(lax, name)(w), name=name)
        for name in ELEMENTWISE
        if hasattr(lax, name)
    }
    found["integer_pow"] = lambda w, d: lax.integer_pow(w, 3)
    found["not"] = lambda w, d: ~w
    found |= dict(_arithmetic(shape)) | dict(_reductions(len(shape)))
    if len(shape) >= 2:
        found |= dict(_products())
        if shape[-1] == shape[-2]:
            found |= dict(_of_squares())
    return found | {name: _of_one(move) for name, move in moves(shape)}


def _of_one(function: Callable[[Any], Any]) -> Program:
    return lambda w, d: function(w)


def _arithmetic(shape: Shape) -> Iterator[tuple[str, Program]]:
    yield "halves", lambda w, d: [w.astype("bfloat16"), w.astype("float16")]
    yield "as float32", lambda w, d: w.astype("float32")
    yield "as int32", lambda w, d: w.astype("int32")
    yield "add", lambda w, d: [w + w, w + d, d + w]
    yield "add a number", lambda w, d: w + 1
    yield "add any", lambda w, d: find_primitive("add_any").bind(w, w)
    yield "sub", lambda w, d: [w - w, w - d, d - w, 1 - w]
    yield "mul", lambda w, d: [w * w, w * d, d * w]
    yield "mul by a number", lambda w, d: [w * 3, d.reshape(-1)[0] * w]
    yield "div", lambda w, d: [w / 3, w / d, w / d.reshape(-1)[0]]
    yield "over", lambda w, d: d / w
    yield "pow", lambda w, d: [w**2, d**w]
    yield "rem", lambda w, d: w % d
    yield "max", lambda w, d: [jnp.maximum(w, d), jnp.minimum(d, w), jnp.clip(w, 0.0, 1.0)]
    yield "compare", lambda w, d: [w < d, w >= d, w == d, d != w, w > 0.7]
    yield "where", lambda w, d: [jnp.where(d > 1.2, w, d), jnp.where(w > 0.7, d, w)]
    yield "sort", lambda w, d: jnp.sort(w, -1) if shape else w
    yield "scatter", lambda w, d: w.at[0].set(d[0])


def _reductions(ndim: int) -> Iterator[tuple[str, Program]]:
    axes: list[int | None] = [None, *range(ndim)]
    for name in ("sum", "mean", "max", "min", "prod", "argmax", "argmin"):
        yield (
            f"{name} over axes",
            lambda w, d, name=name: [getattr(w, name)(axis) for axis in axes],
        )
    yield "any, all", lambda w, d: [f(w > 0.7, a) for f in (jnp.any, jnp.all) for a in axes]
    if ndim >= 2:
        yield "sum over two axes", lambda w, d: w.sum((-2, -1))
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        yield (
            name,
            lambda w, d, name=name: [getattr(lax, name)(w, axis) for axis in range(ndim)],
        )


def _products() -> Iterator[tuple[str, Program]]:
    wide = {"preferred_element_type": "float32"}
    turned = lambda d: jnp.swapaxes(d, -1, -2)
    yield "a matmul", lambda w, d: [w @ turned(d), turned(d) @ w]
    yield "a matmul of the transpose", lambda w, d: [turned(w) @ d, d @ turned(w)]
    yield (
        "a matmul, preferred",
        lambda w, d: [jnp.matmul(w, turned(d), **wide), jnp.matmul(turned(d), w, **wide)],  # type: ignore[arg-type]
    )
    yield "a matmul, exact", lambda w, d: jnp.matmul(w, turned(d), precision="highest")
    yield "by a vector", lambda w, d: [w @ d[(0,) * (d.ndim - 1)], turned(d)[..., 0, :] @ w]
    yield "by its transpose", lambda w, d: w @ turned(w)
    yield "a sum of products", lambda w, d: jnp.einsum("...ij,...ij->...", w, d)


def _of_squares() -> Iterator[tuple[str, Program]]:
    yield "by itself", lambda w, d: [w @ w, jnp.swapaxes(w, -1, -2) @ w]
    yield "by itself, preferred", lambda w, d: jnp.matmul(w, w, preferred_element_type="float32")
    yield (
        "trace",
        lambda w, d: [
            jnp.trace(w, axis1=-2, axis2=-1),
            jnp.diagonal(w),
            jnp.diagonal(w, axis1=-2, axis2=-1),
        ],
    )


#: Of square matrices that have an inverse, in float32 and float64 alone, as in JAX.
SOLVES: dict[str, Program] = {
    "solve": lambda w, d: [jnp.linalg.solve(w, d), jnp.linalg.solve(w, d[..., :1])],
    "inv": lambda w, d: jnp.linalg.inv(w),
    "det": lambda w, d: [jnp.linalg.det(w), *jnp.linalg.slogdet(w)],
    "lu": lambda w, d: jax.scipy.linalg.lu_factor(w)[0],
    "triangular solve": lambda w, d: jax.scipy.linalg.solve_triangular(w, d, lower=True),
}

#: Of those that are positive definite.
CHOLESKY: dict[str, Program] = {"cholesky": lambda w, d: jnp.linalg.cholesky(w)}


def moves(shape: Shape) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Programs that move entries."""
    ndim = len(shape)
    for axis in range(ndim):
        yield f"none along {axis}", lambda w, i=axis: lax.slice_in_dim(w, 0, 0, axis=i)
        yield f"backwards along {axis}", lambda w, i=axis: jnp.flip(w, i)
        yield f"rolled along {axis}", lambda w, i=axis: jnp.roll(w, 1, i)
        yield f"concatenated along {axis}", lambda w, i=axis: jnp.concatenate([w, w], i)
        yield f"unstacked along {axis}", lambda w, i=axis: jnp.unstack(w, axis=i)
        yield (
            f"tiled along {axis}",
            lambda w, i=axis: jnp.tile(w, (1,) * i + (2,) + (1,) * (ndim - i - 1)),
        )
        if shape[axis] > 1:
            yield from _moves_along(axis)
    for axis in range(ndim + 1):
        yield f"a new axis {axis}", lambda w, i=axis: jnp.expand_dims(w, i)
        yield f"stacked along {axis}", lambda w, i=axis: jnp.stack([w, w], i)
        yield (
            f"repeated along {axis}",
            lambda w, i=axis: jnp.broadcast_to(
                jnp.expand_dims(w, i), (*w.shape[:i], 3, *w.shape[i:])
            ),
        )
    for order in itertools.permutations(range(ndim)):
        if order != tuple(range(ndim)):
            yield f"transposed {order}", lambda w, p=order: w.transpose(p)
    for axis in range(ndim - 1):
        yield (
            f"{axis} and the next merged",
            lambda w, i=axis: w.reshape(
                *w.shape[:i], w.shape[i] * w.shape[i + 1], *w.shape[i + 2 :]
            ),
        )
    if ndim:
        yield "raveled", lambda w: w.reshape(-1)
        yield "a scan", lambda w: lax.scan(lambda c, r: (c, r), 0, w)[1]
        yield "a scan, each with an axis", lambda w: lax.scan(lambda c, r: (c, r[None]), 0, w)[1]
        yield "a scan that stacks", lambda w: lax.scan(lambda c, _: (c, w), 0, None, length=2)[1]
        yield "a map", lambda w: lax.map(lambda r: r, w)
    yield "chosen", lambda w: jnp.where(jnp.array(True), w, w)


def _moves_along(axis: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield f"one along {axis}", lambda w: jnp.take(w, 1, axis)
    yield f"squeezed {axis}", lambda w: lax.slice_in_dim(w, 1, 2, axis=axis).squeeze(axis)
    yield f"one, as an axis, {axis}", lambda w: lax.slice_in_dim(w, 1, 2, axis=axis)
    yield f"every other along {axis}", lambda w: lax.slice_in_dim(w, 0, None, 2, axis)
    yield (
        f"at an index along {axis}",
        lambda w: lax.dynamic_index_in_dim(w, jnp.int32(1), axis, keepdims=False),
    )
    yield f"some at an index along {axis}", lambda w: lax.dynamic_slice_in_dim(w, 1, 1, axis)
    yield (
        f"at indices along {axis}",
        lambda w: jnp.take(w, jnp.array([[1, 0], [0, 0]]), axis, mode="clip"),
    )
    yield f"filled along {axis}", lambda w: jnp.take(w, jnp.array([1, 99]), axis)
    yield f"split along {axis}", lambda w: jnp.split(w, [1], axis)
    yield f"vmap over {axis}", lambda w: jax.vmap(lambda r: r[None], axis)(w)
    yield f"vmap along {axis}", lambda w: jax.vmap(lambda r: r, axis, axis)(w)
