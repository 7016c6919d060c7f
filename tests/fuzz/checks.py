"""Compare a program on an implicit array with the same program on the dense array."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import veneer as vn
from veneer.hijax.types import unpack

from .by_numpy import by_numpy
from .operands import building_dense, undressed
from .programs import HIGH, Program

#: Parts of the messages by which a type rejects an operation, such as units that do not fit.
REFUSALS = {
    "Quantity": ("unit", "dimension", "cannot be converted", "metadata differs"),
    "Named": ("name", "axis", "axes", "metadata differs"),
    "Masked": ("has no dense form", "counts all entries"),
    "SparseArray": ("Symbolic dimension comparison",),  # in JAX's own functions of BCOO
}
#: Texts of lines to skip for a type, because their result differs by design: an out-of-bounds
#: entry of a `Masked` array is invalid.
MEANT_OTHERWISE = {"Masked": "mode='fill'"}
#: Parts of the messages by which high types reject a program.
HIGH_REFUSALS = (
    # JAX's random functions require key arrays.
    "PRNG",
    # A tangent with one derivative per leaf is not an array.
    "derivatives with respect to the leaves of a value are not an array",
    "holds derivatives of its leaves",
    # A collective cannot tell whether a tree is an array or its derivatives.
    "is this an array, or",
    # An axis whose values are stored together cannot be split between devices.
    "shard_map cannot split",
    # A type with a dense tangent has no derivatives per leaf, as a shard_map would need.
    "the tangent of this type is a dense array",
    # JAX has no spec for an implicit array that a shard_map saves for its backward pass.
    "for which JAX has no spec",
    # A type with dense leaves rejects other leaves.
    " takes a dense array for ",
)


def _is_of_jax(error: Exception) -> bool:
    """Return whether an assertion of JAX 0.10 failed: a constant of a `shard_map` has no spec.

    docs/hijax.md describes it. The assertion has no message, only a traceback (`with_all_frames`).
    """
    places = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return jax.__version_info__ < (0, 11) and "_shard_map_dce" in places


@contextmanager
def with_all_frames() -> Iterator[None]:
    """Keep JAX's own frames in the traceback of errors."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


#: The errors that reject an operation.
_REFUSED = (TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation)
_EPS = float(jnp.finfo("float32").eps)


class Disagreement(AssertionError):
    """A program has another result on the dense array."""


def check(program: Program, compiled: bool = True) -> str:
    """Compare a program on an implicit array with the same program on the dense array.

    **Arguments:**

    - `compiled`: whether to compile the programs with XLA, or else run them with NumPy.

    **Returns:** "agrees"; "refused" if the type rejects the operation; or "invalid" if the program
    also fails on the dense array or cannot be run.

    **Raises:** `Disagreement` if the results differ, or if only the implicit array gives an error.
    """
    with jax.enable_x64(program.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if any(MEANT_OTHERWISE.get(program.kind, "\n") in text for text in program.lines):
            return "refused"
        if "exported" in program.text and any("over_devices" in text for text in program.lines):
            return "invalid"  # XLA ends the process if a shard_map has a symbolic size
        x, dense = program.operands()
        if program.is_stacked and (not jnp.shape(dense) or len(dense) != 3):
            return "invalid"  # it stores nothing that could be stacked
        try:
            run = jax.jit(partial(_of_dense, program)) if compiled else None
            run = run or partial(by_numpy, partial(_of_dense, program))
            with building_dense():
                expected, rounding = run(program.reference(), dense)
        except Exception:  # JAX rejects it
            return "invalid"
        high = program.transformation in HIGH
        try:
            with vn.hijax.enabled() if high else nullcontext(), with_all_frames():
                of = lambda x: unpack(program.run((lambda f: f) if high else vn.implicit, x))
                result = of(x) if compiled else by_numpy(undressed, by_numpy(of, x))
        except Exception as error:
            refusals = [*_refusals(program), *(HIGH_REFUSALS if high else ())]
            said = _messages(error) if isinstance(error, _REFUSED) else ()
            if any(text in message for message in said for text in refusals):
                return "refused"
            if high and _is_of_jax(error):
                return "refused"
            raise Disagreement(f"{type(error).__name__}: {error}") from error
        if repeated := _repeated_label(result):
            raise Disagreement(f"{result!r}: a {repeated} within a {repeated}")
        try:
            _compare(undressed(result), expected, float(rounding))
        except (TypeError, ValueError) as error:
            raise Disagreement(f"{result!r}: {error}") from error
        return "agrees"


def _of_dense(program: Program, x: Any, dense: Any) -> tuple[Any, Any]:
    """Return the result of a program on dense arrays, and the absolute tolerance for it.

    The tolerance is relative to the largest finite magnitude of all intermediate results. It covers
    some roundings in the coarsest dtype and many in f32. With implicit arrays, a conversion to a
    finer dtype may come before a rounding. XLA rounds each partial sum of a derivative in half
    precision unless it fuses them.
    """
    expected = program.run(lambda f: lambda *xs: f(*map(undressed, xs)), x)
    results = (jax.vmap if program.is_stacked else lambda f: f)(program.results)(dense)
    results = [of for of in results if jnp.issubdtype(of.dtype, jnp.floating)]
    eps = max(float(jnp.finfo(of.dtype).eps) * max(16, of.size / 8) for of in results)
    size = jnp.stack([*map(_size, [*results, expected]), 1.0]).max()
    return expected, max(eps, 300 * _EPS) * size


#: Limits of JAX. A program exported for two devices can be called only from a program on two
#: devices. And JAX compiles for a mesh only under `jax.set_mesh`, which no trace can enter.
_LIMITS = ("was exported for 2 devices", "Length of device assignment", "only AbstractMesh exists")


def _refusals(program: Program) -> list[str]:
    """Return parts of the messages by which the types of a program's arrays may refuse it."""
    text = " ".join([program.operand, *program.lines])
    return [*_LIMITS] + [
        part for name, parts in REFUSALS.items() if f".{name}(" in text for part in parts
    ]


def _repeated_label(x: Any, outside: tuple[type, ...] = ()) -> str:
    """Return the name of a label type that a result has twice, one within the other."""
    if not isinstance(x, vn.Value):
        return ""
    if type(x) in outside:
        return type(x).__name__
    is_label = type(x).__name__ in REFUSALS
    parts = jax.tree.leaves(x, is_leaf=lambda part: part is not x and isinstance(part, vn.Value))
    within = (*outside, type(x)) if is_label else outside
    return next(filter(None, (_repeated_label(part, within) for part in parts)), "")


def _messages(error: BaseException | None) -> Iterator[str]:
    """Yield the messages of an error and of the errors that caused it."""
    while error is not None:
        if isinstance(error, _REFUSED):
            yield str(error)
        error = error.__cause__


def _size(x: Any) -> Any:
    return jnp.max(jnp.abs(x), initial=0, where=jnp.isfinite(x)).astype("float32")


def _compare(found: Any, expected: Any, rounding: float) -> None:
    found, expected = jnp.asarray(found), jnp.asarray(expected)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise Disagreement(f"{found.aval} where dense arrays give {expected.aval}")
    one, other = (np.asarray(a, np.float64) for a in (found, expected))
    if not np.allclose(one, other, rtol=0, atol=rounding, equal_nan=True):
        raise Disagreement(f"{one.tolist()} where dense arrays give {other.tolist()}")
