"""`matmul`: the product of activations with a stored matrix, as a JAX primitive.

One primitive, and not `lax.platform_dependent`: that traces every platform's way in each program
and each derivative, and its batching would batch them all. A primitive has one rule for each
transformation, and a platform's way is chosen as it is lowered.

- It is linear in the activations, and their cotangent is the product with the same bytes by the
  other side. So no dense matrix appears in a derivative.
- It is linear in the scales of both operands, too; in the matrix's together with its minima.
  Their cotangents are by the reference: a sum over tiles of a matrix of that size.
- Mapped activations are more rows; mapped matrices a batch.
- Lowered for CPU it is a call of a kernel, where there is one. Elsewhere, and in a program that is
  exported, which other processes run, it is the reference: XLA's way, on the same bytes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from .._jax.primitives import Primitive, compile_when_eager, require_devices_for_lowering
from .._jax.tracing import vary_together
from .common.problem import MatmulOperands, MatmulProblem, operands_of
from .lowering import (
    by_gpu_kernel,
    by_kernel,
    by_reference,
    is_for_this_cpu,
    is_for_this_gpu,
    lowered_p,
)


def matmul(operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    """Returns the product of activations with a stored matrix, by a kernel where there is one.

    `x @ W` if `problem.contracting` is "rows" and `x @ W.T` if it is "columns", of W `[R, C]`: what
    the codes are worth, less their zero points, times their scales, and minima. Sums are in f32, or
    of integer activations exact for each tile.

    **Returns:** `[B, M, N]`, of `problem.out_dtype`.
    """
    present = [x is not None for x in operands]
    arrays = vary_together([x for x in operands if x is not None])
    return matmul_p.bind(*arrays, problem=problem, present=tuple(present))


matmul_p = Primitive("stored_matmul")
require_devices_for_lowering(matmul_p)  # which `sharding` needs

compile_when_eager(matmul_p)


@matmul_p.def_abstract_eval
def _typed(*avals: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    return problem.out_aval(*avals[:2])


# Derivatives. It is linear in each of x, x_scale, and scale with minimum.


def _jvp(
    primals: Any, tangents: Any, *, problem: MatmulProblem, present: Sequence[bool]
) -> tuple[Any, Any]:
    operands, along = operands_of(primals, present), operands_of(tangents, present)
    moved = [
        _along(operands, problem, name, tangent)
        for name, tangent in zip(operands._fields, along, strict=True)
        if tangent is not None and type(tangent) is not ad.Zero
    ]
    return matmul(operands, problem), functools.reduce(ad.add_tangents, moved)


def _along(
    operands: MatmulOperands, problem: MatmulProblem, name: str, tangent: jax.Array
) -> jax.Array:
    """The derivative by one of the operands."""
    if problem.tiles is not None and name.startswith("outer_"):
        name = name.removeprefix("outer_")
        tangent = problem.tiles.wide(getattr(operands, name), tangent)
    if name in ("scale", "minimum"):
        problem, operands = problem.plain(operands)
    if name == "scale":
        operands = operands._replace(minimum=None)
    elif name == "minimum":
        operands = operands._replace(scale=jnp.zeros_like(operands.scale, jnp.float32))
    return matmul(operands._replace(**{name: tangent}), problem)


ad.primitive_jvps[matmul_p] = _jvp


def _transpose(
    cotangent: Any, *arrays: Any, problem: MatmulProblem, present: Sequence[bool]
) -> Any:
    (i,) = (i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval) if j == i else None for j, x in enumerate(arrays)]
    operands = operands_of(arrays, present)
    if ad.is_undefined_primal(operands.x):
        transposed = _of_x(cotangent, operands, problem)
    elif ad.is_undefined_primal(operands.x_scale) and len(operands.x_scale.aval.shape) == 2:
        transposed = _of_x_scale(cotangent, operands, problem)
    else:
        names = (name for name, x in operands._asdict().items() if ad.is_undefined_primal(x))
        transposed = _of_leaf(next(names), cotangent, operands, problem)
    return [transposed if j == i else None for j in range(len(arrays))]


ad.primitive_transposes[matmul_p] = _transpose


def _of_x(cotangent: jax.Array, operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    dtype = operands.x.aval.dtype.name
    back = dataclasses.replace(problem.transposed, out_dtype=dtype)
    return matmul(operands._replace(x=cotangent), back)


def _of_leaf(
    name: str, cotangent: jax.Array, operands: MatmulOperands, problem: MatmulProblem
) -> jax.Array:
    aval = getattr(operands, name).aval

    def by_leaf(leaf: jax.Array) -> jax.Array:
        plain, others = problem.plain(operands._replace(**{name: leaf}))
        return plain.reference(others, plain)

    return jax.vjp(by_leaf, jnp.ones(aval.shape, aval.dtype))[1](cotangent)[0]


def _of_x_scale(
    cotangent: jax.Array, operands: MatmulOperands, problem: MatmulProblem
) -> jax.Array:
    aval = operands.x_scale.aval
    ones = operands._replace(x_scale=jnp.ones(aval.shape, aval.dtype))
    unscaled = matmul(ones, dataclasses.replace(problem, out_dtype="float32"))
    return jnp.sum(cotangent.astype(jnp.float32) * unscaled, axis=2)


# Batching.


def _batch(
    arrays: Any, dims: Any, *, problem: MatmulProblem, present: Sequence[bool]
) -> tuple[jax.Array, int]:
    (size,) = {x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None}
    operands, axes = operands_of(arrays, present), operands_of(dims, present)
    each = [n for axis, n in enumerate(operands.x.shape) if axis != axes.x]  # [B, M, K]
    of_matrix = axes._replace(x=None, x_scale=None)
    if all(axis is None for axis in of_matrix):
        rows = [(x, axis) for x, axis in ((operands.x, axes.x), (operands.x_scale, axes.x_scale))]
        x, x_scale = (None if x is None else _as_rows(x, axis, size) for x, axis in rows)
        out = matmul(operands._replace(x=x, x_scale=x_scale), problem)
        return out.reshape(out.shape[0], size, each[1], out.shape[2]), 1
    if axes.packed is None:  # rather than as many copies of the matrix
        of_arrays = lambda *arrays: by_reference(*arrays, problem=problem, present=present)
        return jax.vmap(of_arrays, in_axes=tuple(dims))(*arrays), 0
    stacked = [_as_batch(x, axis, size) for x, axis in zip(arrays, dims, strict=True)]
    out = matmul(operands_of(stacked, present), problem)
    return out.reshape(size, each[0], *out.shape[1:]), 0


batching.primitive_batchers[matmul_p] = _batch


def _as_rows(x: Any, axis: int | None, size: int) -> Any:
    """`[B, M, ...]` with a mapped axis anywhere, or none, as `[B, size * M, ...]`."""
    x = _with_axis(x, axis, size, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _as_batch(x: Any, axis: int | None, size: int) -> Any:
    """`[B, ...]` with a mapped axis anywhere, or none, as `[size * B, ...]`."""
    x = _with_axis(x, axis, size, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _with_axis(x: Any, axis: int | None, size: int, to: int) -> Any:
    if axis is not None:
        return jnp.moveaxis(x, axis, to)
    return jnp.broadcast_to(jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:]))


# Lowering: the product of the matrix that is stored, where what is given is its transposition.


def _lowered(ctx: Any, *values: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    # Without what a shard_map says of them: all that is computed here stays on one device.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    is_turned = problem.codes.bits == 8 and operands_of(avals, present).packed.ndim == 3
    source = _source(values[1]) if is_turned else None
    apart = _apart(ctx, values[1]) if source is None else None
    if apart is not None:
        problem = dataclasses.replace(problem, leading=2)

    # What is cached is lowered elsewhere, where no product sees those that share its x.
    compute: Any = lowered_p.bind
    if is_for_this_cpu(ctx):
        compute = by_kernel
    elif is_for_this_gpu(ctx):
        compute = by_gpu_kernel

    def call(*arrays: Any) -> jax.Array:
        if source is None:
            return compute(*arrays, problem=problem, present=present)
        plain, operands = problem.plain(operands_of(arrays, present))
        packed = operands.packed.reshape(operands.x.shape[0], *operands.packed.shape[-2:])
        turned, operands = turned_by(operands._replace(packed=packed), plain)
        moved = [x for x in operands if x is not None]
        there = tuple(x is not None for x in operands)
        return compute(*moved, problem=turned, present=there)

    stored = source or apart
    if stored is not None:
        values = (values[0], stored, *values[2:])
        avals[1] = avals[1].update(shape=tuple(stored.type.shape))
    return mlir.lower_fun(call, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _source(packed: Any) -> Any:
    """What stored matrices are a transposition of, in the program that is lowered; or None.

    To transpose codes, as `w.T` does, takes longer than the product, which may as well sum the
    other side. Where several share a byte, that is seen from the axis that they are packed along.
    """
    made = packed.owner
    if getattr(made, "name", "") == "stablehlo.reshape":  # which gathers the axes of a batch
        made = made.operands[0].owner
    if getattr(made, "name", "") != "stablehlo.transpose":
        return None
    if list(made.results[0].type.shape)[-2:] != list(packed.type.shape)[-2:]:
        return None  # the reshape between them did more than that
    *batch, rows, columns = range(len(made.results[0].type.shape))
    order = list(made.attributes["permutation"])
    return made.operands[0] if order == [*batch, columns, rows] else None


def _apart(ctx: Any, packed: Any) -> Any:
    """What stored matrices are, in the program that is lowered, if two axes count them; or None.

    Kernels of the CPU read that. XLA makes of an array that is written to, as blocks of a cache
    are, and of the same reshaped, two arrays, and copies all of it for the second.
    """
    made = packed.owner
    if not is_for_this_cpu(ctx) or getattr(made, "name", "") != "stablehlo.reshape":
        return None
    (matrices,) = made.operands
    shape, merged = list(matrices.type.shape), list(packed.type.shape)
    is_meant = len(shape) == 4 and len(merged) == 3 and shape[2:] == merged[1:]
    # Kernels take those of which the second axis is as long as the third for matrices side by side.
    return matrices if is_meant and shape[1] != shape[2] else None


def turned_by(
    operands: MatmulOperands, problem: MatmulProblem
) -> tuple[MatmulProblem, MatmulOperands]:
    """A product by the matrix that its own is the transposition of: `packed` is that already."""
    leaves = ("scale", "zero_point", "minimum")
    others = {name: leaf for name in leaves if (leaf := getattr(operands, name)) is not None}
    swapped = {name: jnp.swapaxes(leaf, 1, 2) for name, leaf in others.items()}
    turned = dataclasses.replace(problem.transposed, columns=operands.packed.shape[2])
    return turned, operands._replace(**swapped)


# Not cached, for what an operand is made of is not part of the key. `lowered_p` is, and has a rule
# for CPU, which JAX 0.10 and 0.12 do not find with others in what is not.
mlir.register_lowering(matmul_p, _lowered, cacheable=False)
