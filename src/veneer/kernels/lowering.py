"""How a product with a stored matrix is lowered: on one device, and cut over several.

One device computes it by a kernel, where there is one for it, or else by its reference. Of several,
each runs the kernel on its own part. In a `shard_map` the parts are there already. Under
`jit`, the partitioner is told by a rule how the axes of operands and result go together, and asks
for what one device computes:

- batch, rows of activations and the axis of the matrix that is not summed are cut freely;
- where the axis that is summed is cut, results are added up over the devices;
- neither a byte, which has several codes, nor a tile, which has one scale, is cut. Where the
  partitioner would, that axis is whole on every device.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._jax.primitives import Primitive
from .._jax.sharding import find_partition_spec
from . import select
from .common import calls
from .common.problem import ZERO_POINTS, MatmulOperands, MatmulProblem, operands_of
from .gpu import matmul as gpu_matmul

#: Codes that share a zero point along the sum, at least, for a kernel to read it.
_LEAST_TILE = 16
#: The most products in one call of a kernel of the CPU.
_MOST_PRODUCTS = 16

# On one device.


def is_on_one_device(ctx: Any) -> bool:
    """Returns whether what is lowered computes on one device: the only one, or in a shard_map."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # a shard_map
        return set(axes.manual_axes) == set(axes.mesh.axis_names)
    return not (isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1)


def is_for_this_cpu(ctx: Any) -> bool:
    """Returns whether what is lowered is for this process, and one CPU alone."""
    context = ctx.module_context
    is_here = context.platforms == ("cpu",) and not context.lowering_parameters.for_export
    return is_here and is_on_one_device(ctx)


def is_for_this_gpu(ctx: Any) -> bool:
    """Return whether a program is for this process, and one GPU alone."""
    context = ctx.module_context
    is_here = context.platforms == ("cuda",) and not context.lowering_parameters.for_export
    return is_here and is_on_one_device(ctx)


def by_reference(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Computes a product by XLA's way."""
    problem, operands = problem.merged(operands_of(arrays, present))
    problem, operands = problem.plain(operands)
    return problem.reference(operands, problem)


def by_kernel(
    *arrays: Any, problem: MatmulProblem, present: Sequence[bool], platform: str = "cpu"
) -> jax.Array:
    """Computes a product on one device: by a kernel, where there is one for it."""
    operands = operands_of(arrays, present)
    if platform == "cpu":
        target = kernel_for(operands, problem)
        if target is None and operands.x_scale is not None:  # of many rows by bit planes, say
            operands = operands.of_floats()
            target = kernel_for(operands, problem)
        if target is not None:
            return call_kernel(target, operands, problem)
        return by_reference(*arrays, problem=problem, present=present)
    problem, operands = problem.plain(operands.apart())
    kernel = _candidate(platform, operands, problem)
    if kernel is not None and select.can_lower(kernel, operands, problem):
        assert kernel.module is not None
        is_shared = kernel.module is gpu_matmul
        product = gpu_matmul.shared_product if is_shared else kernel.module.product
        out = product(operands, problem)
        is_subtracted = kernel.module.takes_zero_points(operands, problem)
        if operands.zero_point is not None and not is_subtracted:
            out -= _of_zero_points(problem, operands)
        if operands.minimum is not None:
            out += _over_tiles(operands, operands.minimum.astype(jnp.float32), problem)
        return out.astype(problem.out_dtype)
    return problem.reference(operands, problem)


def by_gpu_kernel(*arrays: Any, problem: MatmulProblem, present: Sequence[bool]) -> jax.Array:
    """Compute a product on one GPU: by a kernel if there is one for it."""
    has_kernel = _may_serve("gpu", arrays, problem, present)
    compute = functools.partial(by_kernel, platform="gpu") if has_kernel else by_reference
    return compute(*arrays, problem=problem, present=present)


def _candidate(
    platform: str, operands: MatmulOperands, problem: MatmulProblem
) -> select.Candidate | None:
    shape = problem.shape(operands)
    return select.candidate(platform, problem.codes, shape, problem.opt_in) if shape.m else None


def kernel_for(operands: MatmulOperands, problem: MatmulProblem) -> str | None:
    """Returns the kernel that computes a product on one CPU, which is built; or None."""
    kernel = _candidate("cpu", operands, problem)
    if kernel is None:
        return None
    family = kernel.target.format(problem.codes.kind)
    rows, tiles = operands.packed.shape[problem.leading], problem.counts(operands)
    columns = problem.columns
    tile = rows // max(1, tiles[0]), columns // max(1, tiles[1])
    return select.built(family, select.KernelSizes(operands.x.shape[1], rows, columns, tile))


class Stacked(NamedTuple):
    """Where an operand `[B, ...]` lies: in a stack `[places * B, ...]`, at this place of it."""

    stack: jax.Array
    place: Any  # an i32; the last one where there are fewer


_NOWHERE_ELSE: Mapping[str, Stacked] = MappingProxyType({})


def call_kernel(
    target: str,
    operands: MatmulOperands,
    problem: MatmulProblem,
    stacks: Mapping[str, Stacked] = _NOWHERE_ELSE,
) -> jax.Array:
    """Computes a product by a kernel.

    **Arguments:**

    - `stacks`: where the matrix or leaves of it lie, by their names: those are read from there, and
      not from `operands`.
    """
    x, packed, x_scale = operands.x, operands.packed, operands.x_scale
    table = np.asarray(problem.codes.table, np.float32)

    def stored(name: str) -> Stacked:
        return stacks.get(name) or Stacked(getattr(operands, name), np.int32(0))

    if x_scale is None and not target.startswith("veneer_bf16_"):
        x = x.astype(jnp.float32)
    added = _added(target, operands, problem)
    outer = [] if operands.outer_scale is None else ["outer_scale"]
    outer += [] if operands.outer_minimum is None or added is None else ["outer_minimum"]
    out = calls.call(
        calls.CpuKernel(target, _MOST_PRODUCTS if select.are_few(target) else 1),
        (x,) if x_scale is None else (x, x_scale),
        (
            *stored("packed"),
            *stored("scale"),
            table,
            *(() if added is None else (*stored(added), np.int32(problem.offset))),
            *itertools.chain.from_iterable(map(stored, outer)),
        ),
        problem.out_shape(x, packed),
    )
    if operands.minimum is not None and added != "minimum":
        problem, operands = problem.plain(operands)
        out += _over_tiles(operands, operands.minimum.astype(jnp.float32), problem)
    if operands.zero_point is not None and added != "zero_point":
        out -= _of_zero_points(*problem.plain(operands))
    return out.astype(problem.out_dtype)


def _added(target: str, operands: MatmulOperands, problem: MatmulProblem) -> str | None:
    """Which leaf a kernel of the CPU adds to codes times scales: minima, or zero points as such.

    Those of integers that contract rows leave both to what follows. So do all zero points of short
    tiles, of which there are nearly as many as codes; but of short rows, that share them.
    """
    if operands.x_scale is not None and problem.contracting == "rows":
        return None
    if operands.minimum is not None:
        return "minimum"
    zero_point = operands.zero_point
    if zero_point is None or zero_point.shape[1:] != problem.counts(operands):
        return None
    is_read = zero_point.dtype.name in ZERO_POINTS
    is_few = problem.shape(operands).tile >= _LEAST_TILE or select.is_for_short_rows(target)
    return "zero_point" if is_read and is_few else None


def _of_zero_points(problem: MatmulProblem, operands: MatmulOperands) -> jax.Array:
    """What a product with codes is larger by than one with codes less their zero points."""
    zero_point = operands.zero_point
    assert zero_point is not None
    # Of the sizes of `scale` or, if there are more, of `zero_point`.
    scale = operands.scale.astype(jnp.float32)
    return _over_tiles(operands, scale * (zero_point.astype(jnp.float32) - problem.offset), problem)


def _over_tiles(operands: MatmulOperands, worth: jax.Array, problem: MatmulProblem) -> jax.Array:
    """The product with a matrix that is the same all over a tile: `worth`, f32 of those tiles."""
    x_scale = operands.x_scale
    if x_scale is not None and x_scale.ndim == 3:
        operands = operands.of_floats()
    if problem.contracting == "columns":
        worth = jnp.swapaxes(worth, 1, 2)
    x = operands.x.astype(jnp.float32)
    b, m, k = x.shape
    tiles = x.reshape(b, m, worth.shape[1], k // worth.shape[1])
    out = jnp.einsum("bmt,btn->bmn", tiles.sum(3), worth, precision="highest")
    if x_scale is not None and x_scale.ndim == 2:
        out *= x_scale[..., None]
    n = problem.out_shape(x, operands.packed)[2]
    each = jnp.broadcast_to(out[..., None], (*out.shape, n // max(1, out.shape[2])))
    return each.reshape(b, m, n)


# On one device, or several.

lowered_p = Primitive("lowered_stored_matmul")


@lowered_p.def_abstract_eval
def _typed(*avals: Any, problem: MatmulProblem, present: Sequence[bool]) -> Any:
    return problem.out_aval(*avals[:2])


def _lowered_for(platform: str, ctx: Any, *values: Any, **params: Any) -> Any:
    exported = ctx.module_context.lowering_parameters.for_export
    may_serve = not exported and (platform == "cpu" or _may_serve(platform, ctx.avals_in, **params))
    compute = _computation(ctx, platform) if may_serve else by_reference
    return mlir.lower_fun(compute, multiple_results=False)(ctx, *values, **params)


def _may_serve(
    platform: str, avals: Sequence[Any], problem: MatmulProblem, present: Sequence[bool]
) -> bool:
    """Return whether a kernel of a GPU or TPU is for a product, and its device is here.

    If not, XLA gets the product at once, and can partition it as any other over several devices.
    """
    operands = jax.eval_shape(
        lambda *xs: problem.plain(operands_of(xs, present).apart())[1], *avals
    )
    kernel = _candidate(platform, operands, dataclasses.replace(problem, tiles=None))
    return kernel is not None and select.has_device(kernel)


mlir.register_lowering(lowered_p, mlir.lower_fun(by_reference, multiple_results=False))
for _platform, _lowered_as in {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}.items():
    mlir.register_lowering(
        lowered_p, functools.partial(_lowered_for, _platform), platform=_lowered_as
    )


def _computation(ctx: Any, platform: str) -> Callable[..., jax.Array]:
    """How a product is computed on the devices that a program is lowered for."""
    if is_on_one_device(ctx):
        return functools.partial(by_kernel, platform=platform)
    axes = ctx.module_context.axis_context
    known = isinstance(axes, mlir.ShardingContext) and axes.abstract_mesh is not None
    return functools.partial(_partitioned, platform=platform) if known else by_reference


def _partitioned(
    *arrays: Any, problem: MatmulProblem, present: Sequence[bool], platform: str
) -> jax.Array:
    from jax.experimental.custom_partitioning import custom_partitioning  # which few programs need

    problem, operands = problem.plain(operands_of(arrays, present).apart())
    present = tuple(x is not None for x in operands)
    arrays = tuple(x for x in operands if x is not None)
    # What is cut is looked at for its type alone.
    cut = custom_partitioning(lambda *xs: lowered_p.bind(*xs, problem=problem, present=present))
    rule, sizes, summed = sharding_rule(arrays, problem, present)
    cut.def_partition(
        functools.partial(_partition, problem, present, platform),
        decode_shardings=False,  # which fails where an axis of the mesh is cut in two
        sharding_rule=rule,
        reduction_factors=summed,
        **sizes,
    )
    return cut(*arrays)


# The rule: an axis is a product of factors, from the slowest to the fastest, and axes that are cut
# together begin with the same ones.


def sharding_rule(
    arrays: Sequence[Any], problem: MatmulProblem, present: Sequence[bool]
) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """Returns a sharding rule, the sizes of factors that are no axis by themselves, and the summed.

    >>> import jax
    >>> from veneer.kernels import Codes, MatmulProblem
    >>> problem = MatmulProblem(Codes(4, values=(0.0,) * 16), 64, "rows", "float32", 0, print)
    >>> shapes = ((1, 2, 256), "float32"), ((1, 256, 32), "uint8"), ((1, 8, 64), "float32")
    >>> arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    >>> sharding_rule(arrays, problem, (True, True, True, False, False, False))
    ('b m (r0 r1), b (r0 r1) c0, b r0 (c0 c1) -> b m (c0 c1)', {'r1': 32, 'c1': 2}, ('r0', 'r1'))
    """
    operands = operands_of(arrays, present)
    tiles = _tiles(operands)
    _, rows, row_bytes = operands.packed.shape
    # Bytes that bit planes of the same codes are in are one entry.
    planes = problem.codes.bits if 8 % problem.codes.bits else 1
    factors = {
        "rows": _factors("r", {rows, tiles[0]}),
        "columns": _factors("c", {problem.columns, row_bytes // planes, tiles[1]}),
    }
    axes = _axes(operands, problem)
    _, m, n = problem.out_shape(operands.x, operands.packed)
    shapes = [x.shape for x in arrays] + [(operands.x.shape[0], m, n)]
    sizes: dict[str, int] = {"b": 0, "m": 0}  # known by arrays
    written = []
    for i, (names, shape) in enumerate(zip(axes, shapes, strict=True)):
        dimensions = []
        for j, (name, size) in enumerate(zip(names, shape, strict=True)):
            # An axis of 1 is never cut, and goes with no other.
            made_of = {name: 0}
            if name in factors:
                each = planes if (i, name) == (1, "columns") else 1  # the stored matrix
                made_of = factors[name].get(size // each, {f"one{i}{j}": 1})
                made_of = made_of if each == 1 else made_of | {"planes": each}
            sizes |= made_of
            dimensions.append(made_of)
        written.append(dimensions)
    alone = {name for dimensions in written for d in dimensions if len(d) == 1 for name in d}
    *of_operands, of_result = (" ".join(map(_written, dimensions)) for dimensions in written)
    return (
        f"{', '.join(of_operands)} -> {of_result}",
        {name: size for name, size in sizes.items() if name not in alone},
        tuple(
            name for name in sizes if name in set().union(*factors[problem.contracting].values())
        ),
    )


def _axes(operands: MatmulOperands, problem: MatmulProblem) -> list[tuple[str, ...]]:
    """What the axes of each operand and of the result are."""
    other = {"rows": "columns", "columns": "rows"}[problem.contracting]
    matrix = ("b", "rows", "columns")
    rows = ("b", "m", problem.contracting)
    of_scales = rows if operands.x_scale is not None and operands.x_scale.ndim == 3 else rows[:2]
    of_operands = MatmulOperands(rows, matrix, matrix, matrix, of_scales, matrix)
    here = [axes for axes, x in zip(of_operands, operands, strict=True) if x is not None]
    return [*here, ("b", "m", other)]


def _factors(prefix: str, counts: set[int]) -> dict[int, dict[str, int]]:
    """The factors, with their sizes, of axes that follow one axis, by how many entries they have.

    Where one's entries do not each go with as many of another's, they have no factors in common.
    """
    factors: dict[int, dict[str, int]] = {}
    before, made_of = 1, dict[str, int]()
    for count in sorted(counts - {1}):
        if count % before:
            return {count: {f"{prefix}{i}": count} for i, count in enumerate(sorted(counts))}
        made_of = {**made_of, f"{prefix}{len(made_of)}": count // before}
        factors[count], before = made_of, count
    return factors


def _written(factors: dict[str, int]) -> str:
    names = " ".join(factors)
    return f"({names})" if len(factors) > 1 else names


def _tiles(operands: MatmulOperands) -> tuple[int, int]:
    """How many tiles there are along rows and columns, of what varies most."""
    leaves = [x for x in (operands.scale, operands.zero_point) if x is not None]
    return max(x.shape[1] for x in leaves), max(x.shape[2] for x in leaves)


# What one device computes.


def _partition(
    problem: MatmulProblem,
    present: Sequence[bool],
    platform: str,
    mesh: Any,
    arg_shapes: Any,
    result_shape: Any,
) -> tuple[Any, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    operands = operands_of(arg_shapes, present)
    cuts = _cuts(operands, result_shape, problem, mesh)
    shapes = [x.shape for x in arg_shapes]
    *of_operands, of_result = (
        P(*(cuts[name] if size != 1 else None for name, size in zip(names, shape, strict=True)))
        for names, shape in zip(
            _axes(operands, problem), [*shapes, result_shape.shape], strict=True
        )
    )
    summed = cuts[problem.contracting]
    parts = _parts(cuts["columns"], mesh)
    local = dataclasses.replace(problem, columns=problem.columns // parts)
    if summed:  # rounded once, when it is whole
        local = dataclasses.replace(local, out_dtype="float32")

    def on_one_device(*arrays: jax.Array) -> jax.Array:
        out = by_kernel(*arrays, problem=local, present=present, platform=platform)
        return jax.lax.psum(out, summed).astype(problem.out_dtype) if summed else out

    placed = [NamedSharding(mesh, spec) for spec in (*of_operands, of_result)]
    return mesh, on_one_device, placed[-1], tuple(placed[:-1])


_Cut = tuple[str, ...] | None  # the axes of a mesh


def _cuts(
    operands: MatmulOperands, result: Any, problem: MatmulProblem, mesh: Any
) -> dict[str, _Cut]:
    """How each axis is cut: as the result is, or else as operands are, where nothing is split."""
    counts = {
        "b": [operands.x.shape[0]],
        "m": [operands.x.shape[1]],
        "rows": [operands.packed.shape[1]],
        "columns": [problem.columns, operands.packed.shape[2]],
    }
    for name, count in zip(("rows", "columns"), _tiles(operands), strict=True):
        if count > 1:
            counts[name].append(count)
    codes = 8 if 8 % problem.codes.bits else 8 // problem.codes.bits  # that are not parted
    counts["columns"].append(1 if problem.columns % codes else problem.columns // codes)
    of = functools.partial(_asked, mesh)
    asked = {
        "b": (of(result, 0), of(operands.packed, 0), of(operands.x, 0)),
        "m": (of(result, 1), of(operands.x, 1)),
        "rows": (of(operands.packed, 1),),
        "columns": (of(operands.packed, 2),),
    }
    other = {"rows": "columns", "columns": "rows"}[problem.contracting]
    asked[other] = (of(result, 2), *asked[other])
    asked[problem.contracting] += (of(operands.x, 2),)
    cuts: dict[str, _Cut] = {}
    taken = set[str]()
    for name in ("b", other, "m", problem.contracting):
        fits = (
            cut
            for cut in asked[name]
            if cut
            and not taken & set(cut)
            and all(n % _parts(cut, mesh) == 0 for n in counts[name])
        )
        cuts[name] = next(fits, None)
        taken |= set(cuts[name] or ())
    return cuts


def _asked(mesh: Any, x: Any, axis: int) -> _Cut:
    """How the partitioner would have an axis of an array cut."""
    spec = find_partition_spec(mesh, x.sharding, len(x.shape))
    entry = spec[axis] if axis < len(spec) else None
    return (entry,) if isinstance(entry, str) else entry


def _parts(cut: _Cut, mesh: Any) -> int:
    return math.prod(mesh.shape[name] for name in cut or ())
