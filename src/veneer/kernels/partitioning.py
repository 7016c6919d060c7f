"""Lower a product with a stored matrix for one device or several.

In a `shard_map`, each device already has its own part, and computes it by a kernel. Under `jit`,
the partitioner of XLA gets a sharding rule, which says how the axes of operands and result
correspond. It then asks for the computation of one device:

- The batch, the rows of activations, and the free axis of the matrix are sharded freely.
- If the contracted axis is sharded, results are summed over the devices.
- Codes that share a byte stay on one device, and so do codes of a tile, which share a scale. An
  axis is replicated if a sharding would divide them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._jax.primitives import Primitive, find_partition_spec
from .common.problem import MatmulOperands, MatmulProblem, unflatten
from .lowering import by_kernel, by_reference, can_use_kernel, is_on_one_device

lowered_p = Primitive("lowered_stored_matmul")


@lowered_p.def_abstract_eval
def _typed(*avals: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    return problem.out_aval(*avals[:2])


def _lower(platform: str, ctx: Any, *values: Any, **params: Any) -> Any:
    compute = by_reference
    is_exported = ctx.module_context.lowering_parameters.for_export
    if not is_exported and (platform == "cpu" or can_use_kernel(platform, ctx.avals_in, **params)):
        axes = ctx.module_context.axis_context
        if is_on_one_device(ctx):
            compute = functools.partial(by_kernel, platform=platform)
        elif isinstance(axes, mlir.ShardingContext) and axes.abstract_mesh is not None:
            compute = functools.partial(_by_partitions, platform=platform)
    return mlir.lower_fun(compute, multiple_results=False)(ctx, *values, **params)


mlir.register_lowering(lowered_p, mlir.lower_fun(by_reference, multiple_results=False))
for _platform, _jax_platform in {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}.items():
    mlir.register_lowering(lowered_p, functools.partial(_lower, _platform), platform=_jax_platform)


def _by_partitions(
    *arrays: Any, problem: MatmulProblem, present: Sequence[bool], platform: str
) -> jax.Array:
    from jax.experimental.custom_partitioning import custom_partitioning  # which few programs need

    problem, operands = problem.with_float_scales(unflatten(arrays, present).deinterleaved())
    present = tuple(x is not None for x in operands)
    arrays = tuple(x for x in operands if x is not None)
    # XLA uses only the types in the program of the function that is partitioned.
    partitioned = custom_partitioning(
        lambda *xs: lowered_p.bind(*xs, problem=problem, present=present)
    )
    rule, sizes, contracted = sharding_rule(arrays, problem, present)
    partitioned.def_partition(
        functools.partial(_partition, problem, present, platform),
        decode_shardings=False,  # which fails if an axis of the mesh is divided
        sharding_rule=rule,
        reduction_factors=contracted,
        **sizes,
    )
    return partitioned(*arrays)


# The sharding rule. An axis is a product of factors, from the slowest to the fastest. Axes that are
# sharded together begin with the same factors.


def sharding_rule(
    arrays: Sequence[Any], problem: MatmulProblem, present: Sequence[bool]
) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """Return the sharding rule of a product, for `custom_partitioning` in JAX.

    **Arguments:**

    - `arrays`: the fields of `MatmulOperands` that are not None, as arrays or avals.
    - `present`: for each field of `MatmulOperands`, whether `arrays` has it.

    **Returns:** the rule, the sizes of the factors of divided axes, and the contracted factors.

    >>> import jax
    >>> from veneer.kernels import Codes, MatmulProblem
    >>> problem = MatmulProblem(Codes(4, values=(0.0,) * 16), 64, "rows", "float32", 0, print)
    >>> shapes = ((1, 2, 256), "float32"), ((1, 256, 32), "uint8"), ((1, 8, 64), "float32")
    >>> arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    >>> sharding_rule(arrays, problem, (True, True, True, False, False, False))
    ('b m (r0 r1), b (r0 r1) c0, b r0 (c0 c1) -> b m (c0 c1)', {'r1': 32, 'c1': 2}, ('r0', 'r1'))
    """
    operands = unflatten(arrays, present)
    tiles = _most_tiles(operands)
    _, rows, row_bytes = operands.packed.shape
    # The bytes with the bit planes of the same codes are one entry.
    planes = problem.codes.bits if 8 % problem.codes.bits else 1
    factors = {
        "rows": _factors("r", {rows, tiles[0]}),
        "columns": _factors("c", {problem.columns, row_bytes // planes, tiles[1]}),
    }
    shapes = [x.shape for x in arrays] + [problem.out_shape(operands.x, operands.packed)]
    sizes: dict[str, int] = {"b": 0, "m": 0}  # the sizes of undivided axes are not needed
    arrays_of_axes = []
    for i, (names, shape) in enumerate(zip(_axes(operands, problem), shapes, strict=True)):
        axes = []
        for j, (name, size) in enumerate(zip(names, shape, strict=True)):
            axis = {name: 0}
            if name in factors:
                entry = planes if (i, name) == (1, "columns") else 1  # bytes of the stored matrix
                # An axis of size 1 is never sharded, and corresponds to no other axis.
                axis = factors[name].get(size // entry, {f"one{i}{j}": 1})
                axis = axis if entry == 1 else axis | {"planes": entry}
            sizes |= axis
            axes.append(axis)
        arrays_of_axes.append(axes)
    all_axes = [axis for axes in arrays_of_axes for axis in axes]
    undivided = {name for axis in all_axes if len(axis) == 1 for name in axis}
    text = lambda axis: f"({' '.join(axis)})" if len(axis) > 1 else " ".join(axis)
    *texts, result = (" ".join(map(text, axes)) for axes in arrays_of_axes)
    contracted = set().union(*factors[problem.contracting].values())
    return (
        f"{', '.join(texts)} -> {result}",
        {name: size for name, size in sizes.items() if name not in undivided},
        tuple(name for name in sizes if name in contracted),
    )


def _axes(operands: MatmulOperands, problem: MatmulProblem) -> list[tuple[str, ...]]:
    """Return the names of the axes of each operand that is not None, and of the result last.

    A name is "b" (batch), "m" (rows of x), or "rows" or "columns" of the stored matrix.
    """
    matrix = ("b", "rows", "columns")
    x = ("b", "m", problem.contracting)
    x_scale = x if operands.x_scale is not None and operands.x_scale.ndim == 3 else x[:2]
    names = MatmulOperands(x, matrix, matrix, matrix, x_scale, matrix)
    present = [axes for axes, x in zip(names, operands, strict=True) if x is not None]
    return [*present, ("b", "m", problem.other_axis)]


def _factors(prefix: str, counts: set[int]) -> dict[int, dict[str, int]]:
    """Divide an axis of the matrix into factors, for the sharding rule.

    Along the axis, codes, the bytes that hold codes, scales and zero points have different numbers
    of entries. An array with fewer entries has only the first factors.

    **Arguments:**

    - `prefix`: the first letter of the names of factors.
    - `counts`: the numbers of entries. If one does not divide the next, no factors are shared.

    **Returns:** for each number of entries, the names and sizes of its factors.
    """
    factors: dict[int, dict[str, int]] = {}
    previous, axis = 1, dict[str, int]()
    for count in sorted(counts - {1}):
        if count % previous:
            return {count: {f"{prefix}{i}": count} for i, count in enumerate(sorted(counts))}
        axis = {**axis, f"{prefix}{len(axis)}": count // previous}
        factors[count], previous = axis, count
    return factors


def _most_tiles(operands: MatmulOperands) -> tuple[int, int]:
    """Return the number of scales along rows and along columns of the stored matrix.

    If there are more zero points than scales along an axis, return the number of zero points.
    """
    leaves = [x for x in (operands.scale, operands.zero_point) if x is not None]
    return max(x.shape[1] for x in leaves), max(x.shape[2] for x in leaves)


# The computation of one device.


def _partition(
    problem: MatmulProblem,
    present: Sequence[bool],
    platform: str,
    mesh: Any,
    arg_shapes: Any,
    result_shape: Any,
) -> tuple[Any, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    operands = unflatten(arg_shapes, present)
    mesh_axes = _mesh_axes(operands, result_shape, problem, mesh)
    shapes = [x.shape for x in (*arg_shapes, result_shape)]
    *shardings, out_sharding = (
        NamedSharding(
            mesh,
            P(*(mesh_axes[n] if size != 1 else None for n, size in zip(names, shape, strict=True))),
        )
        for names, shape in zip(_axes(operands, problem), shapes, strict=True)
    )
    contracted = mesh_axes[problem.contracting]
    columns = problem.columns // _device_count(mesh_axes["columns"], mesh)
    local = dataclasses.replace(problem, columns=columns)
    if contracted:  # the sum over devices is rounded once
        local = dataclasses.replace(local, out_dtype="float32")

    def on_one_device(*arrays: jax.Array) -> jax.Array:
        out = by_kernel(*arrays, problem=local, present=present, platform=platform)
        return jax.lax.psum(out, contracted).astype(problem.out_dtype) if contracted else out

    return mesh, on_one_device, out_sharding, tuple(shardings)


_MeshAxes = tuple[str, ...] | None


def _mesh_axes(
    operands: MatmulOperands, result: Any, problem: MatmulProblem, mesh: Any
) -> dict[str, _MeshAxes]:
    """Return the mesh axes that shard each axis of a product, or None for an axis that none shards.

    The axes are "b" (batch), "m" (rows of x), and the "rows" and "columns" of the stored matrix.

    For each axis, use the sharding of the result, or else of an operand. Ignore a sharding that
    splits a byte or one of several tiles, or that uses a mesh axis which another axis uses.
    """
    counts = {
        "b": [operands.x.shape[0]],
        "m": [operands.x.shape[1]],
        "rows": [operands.packed.shape[1]],
        "columns": [problem.columns, operands.packed.shape[2]],
    }
    for name, count in zip(("rows", "columns"), _most_tiles(operands), strict=True):
        if count > 1:
            counts[name].append(count)
    # Codes that share a byte, or the bytes of bit planes, stay together.
    codes = 8 if 8 % problem.codes.bits else 8 // problem.codes.bits
    counts["columns"].append(1 if problem.columns % codes else problem.columns // codes)

    def wanted(x: Any, axis: int) -> _MeshAxes:
        spec = find_partition_spec(mesh, x.sharding, len(x.shape))
        entry = spec[axis] if axis < len(spec) else None
        return (entry,) if isinstance(entry, str) else entry

    candidates = {
        "b": [wanted(result, 0), wanted(operands.packed, 0), wanted(operands.x, 0)],
        "m": [wanted(result, 1), wanted(operands.x, 1)],
        "rows": [wanted(operands.packed, 1)],
        "columns": [wanted(operands.packed, 2)],
    }
    candidates[problem.other_axis].insert(0, wanted(result, 2))
    candidates[problem.contracting].append(wanted(operands.x, 2))
    chosen: dict[str, _MeshAxes] = {}
    taken = set[str]()
    for name in ("b", problem.other_axis, "m", problem.contracting):
        fits = (
            axes
            for axes in candidates[name]
            if axes
            and not taken & set(axes)
            and all(n % _device_count(axes, mesh) == 0 for n in counts[name])
        )
        chosen[name] = next(fits, None)
        taken |= set(chosen[name] or ())
    return chosen


def _device_count(axes: _MeshAxes, mesh: Any) -> int:
    return math.prod(mesh.shape[name] for name in axes or ())
