"""Every rule of every type gives, in each floating dtype, what the dense computation gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.every_type import EVERY_TYPE, T, plain, value

import veneer as vn
from veneer._core import dispatch, rules
from veneer._jax.primitives import find_primitive
from veneer.types.structured.matrix import Matrix
from veneer.types.zero_preserving import NONLINEAR

DTYPES = ("bfloat16", "float16", "float32", "float64")

_beside = lambda dtype: (1 + jnp.arange(16.0).reshape(4, 4) / 16).astype(dtype)
_wide = {"preferred_element_type": "float32"}

#: Of a value w, and an array d of its dtype and shape, where it has axes.
PROGRAMS = {
    name: partial(lambda w, d, name: getattr(lax, name)(w), name=name) for name in NONLINEAR
}
PROGRAMS |= {
    "neg": lambda w, d: -w,
    "integer_pow": lambda w, d: lax.integer_pow(w, 3),
    "halves": lambda w, d: [w.astype("bfloat16"), w.astype("float16")],
    "wide": lambda w, d: w.astype("float32"),
    "add": lambda w, d: [w + w, w + d, d + w],
    "add a number": lambda w, d: w + 1,
    "add any": lambda w, d: find_primitive("add_any").bind(w, w),
    "sub": lambda w, d: [w - w, w - d, d - w],
    "mul": lambda w, d: [w * w, w * d, d * w],
    "mul by a number": lambda w, d: [w * 3, d[0, 0] * w],
    "div": lambda w, d: [w / 3, w / d, w / d[0, 0]],
    "a matmul": lambda w, d: [w @ d, d @ w, w.T @ d, d @ w.T],
    "a matmul, preferred": lambda w, d: [jnp.matmul(*p, **_wide) for p in ((w, d), (d, w))],
    "a matmul, exact": lambda w, d: jnp.matmul(w, d, precision="highest"),
    "by a vector": lambda w, d: [w @ d[0], d[0] @ w],
    "by itself": lambda w, d: [w @ w, w.T @ w],
    "by itself, preferred": lambda w, d: jnp.matmul(w, w, **_wide),
    "transpose": lambda w, d: w.T,
    "sum": lambda w, d: [w.sum(0), w.sum(1), w.sum(), w.mean(1)],
    "a sum of products": lambda w, d: jnp.einsum("ij,ij->", w, d),
    "trace": lambda w, d: [jnp.trace(w), jnp.diagonal(w), jnp.diagonal(w, axis1=-2, axis2=-1)],
    "max": lambda w, d: [w.max(0), w.min(1), w.max()],
    "prod": lambda w, d: w.prod(0),
    "argmax": lambda w, d: [w.argmax(0), w.argmin(1)],
    "cumulative": lambda w, d: [f(w, 0) for f in (jnp.cumsum, lax.cummax, lax.cummin)],
    "cumulative, too": lambda w, d: [f(w, 1) for f in (jnp.cumprod, lax.cumlogsumexp)],
    "is any": lambda w, d: [(w > 0.7).any(0), (w > 0.7).all(1)],
    "reshape": lambda w, d: w.reshape(2, 8),
    "broadcast": lambda w, d: jnp.broadcast_to(w, (2, 4, 4)),
    "slice": lambda w, d: [w[1:3], w[:, ::2], w[0], w[:, 1:2].squeeze(1)],
    "split": lambda w, d: jnp.split(w, 2),
    "unstack": lambda w, d: jnp.unstack(w),
    "tile": lambda w, d: jnp.tile(w, (2, 1)),
    "reversed": lambda w, d: w[::-1],
    "dynamic": lambda w, d: lax.dynamic_slice(w, (jnp.int32(1), jnp.int32(0)), (2, 4)),
    "gather": lambda w, d: jnp.take(w, jnp.array([2, 0]), 0),
    "scatter": lambda w, d: w.at[0].set(d[0]),
    "where": lambda w, d: jnp.where(d > 1.2, w, d),
}

#: Of float32 and float64 alone, as in JAX; and of matrices that have an inverse.
SOLVES = {
    "solve": lambda w, d: [jnp.linalg.solve(w, d), jnp.linalg.solve(w, d[0])],
    "inv": lambda w, d: jnp.linalg.inv(w),
    "det": lambda w, d: [jnp.linalg.det(w), *jnp.linalg.slogdet(w)],
    "lu": lambda w, d: jax.scipy.linalg.lu_factor(w)[0],
    "triangular solve": lambda w, d: jax.scipy.linalg.solve_triangular(w, d, lower=True),
}

#: These have no dense form, and refuse by name what they do not keep.
REFUSING = (T.Masked, T.Named, T.Quantity)

#: Primitives whose rules no program here meets, by why.
ELSEWHERE = {
    "conv_general_dilated": "of kernels",
    "ragged_dot_general": "of groups of matrices",
    "real imag conj": "of complex numbers",
    "reduce_xor": "of integers",
    "reduce_and reduce_or": "of bools",
    "copy stop_gradient": "compute nothing",
    "cholesky": "of what is positive definite",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EVERY_TYPE if name != "PRNGKey"])
def test_every_rule(name, dtype, monkeypatch):
    with jax.enable_x64(dtype == "float64"):
        w, d, met, refused = value(name, (), dtype), _beside(dtype), set(), {}
        if isinstance(w, T.Masked):
            w = T.Masked(w.value, jnp.ones_like(w.mask))  # or it is not the dense array's sum
        programs, dense = PROGRAMS, plain(w)
        wide = np.asarray(dense, "float64")
        if jnp.finfo(dtype).bits >= 32 and np.linalg.cond(wide) < 1e3:
            programs = programs | SOLVES
            if (wide == wide.T).all() and np.linalg.eigvalsh(wide).min() > 0:
                programs |= {"cholesky": lambda w, d: jnp.linalg.cholesky(w)}

        def resolved(target, *classes, resolve=dispatch.resolve):
            met.add(target.name)
            return resolve(target, *classes)

        monkeypatch.setattr(dispatch, "resolve", resolved)

        @jax.jit  # all in one program, which is compiled once
        def run(w, x, d):
            results = {}
            for program, function in programs.items():
                try:
                    results[program] = vn.implicit(function)(w, d), function(x, d)
                except (TypeError, ValueError) as error:
                    refused[program] = str(error)
            return results

        for program, (out, expected) in run(w, dense, d).items():
            jax.tree.map(partial(_check, program, dtype), plain(out), expected)
        named = type(w).__name__ if isinstance(w, REFUSING) else "nothing is refused"
        assert all(named in error for error in refused.values()), refused
        if programs is not PROGRAMS:
            assert _with_rules(type(w)) <= met | {n for names in ELSEWHERE for n in names.split()}


def _with_rules(kind):
    """The primitives for which a type, or a base of it, has a rule."""
    kinds = {base for base in kind.__mro__ if base.__module__.startswith("veneer.types")}
    return {
        target.name
        for target, registered in rules._rules.items()
        if any(kinds & set(of) for rule in registered for of in rule.operands)
    }


def _check(program, dtype, out, expected):
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype), program
    x, y = np.asarray(out, "float64"), np.asarray(expected, "float64")
    largest = np.max(np.abs(y), initial=1, where=np.isfinite(y))
    # Sums of a few dozen terms in another order; of halves, rounded now and then on the way.
    terms = 64 if jnp.finfo(dtype).bits > 16 else 4
    floating = [t for t in (dtype, expected.dtype) if jnp.issubdtype(t, jnp.floating)]
    tolerance = terms * largest * max(float(jnp.finfo(t).eps) for t in floating)
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=program)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["LowRank", "LoraArray", "Product", "Kronecker"])
def test_sums_of_halves(name, dtype):
    w = value(name, (2,), dtype)
    for axes in (0, 1, 2, (1, 2), (0, 2), None):
        out, expected = vn.implicit(lambda w, i=axes: w.sum(i))(w), plain(w).sum(axes)
        _check(f"sum over {axes}", dtype, out, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_wide_product_of_matrices_is_not_rounded_to_halves(name, dtype):
    w = value(name)
    if not isinstance(w, Matrix) or isinstance(w, T.LoraArray) or w.dtype != jnp.float32:
        pytest.skip("no matrix of floats with structure")
    cast = lambda to: lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x
    halves = jax.tree.map(cast(dtype), w)
    wide = plain(jax.tree.map(cast("float32"), halves))
    other = vn.types.Diagonal(jnp.array([1.1, 0.7, 1.3, 0.9], dtype))  # a rule of two types
    by = plain(jax.tree.map(cast("float32"), other))
    products = lambda w, d: [jnp.matmul(*p, **_wide) for p in ((w, w), (w.T, w), (w, d), (d, w.T))]
    for out, expected in zip(vn.implicit(products)(halves, other), products(wide, by), strict=True):
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(plain(out), expected, rtol=1e-5, atol=1e-5)
