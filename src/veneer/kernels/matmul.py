"""`matmul`: the product of activations with a stored matrix, as a JAX primitive.

A primitive has one rule for each transformation, and its lowering selects the implementation for a
platform. `lax.platform_dependent` would trace the implementations of all platforms in each program.

- *Derivatives.* The product is linear in the activations. Their cotangent is the product with the
  same codes that contracts the other axis, so no dense matrix appears. It is also linear in the
  scales of each operand, and in scale and minimum of the matrix together. XLA computes the
  cotangents of these.
- *Batching.* Mapped activations become more rows. Mapped matrices become a batch.
- *Lowering.* On CPU and on some GPUs, a kernel computes the product if one fits. Elsewhere, and in
  exported programs, which other machines run, XLA computes it from the same codes.
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
from .common.problem import MatmulOperands, MatmulProblem, unflatten
from .lowering import by_gpu_kernel, by_kernel, by_reference, is_local
from .partitioning import lowered_p
from .stacks import MATMUL, lower_loops_in_place


def matmul(operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    """Return the product of activations with a stored matrix W `[R, C]`.

    It is `x @ W` if `problem.contracting` is "rows", and `x @ W.T` if it is "columns". W is `(codes
    + offset - zero_point) * scale + minimum`, where `offset` is `problem.offset`. Sums are in f32,
    and sums of int8 activations are exact within a tile.

    **Returns:** `[B, M, N]` with the dtype `problem.out_dtype`.
    """
    lower_loops_in_place()
    present = [x is not None for x in operands]
    arrays = vary_together([x for x in operands if x is not None])
    return matmul_p.bind(*arrays, problem=problem, present=tuple(present))


matmul_p = Primitive(MATMUL)
require_devices_for_lowering(matmul_p)  # partitioning needs the mesh
compile_when_eager(matmul_p)


@matmul_p.def_abstract_eval
def _typed(*avals: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    return problem.out_aval(*avals[:2])


# Derivatives.


def _jvp(
    primals: Any, tangents: Any, *, problem: MatmulProblem, present: Sequence[bool]
) -> tuple[Any, Any]:
    operands = unflatten(primals, present)
    terms = [
        _tangent_of_result(operands, problem, name, tangent)
        for name, tangent in unflatten(tangents, present)._asdict().items()
        if tangent is not None and type(tangent) is not ad.Zero
    ]
    return matmul(operands, problem), functools.reduce(ad.add_tangents, terms)


def _tangent_of_result(
    operands: MatmulOperands, problem: MatmulProblem, name: str, tangent: jax.Array
) -> jax.Array:
    """Return the tangent of the product if only one operand has a tangent.

    `name` is the name of this operand in `MatmulOperands`.
    """
    if problem.tiles is not None and name.startswith("outer_"):
        name = name.removeprefix("outer_")
        tangent = problem.tiles.dequantize(getattr(operands, name), tangent)
    if name in ("scale", "minimum"):
        problem, operands = problem.with_float_scales(operands)
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
    operands = unflatten(arrays, present)
    (name,) = (name for name, x in operands._asdict().items() if ad.is_undefined_primal(x))
    aval = getattr(operands, name).aval
    if name == "x":
        transposed = dataclasses.replace(problem.transposed, out_dtype=aval.dtype.name)
        out = matmul(operands._replace(x=cotangent), transposed)
    elif name == "x_scale" and len(aval.shape) == 2:
        ones = operands._replace(x_scale=jnp.ones(aval.shape, aval.dtype))
        unscaled = matmul(ones, dataclasses.replace(problem, out_dtype="float32"))
        out = jnp.sum(cotangent.astype(jnp.float32) * unscaled, axis=2)
    else:

        def by_xla(leaf: jax.Array) -> jax.Array:
            plain, others = problem.with_float_scales(operands._replace(**{name: leaf}))
            return plain.reference(others, plain)

        (out,) = jax.vjp(by_xla, jnp.ones(aval.shape, aval.dtype))[1](cotangent)
    return [out if j == i else None for j in range(len(arrays))]


ad.primitive_transposes[matmul_p] = _transpose


# Batching.


def _batch(
    arrays: Any, dims: Any, *, problem: MatmulProblem, present: Sequence[bool]
) -> tuple[jax.Array, int]:
    (size,) = {x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None}
    operands, axes = unflatten(arrays, present), unflatten(dims, present)
    batch, m, _ = (n for axis, n in enumerate(operands.x.shape) if axis != axes.x)
    if all(axis is None for axis in axes._replace(x=None, x_scale=None)):  # as more rows
        x = _merge_mapped_axis(operands.x, axes.x, size, 1)
        x_scale = operands.x_scale
        if x_scale is not None:
            x_scale = _merge_mapped_axis(x_scale, axes.x_scale, size, 1)
        out = matmul(operands._replace(x=x, x_scale=x_scale), problem)
        return out.reshape(out.shape[0], size, m, out.shape[2]), 1
    if axes.packed is None:  # a batch would have copies of the matrix
        compute = lambda *arrays: by_reference(*arrays, problem=problem, present=present)
        return jax.vmap(compute, in_axes=tuple(dims))(*arrays), 0
    merged = [_merge_mapped_axis(x, d, size, 0) for x, d in zip(arrays, dims, strict=True)]
    out = matmul(unflatten(merged, present), problem)
    return out.reshape(size, batch, *out.shape[1:]), 0


batching.primitive_batchers[matmul_p] = _batch


def _merge_mapped_axis(x: Any, axis: int | None, size: int, to: int) -> Any:
    """Merge the axis of x that `vmap` maps into another axis of x. The mapped axis varies slower.

    **Arguments:**

    - `axis`: the mapped axis. If it is None, x is first repeated along a new axis.
    - `size`: the size of the mapped axis.
    - `to`: the axis to merge into, counted without the mapped axis.
    """
    if axis is not None:
        x = jnp.moveaxis(x, axis, to)
    else:
        x = jnp.broadcast_to(jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:]))
    return x.reshape(*x.shape[:to], size * x.shape[to + 1], *x.shape[to + 2 :])


# Lowering.


def _lowered(ctx: Any, *values: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    """Lower a product. If the program transposes its stored matrix, read the original instead.

    To transpose codes, as `w.T` does, takes longer than the product. Contracting the other axis of
    the original gives the same result.
    """
    # Without types of a shard_map: all that is computed here stays on one device.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    # Codes that share a byte are transposed by unpacking them, which is not visible here.
    can_be_transposed = problem.codes.bits == 8 and unflatten(avals, present).packed.ndim == 3
    source = _transposed_from(values[1]) if can_be_transposed else None
    with_two_axes = _before_merge(ctx, values[1]) if source is None else None
    if with_two_axes is not None:
        problem = dataclasses.replace(problem, leading=2)

    # JAX lowers `lowered_p`, which is cached, in a separate function. There, a product cannot
    # join others with the same activations (`common/calls.py`).
    compute: Any = lowered_p.bind
    if is_local(ctx, "cpu"):
        compute = by_kernel
    elif is_local(ctx, "cuda"):
        compute = by_gpu_kernel

    def call(*arrays: Any) -> jax.Array:
        if source is None:
            return compute(*arrays, problem=problem, present=present)
        plain, operands = problem.with_float_scales(unflatten(arrays, present))
        packed = operands.packed.reshape(operands.x.shape[0], *operands.packed.shape[-2:])
        transposed, operands = plain.with_transposed_matrix(operands._replace(packed=packed))
        leaves = [x for x in operands if x is not None]
        are_present = tuple(x is not None for x in operands)
        return compute(*leaves, problem=transposed, present=are_present)

    stored = source or with_two_axes
    if stored is not None:
        values = (values[0], stored, *values[2:])
        avals[1] = avals[1].update(shape=tuple(stored.type.shape))
    return mlir.lower_fun(call, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _transposed_from(packed: Any) -> Any:
    """Return the MLIR value that a program transposes to `packed`, or None.

    The transposition must swap the last two axes. A reshape of the axes before these may follow it.
    """
    operation = packed.owner
    if getattr(operation, "name", "") == "stablehlo.reshape":  # which merges the axes of a batch
        operation = operation.operands[0].owner
    if getattr(operation, "name", "") != "stablehlo.transpose":
        return None
    shape = list(operation.results[0].type.shape)
    if shape[-2:] != list(packed.type.shape)[-2:]:
        return None  # the reshape between them did more than that
    *batch, rows, columns = range(len(shape))
    order = list(operation.attributes["permutation"])
    return operation.operands[0] if order == [*batch, columns, rows] else None


def _before_merge(ctx: Any, packed: Any) -> Any:
    """Return the MLIR value `[B1, B2, R, bytes]` that a program reshapes to `packed`, or None.

    CPU kernels can read stored matrices with two axes before R. For an array that is written to,
    such as the blocks of a cache, XLA would copy all of it for the reshape.
    """
    operation = packed.owner
    if not is_local(ctx, "cpu") or getattr(operation, "name", "") != "stablehlo.reshape":
        return None
    (matrices,) = operation.operands
    shape, merged = list(matrices.type.shape), list(packed.type.shape)
    merges_two = len(shape) == 4 and len(merged) == 3 and shape[2:] == merged[1:]
    # If the second axis has the size of the third, kernels would take the matrices for interleaved.
    return matrices if merges_two and shape[1] != shape[2] else None


# Not cached: the operation that made an operand is not part of the cache key. `lowered_p` is
# cached, and has the rules for platforms, because JAX 0.10 and 0.12 ignore them for rules without a
# cache.
mlir.register_lowering(matmul_p, _lowered, cacheable=False)
