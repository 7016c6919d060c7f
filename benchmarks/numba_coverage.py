"""List the primitives that `vn.numba` compiles, by dtype, in docs/numba_coverage.md.

    python benchmarks/numba_coverage.py                  # an hour
    python benchmarks/numba_coverage.py --interpreted    # compile nothing; five minutes

A cell is a primitive on small operands of a dtype. Its generated code and its NumPy reference run,
and must agree with JAX. Primitives of the registry that no program here uses are listed below the
table.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import veneer as vn
from veneer.numba.codegen.graph import trace
from veneer.numba.codegen.registry import funcify, perform
from veneer.numba.compiler import source_of

PAGE = Path(__file__).parent.parent / "docs" / "numba_coverage.md"
DTYPES = "float32 float64 float16 bfloat16 int32 int8 uint32 bool complex64".split()

# Names in `lax` that differ from the name of the primitive.
NAMES = {"not": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj cos cosh "
    "digamma erf erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log log1p logistic neg "
    "not population_count real round rsqrt sign sin sinh sqrt square stop_gradient tan tanh"
).split()
BINARY = (
    "add and atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne "
    "nextafter or polygamma pow random_gamma_grad rem shift_left shift_right_arithmetic "
    "shift_right_logical sub xor"
).split()

Program = Callable[[Any, Any], Any]


def _window(reducer: Any, start: float) -> Program:
    return lambda x, y: lax.reduce_window(
        x, jnp.asarray(start, x.dtype), reducer, (2, 2), (1, 1), "VALID"
    )


def _scattered(method: str) -> Program:
    return lambda x, y: getattr(x.at[jnp.array([0, 2])], method)(y[:2])


def _image(x: Any, y: Any) -> Any:
    return lax.conv_general_dilated(x[None, None], y[None, None, :2, :2], (1, 1), "SAME")


def _positive(x: Any) -> Any:
    return x @ x.T + 9 * jnp.eye(3, dtype=x.dtype)


PROGRAMS: dict[str, Program] = {
    **{name: (lambda f: lambda x, y: f(x))(getattr(lax, NAMES.get(name, name))) for name in UNARY},
    **{name: getattr(lax, NAMES.get(name, name)) for name in BINARY},
    "argmax": lambda x, y: jnp.argmax(x, 1),
    "argmin": lambda x, y: jnp.argmin(x, 0),
    "bitcast_convert_type": lambda x, y: lax.bitcast_convert_type(x, _bits_of(x)),
    "broadcast_in_dim": lambda x, y: lax.broadcast_in_dim(x, (2, 3, 3), (1, 2)),
    "clamp": lambda x, y: lax.clamp(jnp.zeros_like(x), x, y),
    "concatenate": lambda x, y: lax.concatenate([x, y], 1),
    "convert_element_type": lambda x, y: lax.convert_element_type(
        x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
    ),
    "copy": lambda x, y: jnp.copy(x),
    "dot_general": lambda x, y: x @ y,
    "gather": lambda x, y: x[jnp.array([2, 0])],
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "iota": lambda x, y: lax.iota(x.dtype, 4),
    "log2": lambda x, y: jnp.log2(x),  # a primitive from JAX 0.12 on
    "optimization_barrier": lambda x, y: lax.optimization_barrier(x),
    "pad": lambda x, y: lax.pad(x, jnp.ones((), x.dtype), [(1, 0, 1), (0, 2, 0)]),
    "reduce": lambda x, y: lax.reduce(x, jnp.ones((), x.dtype), lambda a, b: a + b + a * b, (1,)),
    "reduce_and": lambda x, y: lax.reduce_and(x, (1,)),
    "reduce_max": lambda x, y: lax.reduce_max(x, (1,)),
    "reduce_min": lambda x, y: lax.reduce_min(x, (0,)),
    "reduce_or": lambda x, y: lax.reduce_or(x, (1,)),
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 5, 3),
    "reduce_prod": lambda x, y: lax.reduce_prod(x, (1,)),
    "reduce_sum": lambda x, y: lax.reduce_sum(x, (1,)),
    "reduce_xor": lambda x, y: lax.reduce_xor(x, (1,)),
    "reshape": lambda x, y: lax.reshape(x, (9,)),
    "regularized_incomplete_beta": lambda x, y: lax.betainc(x, y, x),
    "rev": lambda x, y: lax.rev(x, (1,)),
    "select_n": lambda x, y: lax.select_n(x == y, x, y),
    "slice": lambda x, y: lax.slice(x, (0, 1), (3, 3), (2, 1)),
    "split": lambda x, y: lax.split(x, (1, 2), 1),
    "squeeze": lambda x, y: lax.squeeze(x[:1], (0,)),
    "tile": lambda x, y: lax.tile(x, (2, 1)),
    "transpose": lambda x, y: lax.transpose(x, (1, 0)),
    "zeta": lambda x, y: lax.zeta(x + 1, y),
    "cumsum": lambda x, y: lax.cumsum(x, 1),
    "cumprod": lambda x, y: lax.cumprod(x, 0),
    "cummax": lambda x, y: lax.cummax(x, 0),
    "cummin": lambda x, y: lax.cummin(x, 0, reverse=True),
    "cumlogsumexp": lambda x, y: lax.cumlogsumexp(x, 0),
    "sort": lambda x, y: lax.sort(x, dimension=1),
    "top_k": lambda x, y: lax.top_k(x, 2),
    "dynamic_slice": lambda x, y: lax.dynamic_slice(x, (_index(y), 0), (2, 2)),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2], (_index(y), 0)),
    "scatter": _scattered("set"),
    "scatter-add": _scattered("add"),
    "scatter_mul": _scattered("multiply"),
    "scatter_max": _scattered("max"),
    "scatter_min": _scattered("min"),
    "conv_general_dilated": _image,
    "reduce_window": lambda x, y: lax.reduce_window(
        x, jnp.ones((), x.dtype), lambda a, b: a + b + a, (2, 2), (1, 1), "VALID"
    ),
    "reduce_window_sum": _window(lax.add, 0),
    "reduce_window_max": lambda x, y: lax.reduce_window(
        x, _least(x.dtype), lax.max, (2, 2), (1, 1), "VALID"
    ),
    "scan": lambda x, y: lax.scan(lambda c, row: (c * row, c), x[0], y),
    "while": lambda x, y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y), (0, x)
    ),
    "cond": lambda x, y: lax.cond((x == y)[0, 0], lambda x: x, lambda x: y, x),
    "cholesky": lambda x, y: lax.linalg.cholesky(_positive(x)),
    "triangular_solve": lambda x, y: lax.linalg.triangular_solve(_positive(x), y, lower=True),
    "lu": lambda x, y: lax.linalg.lu(_positive(x)),
    "lu_pivots_to_permutation": lambda x, y: lax.linalg.lu_pivots_to_permutation(
        jnp.array([1, 2, 2], jnp.int32) + 0 * x[0].astype(jnp.int32), 3
    ),
    "geqrf": lambda x, y: jnp.linalg.qr(x)[1],
    "householder_product": lambda x, y: jnp.linalg.qr(x)[0],
    "eig": lambda x, y: jnp.linalg.eigvals(x),
    "fft": lambda x, y: jnp.fft.fft(x).real,
    "schur": lambda x, y: lax.linalg.schur(x),
    "eigh": lambda x, y: jnp.linalg.eigvalsh(_positive(x)),
    "svd": lambda x, y: jnp.linalg.svd(x, compute_uv=False),
    "custom_linear_solve": lambda x, y: jnp.linalg.solve(_positive(x), y),
    "random_bits": lambda x, y: jax.random.bits(jax.random.key(jnp.uint32(3)), (3,)) + x[0],
    "threefry2x32": lambda x, y: jax.random.bits(jax.random.PRNGKey(jnp.uint32(3)), (3,)) + x[0],
}

OK, OPEN, WRONG, NONE = "**yes**", "*no*", "WRONG", ""


def _index(y: Any) -> Any:
    return (y[0, 0] == y[0, 0]).astype(jnp.int32)


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False, dtype)


def _bits_of(x: Any) -> Any:
    return jnp.dtype(f"uint{8 * x.dtype.itemsize}") if x.dtype != bool else jnp.uint8


def operands(dtype: str) -> list[np.ndarray]:
    """Return two matrices `[3, 3]` with entries where most functions are defined."""
    values = np.array([[0.3, 0.6, 0.2], [0.9, 0.5, 0.7], [0.1, 0.8, 0.4]])
    if dtype == "bool":
        values = values > 0.4
    elif "int" in dtype:
        values = values * 10
    elif dtype == "complex64":
        values = values + 0.5j * values.T
    return [np.asarray(v, jnp.dtype(dtype)) for v in (values, values.T)]


def primitives_in(program: Program, args: list[np.ndarray]) -> set[str]:
    """Return the primitives of a program, including primitives inside calls and loops."""
    graph, _, _ = trace(program, tuple(args))
    found = {equation.primitive for equation in graph.equations}
    return found | {e.primitive.name for e in jax.make_jaxpr(program)(*args).eqns}


def status(name: str, program: Program, dtype: str, *, native: bool) -> tuple[str, str]:
    """Return the content of a cell, and the reason if it does not work."""
    args = operands(dtype)
    try:
        jax.jit(program)(*args)
        met = primitives_in(program, args)
    except Exception:  # JAX raises many types of errors
        return NONE, ""
    if name not in met:
        return NONE, ""
    rtol = 1e-2 if jnp.dtype(dtype).itemsize == 2 else None
    try:
        source_of(trace(program, tuple(args))[0])
        vn.numba.compare_numba_and_py(program, args, native=native, rtol=rtol)
        vn.numba.compare_jax_and_py(program, args, rtol=rtol)
    except NotImplementedError as error:
        return OPEN, str(error)
    except Exception as error:  # any other error means a wrong result
        return WRONG, f"{type(error).__name__}: {error}"
    return OK, ""


def row(name: str, *, native: bool) -> tuple[list[str], list[str]]:
    cells, reasons = [], []
    for dtype in DTYPES:
        with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cell, reason = status(name, PROGRAMS[name], dtype, native=native)
        cells.append(cell)
        if cell in (WRONG, OPEN):
            reasons.append(f"{name}, {dtype}: {cell}: {' '.join(reason.split())[:300]}")
    return cells, reasons


def page(*, native: bool) -> str:
    lines = [
        "# Which primitives `vn.numba` compiles",
        "",
        "Written by `python benchmarks/numba_coverage.py`, which runs every cell: **yes** where",
        f"its code, {'compiled and ' if native else ''}run by Python, and its reference in NumPy "
        "give what JAX does;",
        "*no* where refused with a `NotImplementedError`; WRONG where any fails; and nothing where "
        "JAX",
        "has no such operation, or makes others of it.",
        f"Versions: JAX {jax.__version__}. See [vn.numba](numba.md).",
        "",
        f"| primitive | {' | '.join(DTYPES)} |",
        f"|---|{'---|' * len(DTYPES)}",
    ]
    for name in sorted(PROGRAMS):
        cells, reasons = row(name, native=native)
        for reason in reasons:
            print(reason, flush=True)
        if any(cells):
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    others = [name for name in funcify if name not in PROGRAMS]
    listed = ", ".join(f"`{name}`" for name in others)
    bare = ", ".join(f"`{name}`" for name in funcify if name not in perform)
    lines += ["", f"With a rule too, and no row here: {listed}."]
    lines += ["", f"Without a reference in NumPy: {bare}."] if bare else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpreted", action="store_true", help="compile nothing (faster)")
    PAGE.write_text(page(native=not parser.parse_args().interpreted), "utf-8")
