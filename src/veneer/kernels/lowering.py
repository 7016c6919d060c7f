"""Lower a product with a stored matrix for one device: by a kernel if possible, else by XLA.

On several devices, `partitioning.py` divides the product, and each device computes its own part by
the functions here.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from . import select
from .common import calls
from .common.problem import ZERO_POINTS, MatmulOperands, MatmulProblem, unflatten
from .common.table import KernelRow

#: The most products in one call of a CPU kernel.
_MOST_PRODUCTS = 16


def is_on_one_device(ctx: Any) -> bool:
    """Return whether the program that is being lowered is for one device.

    This includes the body of a `shard_map` over all axes of its mesh, which each device runs on its
    own part. `ctx` is the context that JAX gives to a lowering rule.
    """
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # a shard_map
        return set(axes.manual_axes) == set(axes.mesh.axis_names)
    return not (isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1)


def is_local(ctx: Any, platform: str) -> bool:
    """Return whether the program that is being lowered is for one device, and runs in this process.

    **Arguments:**

    - `ctx`: the context that JAX gives to a lowering rule.
    - `platform`: the only platform that the program may be for, "cpu" or "cuda".
    """
    context = ctx.module_context
    is_here = context.platforms == (platform,) and not context.lowering_parameters.for_export
    return is_here and is_on_one_device(ctx)


def by_reference(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Compute a product with a stored matrix by XLA.

    **Arguments:**

    - `arrays`: the fields of `MatmulOperands` that are not None, in order.
    - `present`: for each field of `MatmulOperands`, whether `arrays` has it.
    """
    problem, operands = problem.flatten_batch(unflatten(arrays, present))
    problem, operands = problem.with_float_scales(operands)
    return problem.reference(operands, problem)


def by_kernel(
    *arrays: Any, problem: MatmulProblem, present: Sequence[bool], platform: str = "cpu"
) -> jax.Array:
    """Compute a product on one device: by a kernel if there is one for it, else by XLA.

    **Arguments:**

    - `arrays`, `present`: as for `by_reference`.
    - `platform`: the platform of the device, "cpu", "gpu" or "tpu".
    """
    operands = unflatten(arrays, present)
    if platform == "cpu":
        kernel = find_cpu_kernel(operands, problem)
        if kernel is None and operands.x_scale is not None:
            # Kernels multiply few rows of int8 by bit planes, but any number of rows of floats.
            operands = operands.with_float_activations()
            kernel = find_cpu_kernel(operands, problem)
        if kernel is not None:
            return call_cpu_kernel(kernel, operands, problem)
        return by_reference(*arrays, problem=problem, present=present)
    problem, operands = problem.with_float_scales(operands.deinterleaved())
    kernel = _select_kernel(platform, operands, problem)
    if kernel is None or not select.can_lower(kernel, operands, problem):
        return problem.reference(operands, problem)
    module = select.device_kernel(kernel)
    out = module.product(operands, problem)
    if operands.zero_point is not None and not module.takes_zero_points(operands, problem):
        out -= _zero_point_term(problem, operands)
    if operands.minimum is not None:
        out += _tile_product(problem, operands, operands.minimum.astype(jnp.float32))
    return out.astype(problem.out_dtype)


def by_gpu_kernel(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Compute a product on one GPU: by a kernel if `can_use_kernel` says so, else by XLA.

    The arguments are the same as for `by_reference`.
    """
    if not can_use_kernel("gpu", arrays, problem, present):
        return by_reference(*arrays, problem=problem, present=present)
    return by_kernel(*arrays, problem=problem, present=present, platform="gpu")


def can_use_kernel(
    platform: str, avals: Sequence[Any], problem: MatmulProblem, present: Sequence[bool]
) -> bool:
    """Return whether a kernel for GPUs or TPUs fits a product, and can be lowered in this process.

    If it cannot, the product should be lowered by `by_reference`, so that XLA can partition it over
    several devices. `avals` are the avals of the operands that are not None, and `present` is the
    same as for `by_reference`.
    """
    operands = jax.eval_shape(
        lambda *xs: problem.with_float_scales(unflatten(xs, present).deinterleaved())[1], *avals
    )
    kernel = _select_kernel(platform, operands, dataclasses.replace(problem, tiles=None))
    return kernel is not None and select.device_kernel(kernel).has_device()


def _select_kernel(
    platform: str, operands: MatmulOperands, problem: MatmulProblem
) -> KernelRow | None:
    """Return the table row of the kernel for a product. None if no kernel fits or x has no rows."""
    shape = problem.shape(operands)
    if not shape.m:
        return None
    return select.find_kernel(platform, problem.codes, shape, problem.opt_in)


def find_cpu_kernel(operands: MatmulOperands, problem: MatmulProblem) -> KernelRow | None:
    """Find the kernel for a product on one CPU, compile it if necessary, and return its table row.

    Return None if no kernel fits the product, or if the kernel that fits cannot be compiled.
    """
    kernel = _select_kernel("cpu", operands, problem)
    is_built = kernel is not None and select.is_built(kernel.target(problem.codes.kind))
    return kernel if is_built else None


# Calls of CPU kernels.


class _CpuKernel(NamedTuple):
    """A CPU kernel, in the form that `common/calls.py` needs.

    **Arguments:**

    - `target`: the name of its FFI target, which must be registered.
    - `most_products`: the largest number of products that one call can compute.
    """

    target: str
    most_products: int

    def is_called_by(self, operation: Any) -> bool:
        """Return whether an MLIR custom call calls the FFI target of this kernel."""
        return calls.attribute(operation, "call_target_name") == self.target

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a call of the FFI target into the program, and return its results.

        `ctx` is JAX's lowering context, whose `avals_out` has the shapes and the dtype of the
        results. `operands` are MLIR values: the activations, then the arrays of each matrix.
        """
        return jax.ffi.ffi_lowering(self.target)(ctx, *operands)


class Stacked(NamedTuple):
    """An operand `[B, ...]` of a product that is one part of a larger array.

    **Arguments:**

    - `stack`: the larger array, `[parts * B, ...]`.
    - `index`: the index of the part, an int32 scalar. Out of bounds, it means the first
      or the last part.
    """

    stack: jax.Array
    index: Any


_NO_STACKS: Mapping[str, Stacked] = MappingProxyType({})


def call_cpu_kernel(
    kernel: KernelRow,
    operands: MatmulOperands,
    problem: MatmulProblem,
    stacks: Mapping[str, Stacked] = _NO_STACKS,
) -> jax.Array:
    """Compute a product by a CPU kernel.

    **Arguments:**

    - `kernel`: its row of the table, as `find_cpu_kernel` returns.
    - `stacks`: the operands that the kernel reads from a stack, by their names in
      `MatmulOperands`. Of the arrays with these names in `operands`, only the shapes are used.
    """
    x, packed, x_scale = operands.x, operands.packed, operands.x_scale
    table = np.asarray(problem.codes.table, np.float32)

    def stacked(name: str) -> Stacked:
        return stacks.get(name) or Stacked(getattr(operands, name), np.int32(0))

    if kernel.dtype == "float32":
        x = x.astype(jnp.float32)
    offset_leaf = _fused_offset(kernel, operands, problem)
    outer = [] if operands.outer_scale is None else ["outer_scale"]
    outer += [] if operands.outer_minimum is None or offset_leaf is None else ["outer_minimum"]
    out = calls.call(
        _CpuKernel(kernel.target(problem.codes.kind), _MOST_PRODUCTS if kernel.has_few_rows else 1),
        (x,) if x_scale is None else (x, x_scale),
        (
            *stacked("packed"),
            *stacked("scale"),
            table,
            *(() if offset_leaf is None else (*stacked(offset_leaf), np.int32(problem.offset))),
            *itertools.chain.from_iterable(map(stacked, outer)),
        ),
        problem.out_shape(x, packed),
    )
    if operands.minimum is not None and offset_leaf != "minimum":
        problem, operands = problem.with_float_scales(operands)
        out += _tile_product(problem, operands, operands.minimum.astype(jnp.float32))
    if operands.zero_point is not None and offset_leaf != "zero_point":
        out -= _zero_point_term(*problem.with_float_scales(operands))
    return out.astype(problem.out_dtype)


def _fused_offset(
    kernel: KernelRow, operands: MatmulOperands, problem: MatmulProblem
) -> str | None:
    """Return the operand that a CPU kernel itself uses: "minimum" or "zero_point", or None.

    If None, the kernel uses neither. If the product has minima or zero points, XLA adds their term.
    """
    if operands.minimum is not None:
        return "minimum" if kernel.adds_minima else None
    zero_point = operands.zero_point
    if zero_point is None or zero_point.shape[1:] != problem.counts(operands):
        return None
    is_readable = zero_point.dtype.name in ZERO_POINTS
    reads = is_readable and kernel.subtracts_zero_points(problem.shape(operands))
    return "zero_point" if reads else None


def _zero_point_term(problem: MatmulProblem, operands: MatmulOperands) -> jax.Array:
    """Return the product of x with `scale * (zero_point - offset)`, f32 `[B, M, N]`."""
    zero_point = operands.zero_point
    assert zero_point is not None
    scale = operands.scale.astype(jnp.float32)
    term = scale * (zero_point.astype(jnp.float32) - problem.offset)
    return _tile_product(problem, operands, term)


def _tile_product(problem: MatmulProblem, operands: MatmulOperands, values: jax.Array) -> jax.Array:
    """Return the product of x with a matrix whose entries are equal in each tile, f32 `[B, M, N]`.

    **Arguments:**

    - `values`: the value of each tile, f32 `[B, R / tr, C / tc]`.
    """
    x_scale = operands.x_scale
    if x_scale is not None and x_scale.ndim == 3:
        operands = operands.with_float_activations()
    if problem.contracting == "columns":
        values = jnp.swapaxes(values, 1, 2)
    x = operands.x.astype(jnp.float32)
    b, m, k = x.shape
    tiles = x.reshape(b, m, values.shape[1], k // values.shape[1])
    out = jnp.einsum("bmt,btn->bmn", tiles.sum(3), values, precision="highest")
    if x_scale is not None and x_scale.ndim == 2:
        out *= x_scale[..., None]
    n = problem.out_shape(x, operands.packed)[2]
    repeated = jnp.broadcast_to(out[..., None], (*out.shape, n // max(1, out.shape[2])))
    return repeated.reshape(b, m, n)
