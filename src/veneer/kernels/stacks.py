"""Products with a slice of a stack, as the layers of a scan are: read from where they lie.

XLA does not look into a kernel, so it cuts what a kernel reads from the stack, and writes it
elsewhere first: that takes longer than the product. Here a loop is lowered for a CPU with another
body, in which such a product is given the stack and the place. That is when JAX has done all else:
no derivative, batch or program that users see knows of it. The slice is cut where another reads it,
and XLA leaves it out where nobody does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax.primitives import (
    close_jaxpr,
    contained_jaxpr,
    evaluate_jaxpr,
    find_primitive,
    is_or_contains,
    start_in_bounds,
    wrap_lowering,
)
from .common.problem import MatmulProblem, operands_of
from .lowering import Stacked, call_kernel, is_for_this_cpu, kernel_for
from .matmul import matmul_p, turned_by


def _lowered(
    otherwise: Callable,
    ctx: Any,
    *values: Any,
    body_jaxpr: Any,
    body_nconsts: int,
    **params: Any,
) -> Any:
    """Lowers a `while`, which a `scan` is by then."""

    def in_place(*operands: Any) -> list[Any]:
        # What goes round the loop is no stack: if it is written to, XLA would have to copy it.
        constants = [_Slice(x, x, np.int32(0)) for x in operands[:body_nconsts]]
        return _run(body_jaxpr, [*constants, *operands[body_nconsts:]])

    body = body_jaxpr
    if _has_products(body) and _is_local(ctx):
        body = jax.make_jaxpr(in_place)(*body.in_avals)
    return otherwise(ctx, *values, body_jaxpr=body, body_nconsts=body_nconsts, **params)


wrap_lowering(find_primitive("while"), "cpu", _lowered)

#: What kernels read from where it lies in a stack.
_LEAVES = ("packed", "scale", "zero_point", "minimum", "outer_scale", "outer_minimum")


def _has_products(jaxpr: Any) -> bool:
    return is_or_contains(find_primitive("while"), {"body_jaxpr": jaxpr}, matmul_p.name)


def _is_local(ctx: Any) -> bool:
    """Whether a program is for this process, and one device that no type names."""
    return is_for_this_cpu(ctx) and all(
        aval.sharding.mesh.empty for aval in ctx.avals_in if hasattr(aval, "sharding")
    )


class _Slice(NamedTuple):
    """An array that is one of the equal parts of a stack, one after the other in memory.

    **Arguments:**

    - `whole`: the array.
    - `place`: which part it is, an integer; outside of bounds the first or the last.
    - `turned`: whether its last two axes are those of the stack the other way round.
    """

    whole: jax.Array
    stack: jax.Array
    place: Any
    turned: bool = False

    def place_in_bounds(self) -> jax.Array:
        """The place, as an i32."""
        return start_in_bounds(self.place, self.stack.size // max(1, self.whole.size))


def _whole(x: Any) -> Any:
    return x.whole if isinstance(x, _Slice) else x


# A body, an equation at a time.


def _run(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    return [_whole(x) for x in evaluate_jaxpr(close_jaxpr(jaxpr), operands, _equation)]


#: Primitives that are the program that they contain, once all derivatives are taken.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "eval_jaxpr",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
}


def _equation(equation: Any, operands: list[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    contains = lambda name: is_or_contains(primitive, params, name)
    if primitive.name in _CALLS and (contains(matmul_p.name) or contains("dynamic_slice")):
        if params.get("differentiated") and params["prevent_cse"]:
            operands = _barrier(operands)
        return evaluate_jaxpr(close_jaxpr(contained_jaxpr(params)), operands, _equation)
    if primitive.name == "cond" and contains(matmul_p.name):
        return _branches(operands, **params)
    if primitive is matmul_p and (product := _product(operands, **params)) is not None:
        return [product]
    out = primitive.bind(*map(_whole, operands), **primitive.get_bind_params(params))
    if primitive.multiple_results:
        return out
    rule = _SLICES.get(primitive.name)
    return [out if rule is None else rule(out, *operands, **params)]


def _barrier(operands: Sequence[Any]) -> list[Any]:
    """As JAX has a checkpoint that is computed again: XLA must not have it share what was."""
    wholes = lax.optimization_barrier(list(map(_whole, operands)))
    pairs = zip(operands, wholes, strict=True)
    return [x._replace(whole=new) if isinstance(x, _Slice) else new for x, new in pairs]


def _branches(operands: Sequence[Any], *, branches: Sequence[Any], **params: Any) -> list[Any]:
    del params
    index, *rest = operands
    programs = [lambda branch=branch: _run(branch, rest) for branch in branches]
    return lax.switch(_whole(index), programs)


def _product(
    operands: Sequence[Any], *, problem: MatmulProblem, present: Sequence[bool]
) -> jax.Array | None:
    """The product with a matrix that is a slice, by a kernel; or None where it is no such."""
    given = operands_of(operands, present)
    if not isinstance(given.packed, _Slice):
        return None
    arrays = operands_of(list(map(_whole, operands)), present)
    if given.packed.turned:
        if problem.codes.bits < 8 or arrays.packed.ndim == 4 or problem.tiles is not None:
            return None
        problem, arrays = turned_by(arrays._replace(packed=arrays.packed.swapaxes(1, 2)), problem)
    target = kernel_for(arrays, problem)
    if target is None:
        return None
    stacks = {}
    for name in _LEAVES:
        leaf, array = getattr(given, name), getattr(arrays, name)
        if isinstance(leaf, _Slice) and leaf.turned == given.packed.turned:
            place = leaf.place if leaf.place.dtype == jnp.int32 else leaf.place_in_bounds()
            stacks[name] = Stacked(leaf.stack.reshape(-1, *array.shape[1:]), place)
    return call_kernel(target, arrays, problem, stacks)


# What gives slices, and what leaves them such.


def _dynamic_slice(out: Any, x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    whole = _whole(x)
    is_part = slice_sizes[0] == 1 and tuple(slice_sizes[1:]) == whole.shape[1:]
    return _part(out, x, starts[0]) if is_part else out


def _slice(
    out: Any, x: Any, *, start_indices: Sequence[int], limit_indices: Any, strides: Any
) -> Any:
    del limit_indices, strides  # of one entry
    is_part = out.shape[0] == 1 and out.shape[1:] == _whole(x).shape[1:]
    return _part(out, x, np.int32(start_indices[0])) if is_part else out


def _part(out: Any, x: Any, start: Any) -> Any:
    """One of the entries along the first axis of a slice, or of what is all of a stack."""
    if not isinstance(x, _Slice) or x.turned:
        return out
    start, count = jnp.asarray(_whole(start)), x.whole.shape[0]
    if x.whole.size == x.stack.size:
        return _Slice(out, x.stack, start)
    place = x.place_in_bounds() * count + start_in_bounds(start, count)
    return _Slice(out, x.stack, place)


def _reshaped(out: Any, x: Any, *operands: Any, **params: Any) -> Any:
    if not isinstance(x, _Slice) or math.prod(out.shape) != x.whole.size:
        return out
    if x.turned and out.shape[-2:] != x.whole.shape[-2:]:
        return out
    return x._replace(whole=out)


def _transposed(out: Any, x: Any, *, permutation: Sequence[int]) -> Any:
    *first, n, m = permutation if len(permutation) > 1 else (0, 0)
    count = len(first)
    swaps = first == [*range(count)] and (n, m) == (count + 1, count)
    if not (isinstance(x, _Slice) and swaps):
        return out
    return x._replace(whole=out, turned=not x.turned)


_SLICES: dict[str, Callable[..., Any]] = {
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "squeeze": _reshaped,
    "reshape": _reshaped,
    "broadcast_in_dim": _reshaped,
    "transpose": _transposed,
}
