"""Read slices of a stack in place, in products inside loops.

In a scan over layers, each weight is a slice of a stack. XLA does not look into a kernel, so it
copies the slice before it calls the kernel, which takes longer than the product. Here, `while` is
lowered for a CPU with another body, in which the kernel gets the stack and the index of the slice.
JAX lowers after all transformations, so no derivative, batch or jaxpr changes. XLA still computes
slices that other operations read, and removes the others.

`lower_loops_in_place` changes JAX when the first product is traced, not at import. Loops without
products lower as before.
"""

import math
import os
import threading
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
from .common.problem import MatmulProblem, unflatten
from .lowering import Stacked, call_cpu_kernel, find_cpu_kernel, is_local

#: The name of the primitive of products with stored matrices.
MATMUL = "stored_matmul"

# No other lock: a thread can hold one while it waits for the thread that traces the product.
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A forked process has no thread that could release the lock.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_is_installed = False


def lower_loops_in_place() -> None:
    """Change how JAX lowers `while` for CPUs to `_lower_while`, once in a process."""
    global _is_installed
    if _is_installed:
        return
    with _lock:
        if not _is_installed:
            wrap_lowering(find_primitive("while"), "cpu", _lower_while)
            _is_installed = True


def _lower_while(
    jax_rule: Callable,
    ctx: Any,
    *values: Any,
    body_jaxpr: Any,
    body_nconsts: int,
    **params: Any,
) -> Any:
    """Lower a `while` by JAX's rule. If the body has products, let these read stacks in place.

    JAX has already converted each `scan` to a `while`.
    """

    def in_place(*operands: Any) -> list[Any]:
        # Only constants of the loop are stacks: XLA would copy a carry that is written to.
        constants = [_Slice(x, x, np.int32(0)) for x in operands[:body_nconsts]]
        return _run(body_jaxpr, [*constants, *operands[body_nconsts:]])

    body = body_jaxpr
    has_products = is_or_contains(find_primitive("while"), {"body_jaxpr": body}, MATMUL)
    # No type names a mesh.
    if (
        has_products
        and is_local(ctx, "cpu")
        and all(aval.sharding.mesh.empty for aval in ctx.avals_in if hasattr(aval, "sharding"))
    ):
        body = jax.make_jaxpr(in_place)(*body.in_avals)
    return jax_rule(ctx, *values, body_jaxpr=body, body_nconsts=body_nconsts, **params)


#: The operands that kernels can read from a stack.
_STACKABLE = ("packed", "scale", "zero_point", "minimum", "outer_scale", "outer_minimum")


class _Slice(NamedTuple):
    """An array that is one of the equal parts of a stack, which are contiguous in memory.

    **Arguments:**

    - `array`: the slice itself, which XLA computes if an operation reads it.
    - `stack`: the stack.
    - `index`: the index of the part, an integer. Out of bounds, it means the first or last part.
    - `is_transposed`: whether the last two axes are swapped, compared with the stack.
    """

    array: jax.Array
    stack: jax.Array
    index: Any
    is_transposed: bool = False

    def index_in_bounds(self) -> jax.Array:
        """Return `index` as an int32, clipped to the parts of the stack."""
        return start_in_bounds(self.index, self.stack.size // max(1, self.array.size))


def _array_of(x: Any) -> Any:
    return x.array if isinstance(x, _Slice) else x


# Evaluate the body of a loop, one equation at a time.


def _run(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    return [_array_of(x) for x in evaluate_jaxpr(close_jaxpr(jaxpr), operands, _equation)]


#: Primitives that only run the jaxpr that they contain, after all derivatives are taken.
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
    if primitive.name in _CALLS and (contains(MATMUL) or contains("dynamic_slice")):
        if params.get("differentiated") and params["prevent_cse"]:
            # Keep XLA from merging the recomputation in a checkpoint with the first computation.
            arrays = lax.optimization_barrier(list(map(_array_of, operands)))
            pairs = zip(operands, arrays, strict=True)
            operands = [x._replace(array=a) if isinstance(x, _Slice) else a for x, a in pairs]
        return evaluate_jaxpr(close_jaxpr(contained_jaxpr(params)), operands, _equation)
    if primitive.name == "cond" and contains(MATMUL):
        index, *rest = operands
        branches = [lambda branch=branch: _run(branch, rest) for branch in params["branches"]]
        return lax.switch(_array_of(index), branches)
    if primitive.name == MATMUL and (product := _product(operands, **params)) is not None:
        return [product]
    out = primitive.bind(*map(_array_of, operands), **primitive.get_bind_params(params))
    if primitive.multiple_results:
        return out
    rule = _SLICE_RULES.get(primitive.name)
    return [out if rule is None else rule(out, *operands, **params)]


def _product(
    operands: Sequence[Any], *, problem: MatmulProblem, present: Sequence[bool]
) -> jax.Array | None:
    """Compute a product by a CPU kernel that reads the stored matrix in its stack.

    `operands` are arrays or `_Slice`. Return None if the matrix is not a `_Slice`, or if no kernel
    fits. `present` says which fields of `MatmulOperands` the operands are.
    """
    slices = unflatten(operands, present)
    if not isinstance(slices.packed, _Slice):
        return None
    arrays = unflatten(list(map(_array_of, operands)), present)
    if slices.packed.is_transposed:
        if problem.codes.bits < 8 or arrays.packed.ndim == 4 or problem.tiles is not None:
            return None
        arrays = arrays._replace(packed=arrays.packed.swapaxes(1, 2))
        problem, arrays = problem.with_transposed_matrix(arrays)
    kernel = find_cpu_kernel(arrays, problem)
    if kernel is None:
        return None
    stacks = {}
    for name in _STACKABLE:
        leaf, array = getattr(slices, name), getattr(arrays, name)
        if isinstance(leaf, _Slice) and leaf.is_transposed == slices.packed.is_transposed:
            index = leaf.index if leaf.index.dtype == jnp.int32 else leaf.index_in_bounds()
            stacks[name] = Stacked(leaf.stack.reshape(-1, *array.shape[1:]), index)
    return call_cpu_kernel(kernel, arrays, problem, stacks)


# Operations that return slices, or keep them.


def _dynamic_slice(out: Any, x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    is_entry = slice_sizes[0] == 1 and tuple(slice_sizes[1:]) == _array_of(x).shape[1:]
    return _entry(out, x, starts[0]) if is_entry else out


def _slice(out: Any, x: Any, *, start_indices: Sequence[int], **params: Any) -> Any:
    is_entry = out.shape[0] == 1 and out.shape[1:] == _array_of(x).shape[1:]
    return _entry(out, x, np.int32(start_indices[0])) if is_entry else out


def _entry(out: Any, x: Any, start: Any) -> Any:
    """Return `out`, which is entry `start` of x along the first axis, as a `_Slice` if possible.

    It is possible if x is a `_Slice` that is not transposed.
    """
    if not isinstance(x, _Slice) or x.is_transposed:
        return out
    start, count = jnp.asarray(_array_of(start)), x.array.shape[0]
    if x.array.size == x.stack.size:
        return _Slice(out, x.stack, start)
    return _Slice(out, x.stack, x.index_in_bounds() * count + start_in_bounds(start, count))


def _reshape(out: Any, x: Any, *operands: Any, **params: Any) -> Any:
    if not isinstance(x, _Slice) or math.prod(out.shape) != x.array.size:
        return out
    if x.is_transposed and out.shape[-2:] != x.array.shape[-2:]:
        return out
    return x._replace(array=out)


def _transpose(out: Any, x: Any, *, permutation: Sequence[int]) -> Any:
    *first, n, m = permutation if len(permutation) > 1 else (0, 0)
    count = len(first)
    swaps_last_two = first == [*range(count)] and (n, m) == (count + 1, count)
    if not (isinstance(x, _Slice) and swaps_last_two):
        return out
    return x._replace(array=out, is_transposed=not x.is_transposed)


_SLICE_RULES: dict[str, Callable[..., Any]] = {
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "squeeze": _reshape,
    "reshape": _reshape,
    "broadcast_in_dim": _reshape,
    "transpose": _transpose,
}
