"""A product on one device: by a kernel, where there is one for it, or else by its reference."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from . import select
from .problem import MatmulOperands, MatmulProblem, operands_of


def is_on_one_device(ctx: Any) -> bool:
    """Returns whether what is lowered computes on one device: the only one, or in a shard_map."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # a shard_map
        return set(axes.manual_axes) == set(axes.mesh.axis_names)
    return not (isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1)


def by_reference(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Computes a product by XLA's way."""
    return problem.reference(operands_of(arrays, present), problem)


def by_kernel(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Computes a product on one CPU: by a kernel, where there is one for it."""
    operands = operands_of(arrays, present)
    shape = problem.shape(operands)
    target = select.find("cpu", problem.codes, shape) if shape.m else None
    if target is None or not select.built(target):
        return problem.reference(operands, problem)
    x, packed, scale, zero_point, x_scale = operands
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(problem.out_shape(x, packed), jnp.float32))
    table = np.asarray(problem.codes.table, np.float32)
    out: Any = (
        call(x.astype(jnp.float32), packed, scale, table)
        if x_scale is None
        else call(x, x_scale, packed, scale, table)
    )
    if zero_point is not None:
        out -= _of_zero_points(operands, problem)
    return out.astype(problem.out_dtype)


def _of_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    """What a product with codes is larger by than one with codes less their zero points."""
    x, _, scale, zero_point, x_scale = operands
    assert zero_point is not None
    # Of the sizes of `scale` or, if there are more, of `zero_point`.
    worth = scale * (zero_point.astype(jnp.float32) - problem.offset)
    if problem.contracting == "columns":
        worth = jnp.swapaxes(worth, 1, 2)
    b, m, k = x.shape
    tiles = x.astype(jnp.float32).reshape(b, m, worth.shape[1], k // worth.shape[1])
    out = jnp.einsum("bmt,btn->bmn", tiles.sum(3), worth, precision="highest")
    if x_scale is not None:
        out *= x_scale[..., None]
    n = problem.out_shape(x, operands.packed)[2]
    return jnp.repeat(out, n // out.shape[2], 2, total_repeat_length=n)
