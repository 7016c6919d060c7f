"""Random programs of primitives that compile, compared with JAX.

CI runs a few of them. VENEER_RANDOM_PROGRAMS=10000 sets their number, VENEER_RANDOM_SEED=1 another
seed, and VENEER_RANDOM_NATIVE=100 the number of programs that are compiled.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from jax import lax

from veneer.numba.codegen.graph import trace
from veneer.numba.compiler import compile, source_of
from veneer.numba.testing import python_program

PROGRAMS = int(os.environ.get("VENEER_RANDOM_PROGRAMS", "8"))
NATIVE = int(os.environ.get("VENEER_RANDOM_NATIVE", "2"))
SEED = int(os.environ.get("VENEER_RANDOM_SEED", "0"))

# The tolerance of a primitive, in ulps of its largest operand or result.
ULPS = 32
SHAPES = [(), (1,), (3,), (2, 3), (3, 1), (2, 1, 3), (0, 2)]
DTYPES = ["float32", "float32", "int32", "bool", "int8", "uint8", "uint32", "bfloat16", "float16"]
DTYPES += ["complex64"]


def _floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def _integer(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


def _complex(x):
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _number(x):
    return _floating(x) or _integer(x)


# Operations by the predicate of the arrays that they accept. Functions with poles, and functions
# that grow, get arguments that do not amplify earlier errors.
UNARY = {
    _number: "neg sign".split(),
    lambda x: _floating(x) or jnp.issubdtype(x.dtype, jnp.signedinteger): ["abs"],
    _integer: "bitwise_not population_count clz".split(),
    _floating: "floor ceil is_finite tanh logistic erf sin cos atan asinh".split(),
    _complex: "neg abs conj real imag".split(),
}
BINARY = {
    _number: "add sub mul max min".split(),
    _integer: (
        "div rem bitwise_and bitwise_or bitwise_xor shift_left shift_right_logical "
        "shift_right_arithmetic"
    ).split(),
    _floating: ["atan2"],
    lambda x: x.dtype == jnp.float32: ["complex"],
    _complex: "add sub mul".split(),
    lambda x: True: ["eq", "ne"],
    lambda x: not _complex(x): "lt le gt ge".split(),
    lambda x: x.dtype == bool: "bitwise_and bitwise_or bitwise_xor".split(),
}
TAMED = {
    "exp": lambda x: lax.exp(lax.clamp(_full_like(x, -8), x, _full_like(x, 8))),
    "expm1": lambda x: lax.expm1(lax.clamp(_full_like(x, -8), x, _full_like(x, 8))),
    "log": lambda x: lax.log(lax.abs(x) + _full_like(x, 2)),
    "log1p": lambda x: lax.log1p(lax.abs(x)),
    "sqrt": lambda x: lax.sqrt(lax.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(lax.abs(x) + _full_like(x, 1)),
    "cbrt": lambda x: lax.cbrt(lax.abs(x) + _full_like(x, 1)),
    "square": lambda x: lax.integer_pow(x, 2),
    "div": lambda x: lax.div(_full_like(x, 1), lax.abs(x) + _full_like(x, 1)),
    "pow": lambda x: lax.pow(lax.abs(x) + _full_like(x, 1), _full_like(x, 0.5)),
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
}
TAMED_COMPLEX = {
    "exp": lambda z: lax.exp(lax.complex(lax.tanh(z.real), lax.tanh(z.imag))),
    "log": lambda z: lax.log(lax.complex(lax.abs(z.real) + 1, z.imag)),
    "sqrt": lambda z: lax.sqrt(lax.complex(lax.abs(z.real) + 1, z.imag)),
    "tanh": lambda z: lax.tanh(lax.complex(z.real, lax.tanh(z.imag))),
    "cos": lambda z: lax.cos(lax.complex(lax.tanh(z.real), lax.tanh(z.imag))),
    "atan": lambda z: lax.atan(lax.complex(lax.abs(z.real) + 1, z.imag)),
    "asinh": lambda z: lax.asinh(lax.complex(lax.abs(z.real) + 1, z.imag)),
    "square": lambda z: lax.integer_pow(z, 2),
}
REDUCTIONS = {
    _complex: [jnp.sum],
    _number: [jnp.sum, jnp.max, jnp.min],
    lambda x: x.dtype == bool: [jnp.any, jnp.all],
}


def _full_like(x, value):
    return jnp.full(x.shape, value, x.dtype)


def _chosen(draw, table, x):
    return draw(st.sampled_from([f for fits, fs in table.items() if fits(x) for f in fs]))


def unary(draw, x, like):
    if x.dtype == bool:
        return lambda x: lax.bitwise_not(x)
    return getattr(lax, _chosen(draw, UNARY, x))


def tamed(draw, x, like):
    table = TAMED_COMPLEX if _complex(x) else TAMED if _floating(x) else {}
    return table[draw(st.sampled_from(sorted(table)))] if table else None


def binary(draw, x, like):
    f, y = getattr(lax, _chosen(draw, BINARY, x)), draw(st.sampled_from(like))
    return lambda x, *others: f(x, others[y])


def selected(draw, x, like):
    y = draw(st.sampled_from(like))
    return lambda x, *others: jnp.where(x == others[y], x, others[y])


def broadcast(draw, x, like):
    """Return an operation whose operands broadcast along axes of size 1."""
    if not x.ndim or x.dtype == bool:
        return None
    axis = draw(st.integers(0, x.ndim - 1))
    return lambda x: x - lax.slice_in_dim(x, 0, 1, axis=axis) if x.shape[axis] else x


def reduced(draw, x, like):
    f = _chosen(draw, REDUCTIONS, x)
    if not x.size and f in (jnp.max, jnp.min):
        return None
    axis = draw(st.sampled_from([None, *range(x.ndim)]))
    keepdims = draw(st.booleans())
    types = {} if f is not jnp.sum else {"dtype": x.dtype}
    return lambda x: f(x, axis=axis, keepdims=keepdims, **types)


def argument(draw, x, like):
    if not x.size or not x.ndim or x.dtype == bool or _complex(x):
        return None
    f = draw(st.sampled_from([jnp.argmax, jnp.argmin]))
    axis = draw(st.integers(0, x.ndim - 1))
    return lambda x: f(lax.round(x) if _floating(x) else x, axis=axis)


def layout(draw, x, like):
    axes = draw(st.permutations(range(x.ndim)))
    axis = draw(st.integers(0, max(x.ndim - 1, 0)))
    choices = [lambda x: x.reshape(-1), lambda x: x[None], lambda x: jnp.transpose(x, axes)]
    if x.ndim:
        choices += [
            lambda x: lax.rev(x, [axis]),
            lambda x: jnp.concatenate([x, x], axis),
            lambda x: x[::2],
            lambda x: jnp.stack([x, x], axis),
            lambda x: jnp.repeat(x[..., None], 2, -1),
            lambda x: lax.pad(x, jnp.ones((), x.dtype), [(1, 0, 1)] + [(0, 1, 0)] * (x.ndim - 1)),
        ]
    return draw(st.sampled_from(choices))


def converted(draw, x, like):
    dtype = draw(st.sampled_from(DTYPES))
    if _complex(x):
        return lambda x: x.real.astype(dtype)
    return lambda x: (lax.round(x) if _floating(x) else x).astype(dtype)


def product(draw, x, like):
    if x.ndim < 1 or x.ndim > 2 or x.dtype == bool or x.dtype.itemsize < 4:
        return None
    return draw(st.sampled_from([lambda x: x @ x.T, lambda x: jnp.tensordot(x, x, 0)]))


def cumulative(draw, x, like):
    if not x.ndim or x.dtype == bool or _complex(x):
        return None
    f = draw(st.sampled_from([lax.cumsum, lax.cummax, lax.cummin]))
    axis, reverse = draw(st.integers(0, x.ndim - 1)), draw(st.booleans())
    return lambda x: f(x, axis=axis, reverse=reverse)


def in_order(draw, x, like):
    if not x.ndim or _complex(x):
        return None
    axis = draw(st.integers(0, x.ndim - 1))
    return lambda x: lax.sort(x, dimension=axis)


def indexed(draw, x, like):
    """Return an operation with indices that can be out of bounds, as JAX allows."""
    if not x.ndim or not x.shape[0]:
        return None
    places = np.array(draw(st.lists(st.integers(-4, 4), min_size=1, max_size=3)))
    mode = draw(st.sampled_from(["clip", "fill", "wrap"]))
    kept = draw(st.sampled_from(["clip", "drop"]))
    one = lambda x: jnp.ones((), x.dtype)
    choices = [
        lambda x: jnp.take(x, places, axis=0, mode=mode),
        lambda x: x.at[places].set(one(x), mode=kept),
        lambda x: lax.dynamic_slice_in_dim(x, places[0], 1),
        lambda x: lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(x[:1]), places[0], 0),
    ]
    if x.dtype != bool:
        choices.append(lambda x: x.at[places].add(one(x), mode=kept))
    if x.dtype != bool and not _complex(x):
        choices.append(lambda x: x.at[places].max(one(x), mode=kept))
    return draw(st.sampled_from(choices))


def controlled(draw, x, like):
    if not x.ndim or not x.shape[0] or x.dtype == bool or _complex(x):
        return None
    reverse = draw(st.booleans())
    body = lambda total, row: (jnp.maximum(total, row) - row, total)
    return draw(
        st.sampled_from(
            [
                lambda x: lax.scan(body, x[0], x, reverse=reverse)[1],
                lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.maximum(x, x[::-1]) - 1, x),
                lambda x: lax.cond(x.ravel()[0] > 1, jnp.flip, lambda x: x + x, x),
                lambda x: lax.switch((x.ravel()[0] > 0) * 2, [jnp.abs, jnp.flip, sum_of], x),
            ]
        )
    )


def sum_of(x):
    return x + x.sum(dtype=x.dtype)


KINDS = [unary, unary, tamed, tamed, binary, binary, binary, selected, broadcast, reduced]
KINDS += [argument, layout, layout, converted, product]
KINDS += [cumulative, in_order, indexed, indexed, controlled, controlled]


@st.composite
def programs(draw):
    """Draw a function, its arguments, and a list of its steps."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    args = [_array(rng, draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES)))]
    args += [_array(rng, x.shape, x.dtype) for x in args if draw(st.booleans())]
    avals, steps = [jax.typeof(jnp.asarray(x)) for x in args], []
    for _ in range(draw(st.integers(1, 7))):
        n = draw(st.integers(0, len(avals) - 1))
        x = avals[n]
        like = [m for m, y in enumerate(avals) if (y.shape, y.dtype) == (x.shape, x.dtype)]
        kind = draw(st.sampled_from(KINDS))
        f = kind(draw, x, range(len(like)))
        if f is None:
            continue
        others = like if kind in (binary, selected) else []
        out = jax.eval_shape(f, x, *(avals[m] for m in others))
        if out.size <= 64 and out.ndim <= 4:
            steps.append((f, n, others))
            avals.append(jax.typeof(out) if hasattr(out, "aval") else out)

    def program(*args):
        values = list(args)
        for f, n, others in steps:
            values.append(f(values[n], *(values[m] for m in others)))
        return values[len(args) :] or values

    return program, args


def _array(rng, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        drawn = rng.integers(limits.min, limits.max, shape, endpoint=True)
        return np.where(rng.random(shape) < 0.5, drawn, rng.integers(0, 9, shape)).astype(dtype)
    special = rng.choice([0.0, -0.0, 1.0, -1.0, 0.5, 2.5], shape)
    return np.where(rng.random(shape) < 0.7, rng.normal(size=shape) * 2, special).astype(dtype)


def differences(found, wanted):
    """Yield the results that differ from JAX, with their number."""
    for n, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield n, x, y
        elif _floating(y) or _complex(y):
            kind = np.complex128 if _complex(y) else np.float64
            scale = np.abs(y[np.isfinite(y)].astype(kind)).max(initial=1.0)
            wide = [v.astype(kind) for v in (x, y)]
            limit = ULPS * float(jnp.finfo(y.dtype).eps) * scale
            if not np.allclose(*wide, rtol=0, atol=limit, equal_nan=True):
                yield n, x, y
        elif not np.array_equal(x, y):
            yield n, x, y


def check(program, args, native):
    note(str(jax.make_jaxpr(program)(*args)))
    note(repr(args))
    # Run one primitive at a time, because fusion changes rounding. Each step has its tolerance.
    with jax.disable_jit():
        wanted = [np.asarray(x) for x in program(*map(jnp.asarray, args))]
    if native:
        found = compile(program, *args)(*args)
    else:
        graph, _, _ = trace(program, tuple(args))
        found = python_program(source_of(graph))(*args)
    wrong = list(differences(found, wanted))
    assert not wrong, wrong[0]


def _bounded(examples, start):
    def decorate(test):
        # Without a database of examples and with a fixed seed, a failure can be reproduced.
        phases = [Phase.generate]  # shrinking takes minutes, and programs are short
        limits = settings(
            max_examples=examples, deadline=None, database=None, phases=phases,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        return seed(SEED + start)(limits(test))

    return decorate


@_bounded(PROGRAMS, 0)
@given(programs())
def test_generated_python_agrees_with_jax(program):
    check(*program, native=False)


@pytest.mark.skipif(not NATIVE, reason="VENEER_RANDOM_NATIVE is 0")
@_bounded(max(NATIVE, 1), 1)
@given(programs())
def test_native_code_agrees_with_jax(program):
    check(*program, native=True)
