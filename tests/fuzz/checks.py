"""Whether a program gives of an implicit array what it gives of the dense one."""

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
from veneer.hijax.types import opened

from .by_numpy import by_numpy
from .operands import building_dense, undressed
from .programs import HIGH, Program

#: What is refused by what a type means: units that do not fit, names of axes that would be lost.
REFUSALS = {
    "Quantity": ("unit", "dimension", "cannot be converted", "metadata differs"),
    "Named": ("name", "axis", "axes", "metadata differs"),
    "Masked": ("has no dense form", "counts all entries"),
    "SparseArray": ("Symbolic dimension comparison",),  # in JAX's own functions of BCOO
}
#: Part of the lines of which something else is meant: what is read out of bounds is not valid.
MEANT_OTHERWISE = {"Masked": "mode='fill'"}
#: With high types, JAX's functions of keys ask for arrays of keys, the tangent of a value that has
#: one for each leaf is no array, and what may be such a tangent is not combined. No halves are of
#: what cannot be cut.
HIGH_REFUSALS = ("PRNG", "derivatives by the leaves of a value are no array", "may be an array, or")
HIGH_REFUSALS += ("shard_map cannot cut", "holds derivatives by leaves")
#: Nor have the leaves of a value derivatives that has a dense one, where devices compute on them;
#: and what is kept for a derivative at once, no way to be shared among them.
HIGH_REFUSALS += ("a type whose tangent is the dense array gives none to its leaves",)
HIGH_REFUSALS += ("for which JAX has no spec",)
#: A type whose leaves are dense says so of the others.
HIGH_REFUSALS += (" takes a dense array for ",)


def _is_of_jax(error: Exception) -> bool:
    """Whether it is JAX 0.10's own: a constant of a `shard_map` in a jit has no spec there.

    docs/hijax.md says so. The assertion has no message, but a place (`with_all_frames`).
    """
    places = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return jax.__version_info__ < (0, 11) and "_shard_map_dce" in places


@contextmanager
def with_all_frames() -> Iterator[None]:
    """Leaves JAX's own frames in what is raised within."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


#: The errors by which something is refused.
_REFUSED = (TypeError, ValueError, NotImplementedError)
_EPS = float(jnp.finfo("float32").eps)


class Disagreement(AssertionError):
    """A program that gives something else of the dense array."""


def check(program: Program, compiled: bool = True) -> str:
    """Runs a program both ways: compiled, or by NumPy.

    **Returns:** "agrees"; "refused", by what its type means; or "invalid", as it is of the dense
    array as well.

    **Raises:** `Disagreement`.
    """
    with jax.enable_x64(program.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if any(MEANT_OTHERWISE.get(program.kind, "\n") in text for text in program.lines):
            return "refused"
        if "exported" in program.text and any("over_devices" in text for text in program.lines):
            return "invalid"  # XLA ends the process if a shard_map has a symbolic size
        x, dense = program.operands()
        if program.is_stacked and (not jnp.shape(dense) or len(dense) != 3):
            return "invalid"  # nothing of it is stored, or could be stacked
        try:
            run = jax.jit(partial(_of_dense, program)) if compiled else None
            run = run or partial(by_numpy, partial(_of_dense, program))
            with building_dense():
                expected, rounding = run(program.reference(), dense)
        except Exception:  # JAX does not take it
            return "invalid"
        high = program.transformation in HIGH
        try:
            with vn.hijax.enabled() if high else nullcontext(), with_all_frames():
                of = lambda x: opened(program.run((lambda f: f) if high else vn.implicit, x))
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
    """What a program gives if `m` makes arrays dense, and what roundings on the way may be off by.

    Those are of the largest number there, some in the coarsest dtype and many in float32: a
    conversion to a finer one may come before the rounding that a dense array has had. XLA rounds
    each partial sum of a derivative in half precision, where it is not compiled with others.
    """
    expected = program.run(lambda f: lambda *xs: f(*map(undressed, xs)), x)
    results = (jax.vmap if program.is_stacked else lambda f: f)(program.results)(dense)
    results = [of for of in results if jnp.issubdtype(of.dtype, jnp.floating)]
    eps = max(float(jnp.finfo(of.dtype).eps) * max(16, of.size / 8) for of in results)
    size = jnp.stack([*map(_size, [*results, expected]), 1.0]).max()
    return expected, max(eps, 300 * _EPS) * size


#: JAX calls what it exported for two devices only beside another program of two. And it compiles
#: for a mesh only under `jax.set_mesh`, which `on_a_mesh` cannot enter while it is traced.
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
    """What is said of a bad argument, and of those that an error was raised from."""
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
