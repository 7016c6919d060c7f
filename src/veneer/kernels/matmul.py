"""`matmul`: the product of activations with a stored matrix, as a JAX primitive.

One primitive, and not `lax.platform_dependent`: that traces every platform's way in each program
and each derivative, and its batching would batch them all. A primitive has one rule for each
transformation, and a platform's way is chosen as it is lowered.

- It is linear in the activations, and their cotangent is the product with the same bytes by the
  other side. So no dense matrix appears in a derivative.
- It is linear in the scales of both operands, too. The cotangent of the matrix's is by the
  reference: a sum over tiles of a matrix of that size.
- Mapped activations are more rows; mapped matrices a batch.
- Lowered for CPU it is a call of a kernel, where there is one. Elsewhere, and in a program that is
  exported, which other processes run, it is the reference: XLA's way, on the same bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from .._jax.primitives import Primitive, lowered_with_devices
from .._jax.sharding import vary_together
from . import select
from .codes import Codes


class Operands(NamedTuple):
    """The arrays of a product; or what is said of each, such as the axis that is mapped.

    **Arguments:**

    - `x`: activations, `[B, M, K]`: f32, bf16 or f16, or int8 codes.
    - `packed`: the stored matrix, `[B, R, bytes]`.
    - `scale`: of its tiles, f32 `[B, R / tr, C / tc]`.
    - `zero_point`: the code that stands for 0, of any integer dtype; along each axis of the size of
      `scale` or of 1, or the other way round. Or None.
    - `x_scale`: of integer activations, f32 `[B, M]`; else None.
    """

    x: Any
    packed: Any
    scale: Any
    zero_point: Any = None
    x_scale: Any = None


@dataclasses.dataclass(frozen=True)
class Product:
    """What a product is, beside the arrays.

    **Arguments:**

    - `codes`: of the stored matrix.
    - `columns`: how many codes a row of it has, C.
    - `contracting`: the side of it that is summed over: "rows", R, or "columns", C.
    - `out_dtype`: of the result.
    - `offset`: what a zero point is worth more than a code of the same bits: where `codes` has
      values that are centred, it is not.
    - `reference`: XLA's way, from the operands and this; hashable, so that programs are cached.
    """

    codes: Codes
    columns: int
    contracting: str
    out_dtype: str
    offset: int
    reference: Callable[[Operands, "Product"], jax.Array]

    @property
    def transposed(self) -> "Product":
        """The product with the same matrix by its other side."""
        other = {"rows": "columns", "columns": "rows"}[self.contracting]
        return dataclasses.replace(self, contracting=other)

    def out_shape(self, x: Any, packed: Any) -> tuple[Any, ...]:
        """Returns `[B, M, N]`."""
        n = self.columns if self.contracting == "rows" else packed.shape[1]
        return (*x.shape[:2], n)

    def shape(self, operands: Operands) -> select.Shape:
        """Returns what the choice of a kernel depends on."""
        x, packed, scale, _, x_scale = operands
        k = x.shape[2]
        return select.Shape(
            contracting=self.contracting,
            activations="float" if x_scale is None else "int8",
            m=x.shape[1],
            k=k,
            n=self.out_shape(x, packed)[2],
            tile=k // max(1, scale.shape[1 if self.contracting == "rows" else 2]),
        )

    def __repr__(self) -> str:
        return f"Product({self.codes.kind}, {self.contracting} contracted)"


def matmul(operands: Operands, product: Product) -> jax.Array:
    """Returns the product of activations with a stored matrix, by a kernel where there is one.

    `x @ W` if `product.contracting` is "rows" and `x @ W.T` if it is "columns", of W `[R, C]`: what
    the codes are worth, less their zero points, times their scales. Sums are in f32, or of integer
    activations exact for each tile.

    **Returns:** `[B, M, N]`, of `product.out_dtype`.
    """
    present = [x is not None for x in operands]
    arrays = vary_together([x for x in operands if x is not None])
    return matmul_p.bind(*arrays, product=product, present=tuple(present))


matmul_p = Primitive("stored_matmul")
lowered_with_devices(matmul_p)  # which `sharding` needs


def operands_of(arrays: Sequence[Any], present: Sequence[bool]) -> Operands:
    """Puts arrays in their places, of which `present` says whether there is something."""
    rest = iter(arrays)
    return Operands(*(next(rest) if there else None for there in present))


@matmul_p.def_impl
def _computed(*arrays: Any, **params: Any) -> jax.Array:
    return _compiled(tuple(params.items()))(*arrays)


@functools.lru_cache(maxsize=1024)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable:
    return jax.jit(functools.partial(matmul_p.bind, **dict(params)))


@matmul_p.def_abstract_eval
def _typed(*avals: Any, product: Product, present: Sequence[bool]) -> Any:
    x, packed, *_ = avals
    shape = product.out_shape(x, packed)
    return x.update(shape=shape, dtype=jnp.dtype(product.out_dtype), weak_type=False)


# Derivatives. It is linear in each of x, scale and x_scale.


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    moved = [
        matmul_p.bind(*primals[:i], tangent, *primals[i + 1 :], **params)
        for i, tangent in enumerate(tangents)
        if type(tangent) is not ad.Zero
    ]
    return matmul_p.bind(*primals, **params), functools.reduce(ad.add_tangents, moved)


ad.primitive_jvps[matmul_p] = _jvp


def _transpose(cotangent: Any, *arrays: Any, product: Product, present: Sequence[bool]) -> Any:
    (i,) = (i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval) if j == i else None for j, x in enumerate(arrays)]
    operands = operands_of(arrays, present)
    if ad.is_undefined_primal(operands.x):
        found = _of_x(cotangent, operands, product)
    elif ad.is_undefined_primal(operands.scale):
        found = _of_scale(cotangent, operands, product)
    else:
        found = _of_x_scale(cotangent, operands, product)
    return [found if j == i else None for j in range(len(arrays))]


ad.primitive_transposes[matmul_p] = _transpose


def _of_x(cotangent: jax.Array, operands: Operands, product: Product) -> jax.Array:
    dtype = operands.x.aval.dtype.name
    back = dataclasses.replace(product.transposed, out_dtype=dtype)
    return matmul(operands._replace(x=cotangent), back)


def _of_scale(cotangent: jax.Array, operands: Operands, product: Product) -> jax.Array:
    aval = operands.scale.aval
    by_scale = lambda scale: product.reference(operands._replace(scale=scale), product)
    return jax.vjp(by_scale, jnp.ones(aval.shape, aval.dtype))[1](cotangent)[0]


def _of_x_scale(cotangent: jax.Array, operands: Operands, product: Product) -> jax.Array:
    aval = operands.x_scale.aval
    ones = operands._replace(x_scale=jnp.ones(aval.shape, aval.dtype))
    unscaled = matmul(ones, dataclasses.replace(product, out_dtype="float32"))
    return jnp.sum(cotangent.astype(jnp.float32) * unscaled, axis=2)


# Batching.


def _batch(
    arrays: Any, dims: Any, *, product: Product, present: Sequence[bool]
) -> tuple[jax.Array, int]:
    (size,) = {x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None}
    operands, axes = operands_of(arrays, present), operands_of(dims, present)
    each = [n for axis, n in enumerate(operands.x.shape) if axis != axes.x]  # [B, M, K]
    of_matrix = (axes.packed, axes.scale, axes.zero_point)
    if all(axis is None for axis in of_matrix):
        rows = [(x, axis) for x, axis in ((operands.x, axes.x), (operands.x_scale, axes.x_scale))]
        x, x_scale = (None if x is None else _as_rows(x, axis, size) for x, axis in rows)
        out = matmul(operands._replace(x=x, x_scale=x_scale), product)
        return out.reshape(out.shape[0], size, each[1], out.shape[2]), 1
    if axes.packed is None:  # rather than as many copies of the matrix
        of_arrays = lambda *arrays: product.reference(operands_of(arrays, present), product)
        return jax.vmap(of_arrays, in_axes=tuple(dims))(*arrays), 0
    stacked = [_as_batch(x, axis, size) for x, axis in zip(arrays, dims, strict=True)]
    out = matmul(operands_of(stacked, present), product)
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


# Lowering.


def by_reference(*arrays: Any, product: Product, present: Sequence[bool]) -> jax.Array:
    """Computes a product by XLA's way."""
    return product.reference(operands_of(arrays, present), product)


def by_kernel(*arrays: Any, product: Product, present: Sequence[bool]) -> jax.Array:
    """Computes a product on one CPU: by a kernel, where there is one for it."""
    operands = operands_of(arrays, present)
    shape = product.shape(operands)
    target = select.find("cpu", product.codes, shape) if shape.m else None
    if target is None or not select.built(target):
        return product.reference(operands, product)
    x, packed, scale, zero_point, x_scale = operands
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(product.out_shape(x, packed), jnp.float32))
    table = np.asarray(product.codes.table, np.float32)
    out: Any = (
        call(x.astype(jnp.float32), packed, scale, table)
        if x_scale is None
        else call(x, x_scale, packed, scale, table)
    )
    if zero_point is not None:
        out -= _of_zero_points(operands, product)
    return out.astype(product.out_dtype)


def _of_zero_points(operands: Operands, product: Product) -> jax.Array:
    """What a product with codes is larger by than one with codes less their zero points."""
    x, _, scale, zero_point, x_scale = operands
    assert zero_point is not None
    # Of the sizes of `scale` or, if there are more, of `zero_point`.
    worth = scale * (zero_point.astype(jnp.float32) - product.offset)
    if product.contracting == "columns":
        worth = jnp.swapaxes(worth, 1, 2)
    b, m, k = x.shape
    tiles = x.astype(jnp.float32).reshape(b, m, worth.shape[1], k // worth.shape[1])
    out = jnp.einsum("bmt,btn->bmn", tiles.sum(3), worth, precision="highest")
    if x_scale is not None:
        out *= x_scale[..., None]
    n = product.out_shape(x, operands.packed)[2]
    return jnp.repeat(out, n // out.shape[2], 2, total_repeat_length=n)


def _lowered(ctx: Any, *values: Any, product: Product, present: Sequence[bool]) -> Any:
    # Without what a shard_map says of them: all that is computed here stays on one device.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    source = _source(values[1]) if product.codes.bits == 8 else None

    def call(*arrays: Any) -> jax.Array:
        if source is None:
            return lowered_p.bind(*arrays, product=product, present=present)
        turned, moved = _turned(operands_of(arrays, present), product)
        return lowered_p.bind(*moved, product=turned, present=present)

    if source is not None:
        values = (values[0], source, *values[2:])
        avals[1] = avals[1].update(shape=tuple(source.type.shape))
    return mlir.lower_fun(call, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _source(packed: Any) -> Any:
    """What stored matrices are a transposition of, in the program that is lowered; or None.

    To transpose codes, as `w.T` does, takes longer than the product, which may as well sum the
    other side. Where several share a byte, that is seen from the axis that they are packed along.
    """
    made = packed.owner
    if getattr(made, "name", "") == "stablehlo.reshape" and packed.type.shape[0] == 1:
        made = made.operands[0].owner
    if getattr(made, "name", "") != "stablehlo.transpose":
        return None
    if made.results[0].type.shape[-2:] != packed.type.shape[-2:]:
        return None  # the reshape between them did more than to add a batch of one
    order = list(made.attributes["permutation"])
    return made.operands[0] if order in ([1, 0], [0, 2, 1]) else None


def _turned(operands: Operands, product: Product) -> tuple[Product, list[jax.Array]]:
    """A product and its arrays, by the matrix that the one given is the transposition of."""
    x, packed, scale, zero_point, x_scale = operands
    packed = packed.reshape(x.shape[0], *packed.shape[-2:])
    scale, zero_point = (
        None if leaf is None else jnp.swapaxes(leaf, 1, 2) for leaf in (scale, zero_point)
    )
    turned = dataclasses.replace(product.transposed, columns=packed.shape[2])
    return turned, [x for x in (x, packed, scale, zero_point, x_scale) if x is not None]


# Not cached, for what an operand is made of is not part of the key. What follows is cached; and has
# a rule for CPU, which JAX 0.10 and 0.12 do not find with others in what is not.
mlir.register_lowering(matmul_p, _lowered, cacheable=False)

lowered_p = Primitive("lowered_stored_matmul")
lowered_p.def_abstract_eval(_typed)


def _lowered_for_cpu(ctx: Any, *values: Any, **params: Any) -> Any:
    from .sharding import way_of  # which imports what few programs need

    way = by_reference if ctx.module_context.lowering_parameters.for_export else way_of(ctx)
    return mlir.lower_fun(way, multiple_results=False)(ctx, *values, **params)


mlir.register_lowering(lowered_p, mlir.lower_fun(by_reference, multiple_results=False))
mlir.register_lowering(lowered_p, _lowered_for_cpu, platform="cpu")
