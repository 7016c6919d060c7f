"""Small test programs for an array of any shape.

Each program is a function of the array `w` and of a dense array `d` of the same shape. Programs
that only move entries take `w` alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax.primitives import find_primitive

Shape = tuple[int, ...]
Program = Callable[..., Any]

ELEMENTWISE = (
    *("abs", "sign", "floor", "ceil", "round", "square", "is_finite"),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "logistic"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "erf_inv", "lgamma", "digamma", "neg", "real", "imag", "conj"),
)

#: Programs whose derivatives are not compared. They jump where entries are equal, are large near
#: the border of a domain, or have lower precision than the other derivatives.
NOT_SMOOTH = frozenset(
    (
        *("abs", "sign", "floor", "ceil", "round", "sqrt", "rsqrt", "cbrt", "max", "compare"),
        *("where", "sort", "max over axes", "min over axes", "prod over axes", "cumprod"),
        *("cummax", "cummin", "rem", "pow", "log", "any, all", "over", "erf_inv", "acosh"),
        *("asin", "acos", "atanh", "lgamma", "digamma", "tan", "halves"),
    )
)

#: Programs for square matrices that have an inverse. JAX supports only float32 and float64.
SOLVES: dict[str, Program] = {
    "solve": lambda w, d: [jnp.linalg.solve(w, d), jnp.linalg.solve(w, d[..., :1])],
    "inv": lambda w, d: jnp.linalg.inv(w),
    "det": lambda w, d: [jnp.linalg.det(w), *jnp.linalg.slogdet(w)],
    "lu": lambda w, d: jax.scipy.linalg.lu_factor(w)[0],
    "triangular solve": lambda w, d: jax.scipy.linalg.solve_triangular(w, d, lower=True),
}

#: Programs for positive definite matrices.
CHOLESKY: dict[str, Program] = {"cholesky": lambda w, d: jnp.linalg.cholesky(w)}


def programs_for_shape(shape: Shape) -> dict[str, Program]:
    """Return a dict from names to programs for arrays `w` and `d` of a shape, of any dtype.

    A program is a function of the tested array `w` and a dense array `d`. JAX rejects some of the
    programs for some dtypes.
    """
    # `f=f` and `move=move` bind the loop variables now. Otherwise all lambdas use the last values.
    elementwise = {name: getattr(lax, name) for name in ELEMENTWISE if hasattr(lax, name)}
    programs: dict[str, Program] = {
        **{name: lambda w, d, f=f: f(w) for name, f in elementwise.items()},
        "integer_pow": lambda w, d: lax.integer_pow(w, 3),
        "not": lambda w, d: ~w,
        **dict(_arithmetic(shape)),
        **dict(_reductions(len(shape))),
    }
    if len(shape) >= 2:
        programs |= dict(_products())
        if shape[-1] == shape[-2]:
            programs |= dict(_square_products())
    return programs | {name: lambda w, d, move=move: move(w) for name, move in moves(shape)}


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

    def reduce(w: Any, d: Any, *, name: str) -> list[Any]:
        return [getattr(w, name)(axis) for axis in axes]

    def accumulate(w: Any, d: Any, *, name: str) -> list[Any]:
        return [getattr(lax, name)(w, axis) for axis in range(ndim)]

    for name in ("sum", "mean", "max", "min", "prod", "argmax", "argmin"):
        yield f"{name} over axes", partial(reduce, name=name)
    yield "any, all", lambda w, d: [f(w > 0.7, a) for f in (jnp.any, jnp.all) for a in axes]
    if ndim >= 2:
        yield "sum over two axes", lambda w, d: w.sum((-2, -1))
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        yield name, partial(accumulate, name=name)


def _products() -> Iterator[tuple[str, Program]]:
    matmul_float32 = partial(jnp.matmul, preferred_element_type="float32")
    transpose = lambda x: jnp.swapaxes(x, -1, -2)
    yield "a matmul", lambda w, d: [w @ transpose(d), transpose(d) @ w]
    yield "a matmul of the transpose", lambda w, d: [transpose(w) @ d, d @ transpose(w)]
    yield (
        "a matmul, preferred",
        lambda w, d: [matmul_float32(w, transpose(d)), matmul_float32(transpose(d), w)],
    )
    yield "a matmul, exact", lambda w, d: jnp.matmul(w, transpose(d), precision="highest")
    yield "by a vector", lambda w, d: [w @ d[(0,) * (d.ndim - 1)], transpose(d)[..., 0, :] @ w]
    yield "by its transpose", lambda w, d: w @ transpose(w)
    yield "a sum of products", lambda w, d: jnp.einsum("...ij,...ij->...", w, d)


def _square_products() -> Iterator[tuple[str, Program]]:
    last: Any = {"axis1": -2, "axis2": -1}
    yield "by itself", lambda w, d: [w @ w, jnp.swapaxes(w, -1, -2) @ w]
    yield "by itself, preferred", lambda w, d: jnp.matmul(w, w, preferred_element_type="float32")
    yield "trace", lambda w, d: [jnp.trace(w, **last), jnp.diagonal(w), jnp.diagonal(w, **last)]


def moves(shape: Shape) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield `(name, program)` pairs, for an array `w` of this shape.

    Each program takes `w`, and slices, transposes, reshapes, repeats or gathers its entries.
    """
    ndim = len(shape)
    for axis in range(ndim):
        yield from _moves_along_axis(axis, shape)
    for axis in range(ndim + 1):
        yield from _moves_to_new_axis(axis)
    for order in itertools.permutations(range(ndim)):
        if order != tuple(range(ndim)):
            yield f"transposed {order}", lambda w, p=order: w.transpose(p)
    for axis in range(ndim - 1):
        yield (
            f"{axis} and the next merged",
            lambda w, i=axis: w.reshape(
                *w.shape[:i], math.prod(w.shape[i : i + 2]), *w.shape[i + 2 :]
            ),
        )
    if ndim:
        yield "raveled", lambda w: w.reshape(-1)
        yield "a scan", lambda w: lax.scan(lambda c, r: (c, r), 0, w)[1]
        yield "a scan, each with an axis", lambda w: lax.scan(lambda c, r: (c, r[None]), 0, w)[1]
        yield "a scan that stacks", lambda w: lax.scan(lambda c, _: (c, w), 0, None, length=2)[1]
        yield "a map", lambda w: lax.map(lambda r: r, w)
    yield "chosen", lambda w: jnp.where(jnp.array(True), w, w)


def _moves_along_axis(i: int, shape: Shape) -> Iterator[tuple[str, Callable[..., Any]]]:
    repeats = [2 if axis == i else 1 for axis in range(len(shape))]
    indices = np.array([[1, 0], [0, 0]])
    yield f"none along {i}", lambda w: lax.slice_in_dim(w, 0, 0, axis=i)
    yield f"backwards along {i}", lambda w: jnp.flip(w, i)
    yield f"rolled along {i}", lambda w: jnp.roll(w, 1, i)
    yield f"concatenated along {i}", lambda w: jnp.concatenate([w, w], i)
    yield f"unstacked along {i}", lambda w: jnp.unstack(w, axis=i)
    yield f"tiled along {i}", lambda w: jnp.tile(w, repeats)
    if shape[i] < 2:
        return
    yield f"one along {i}", lambda w: jnp.take(w, 1, i)
    yield f"squeezed {i}", lambda w: lax.slice_in_dim(w, 1, 2, axis=i).squeeze(i)
    yield f"one, as an axis, {i}", lambda w: lax.slice_in_dim(w, 1, 2, axis=i)
    yield f"every other along {i}", lambda w: lax.slice_in_dim(w, 0, None, 2, i)
    yield f"at an index along {i}", lambda w: lax.dynamic_index_in_dim(w, jnp.int32(1), i, False)
    yield f"some at an index along {i}", lambda w: lax.dynamic_slice_in_dim(w, 1, 1, i)
    yield f"at indices along {i}", lambda w: jnp.take(w, indices, i, mode="clip")
    yield f"filled along {i}", lambda w: jnp.take(w, jnp.array([1, 99]), i)
    yield f"split along {i}", lambda w: jnp.split(w, [1], i)
    yield f"vmap over {i}", lambda w: jax.vmap(lambda r: r[None], i)(w)
    yield f"vmap along {i}", lambda w: jax.vmap(lambda r: r, i, i)(w)


def _moves_to_new_axis(i: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield f"a new axis {i}", lambda w: jnp.expand_dims(w, i)
    yield f"stacked along {i}", lambda w: jnp.stack([w, w], i)
    yield (
        f"repeated along {i}",
        lambda w: jnp.broadcast_to(jnp.expand_dims(w, i), (*w.shape[:i], 3, *w.shape[i:])),
    )
