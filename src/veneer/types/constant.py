"""`Constant`: an array whose entries are all equal."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike

from .._core.rules import register
from .._core.surface.array import ImplicitArray
from .._core.tree import static
from .._jax.primitives import Primitive, find_primitive
from .._jax.tracing import vary_together
from .elementwise import ELEMENTWISE


class Constant(ImplicitArray):
    """An array `[..., *trailing]` whose entries are all `fill`: zeros, ones or any other number.

    It stores one number, or one per index of the leading axes. Operations with a dense array
    broadcast it, and under `jax.jit` XLA does not store the broadcast array. A matmul with a dense
    `[m, n]` sums the dense array over the contracted axis, with `m n` additions.

    **Keeps the structure:** elementwise functions of `Constant` and numbers, reductions, products
    of two `Constant`, slices, reshapes, transposes and broadcasts.

    **Materializes:** `concatenate`, `cumsum`, `sort`, gathers and scatters, and operations with
    another implicit type.

    Rules do not check whether `fill` is 0. So a product with `fill=0` is NaN where the other
    operand is NaN. A matmul sums the entries of the dense operand, and then multiplies by `fill`.
    So the result can be finite or infinite where the dense matmul, which multiplies before the sum,
    overflows to NaN.

    **Arguments:**

    - `fill`: a number, or an array `[...]` with one number per index of the leading axes, of any
      dtype.
    - `trailing`: a tuple with the sizes of the axes after the leading ones; static.

    **Raises:** `TypeError` if `fill` is not a number or an array, or `trailing` is not a tuple of
    sizes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> ones = vn.types.Constant.ones((1000, 1000))
    >>> ones, ones.nbytes
    (Constant(fill=f32[], trailing=(1000, 1000)), 4)
    >>> (ones @ jnp.ones((1000, 3))).shape
    (1000, 3)
    """

    fill: Any  # [...]
    trailing: tuple[int, ...] = static(default=())

    metadata_is_meaning = False
    is_label = False

    def __post_init__(self) -> None:
        try:
            jax.typeof(self.fill)
        except (TypeError, RuntimeError):  # RuntimeError for an implicit array
            raise TypeError(
                f"Constant takes a number or an array to fill with, not {self.fill!r}"
            ) from None
        sizes: Any = self.trailing
        is_size = lambda n: is_symbolic_dim(n) or (isinstance(n, int) and n >= 0)
        if not (isinstance(sizes, tuple) and all(map(is_size, sizes))):
            raise TypeError(f"Constant takes a tuple of sizes, not {sizes!r}")

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any = float) -> "Constant":
        """Return a `Constant` of zeros.

        **Arguments:** `shape`, a tuple of sizes, and `dtype`, by default JAX's default float.
        """
        return cls(jnp.zeros((), dtype), shape)

    @classmethod
    def ones(cls, shape: tuple[int, ...], dtype: Any = float) -> "Constant":
        """Return a `Constant` of ones.

        **Arguments:** `shape`, a tuple of sizes, and `dtype`, by default JAX's default float.
        """
        return cls(jnp.ones((), dtype), shape)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape `(*fill.shape, *trailing)` and the dtype of `fill`."""
        fill = jax.typeof(self.fill)
        return jax.core.ShapedArray((*fill.shape, *self.trailing), fill.dtype)

    def materialise(self) -> Any:
        """Return the dense array."""
        return _broadcast(self.fill, self.shape)


def _broadcast(fill: Any, shape: Sequence[int]) -> Any:
    """Broadcast `fill`, the field of a `Constant`, to `shape`. Its axes become the first axes."""
    return lax.broadcast_in_dim(fill, shape, range(jnp.ndim(fill)))


# Elementwise functions.


def _register_elementwise(primitive: Primitive) -> None:
    @register(primitive)
    def _(*operands: Constant | ArrayLike, **params: Any) -> Any:
        constants = [x for x in operands if isinstance(x, Constant)]
        shapes = [x.shape if isinstance(x, Constant) else jnp.shape(x) for x in operands]
        shape = jnp.broadcast_shapes(*shapes)
        has_array = any(
            s and not isinstance(x, Constant) for x, s in zip(operands, shapes, strict=True)
        )
        lead = len(shape) if has_array else max(jnp.ndim(x.fill) for x in constants)

        def dense_operand(x: Any) -> Any:
            if not isinstance(x, Constant):
                return x
            # Scalars stay scalars: primitives such as `clamp` take them next to arrays.
            return _broadcast(x.fill, shape[:lead]) if x.shape else x.fill

        dense = map(dense_operand, operands)
        result = primitive.bind(*dense, **primitive.get_bind_params(params))
        return result if has_array else Constant(result, shape[lead:])


for _primitive in ELEMENTWISE:
    _register_elementwise(_primitive)


# Reductions: the primitive itself reduces the leading axes, which are the axes of the fill. A
# function of the fill and the number of entries reduces the trailing axes.


def _widen(dtype: Any) -> Any:
    """Return float32 for a narrower floating dtype, and any other dtype unchanged.

    A number of entries can overflow in 16 bits.
    """
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_narrow else dtype


def _multiply_by_count(x: Any, count: int) -> Any:
    """Return the sum of `count` copies of `x`."""
    if not count:  # a sum of no entries is 0, even of infinities
        return jnp.zeros_like(x)
    if jnp.issubdtype(x.dtype, jnp.integer):  # wrap around, as a sum does
        count %= 1 << jnp.iinfo(x.dtype).bits
    number = np.array(count).astype(x.dtype)  # JAX raises for a count that exceeds int32
    return x * jnp.asarray(number)


#: For each reduction, the result for `count` equal entries. None if it is the entry itself.
_REDUCTIONS: dict[str, Callable[[Any, int], Any] | None] = {
    "reduce_sum": _multiply_by_count,
    "reduce_prod": lax.integer_pow,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_and", "reduce_or")),
}


def _register_reduction(name: str, reduce_equal: Callable[[Any, int], Any] | None) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Constant, *, axes: Any, **params: Any) -> Any:
        fill = jnp.asarray(x.fill)
        leading, kept, reduced = _split_axes(x, axes)
        count = math.prod(reduced)
        if reduce_equal is None and 0 in reduced:
            return NotImplemented  # the primitive defines the result for no entries
        if leading:
            fill = primitive.bind(fill, axes=leading, **params)
        if reduce_equal is not None and count != 1:
            fill = reduce_equal(fill.astype(_widen(fill.dtype)), count).astype(fill.dtype)
        return Constant(fill, kept)


def _split_axes(x: Constant, axes: Any) -> tuple[tuple[int, ...], ...]:
    """Split the `axes` that a primitive removes into axes of the fill and trailing axes.

    **Returns:** `(leading, kept, reduced)`: the removed axes of the fill, the sizes of the trailing
    axes that remain, and the sizes of the trailing axes that are removed.
    """
    lead = jnp.ndim(x.fill)
    kept = (n for i, n in enumerate(x.trailing, lead) if i not in axes)
    reduced = (x.shape[i] for i in axes if i >= lead)
    return tuple(i for i in axes if i < lead), tuple(kept), tuple(reduced)


for _name, _reduce_equal in _REDUCTIONS.items():
    _register_reduction(_name, _reduce_equal)


def _register_argmax(primitive: Primitive) -> None:
    @register(primitive)
    def _(x: Constant, *, axes: Any, index_dtype: Any, **params: Any) -> Any:
        fill = jnp.asarray(x.fill)
        leading, kept, _ = _split_axes(x, axes)
        if leading:
            index = primitive.bind(fill, axes=axes, index_dtype=index_dtype, **params)
        else:
            index = jnp.zeros(fill.shape, index_dtype)  # of equal entries, the first one
        return Constant(index, kept)


for _primitive in (lax.argmax_p, lax.argmin_p):
    _register_argmax(_primitive)


# Changes of layout. The axes of the fill must remain the leading axes.


@register("broadcast_in_dim")
def _(x: Constant, *, shape: Any, broadcast_dimensions: Any, sharding: Any, **params: Any) -> Any:
    fill = jnp.asarray(x.fill)
    lead = fill.ndim
    if sharding is not None or tuple(broadcast_dimensions[:lead]) != tuple(range(lead)):
        return NotImplemented
    return Constant(_broadcast(fill, shape[:lead]), tuple(shape[lead:]))


@register("reshape")
def _(x: Constant, *, new_sizes: Any, dimensions: Any, sharding: Any, **params: Any) -> Any:
    lead = jnp.shape(x.fill)
    sizes = tuple(new_sizes)
    if sharding is not None or dimensions is not None or sizes[: len(lead)] != lead:
        return NotImplemented
    return Constant(x.fill, sizes[len(lead) :])


@register("transpose")
def _(x: Constant, *, permutation: Any) -> Any:
    lead = jnp.ndim(x.fill)
    if set(permutation[:lead]) != set(range(lead)):
        return NotImplemented
    fill = lax.transpose(x.fill, permutation[:lead])
    return Constant(fill, tuple(x.shape[i] for i in permutation[lead:]))


@register("squeeze")
def _(x: Constant, *, dimensions: Any) -> Any:
    leading, kept, _ = _split_axes(x, dimensions)
    return Constant(lax.squeeze(jnp.asarray(x.fill), leading), kept)


@register("rev")
def _(x: Constant, *, dimensions: Any) -> Any:
    leading, *_ = _split_axes(x, dimensions)
    return Constant(lax.rev(jnp.asarray(x.fill), leading), x.trailing)


@register("slice")
def _(x: Constant, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    lead = jnp.ndim(x.fill)
    starts, limits = tuple(start_indices), tuple(limit_indices)
    steps = tuple(strides or (1,) * x.ndim)
    fill = lax.slice(jnp.asarray(x.fill), starts[:lead], limits[:lead], steps[:lead])
    ranges = map(range, starts[lead:], limits[lead:], steps[lead:])
    return Constant(fill, tuple(map(len, ranges)))


@register("dynamic_slice")
def _(x: Constant, *starts: ArrayLike, slice_sizes: Any) -> Any:
    lead, sizes = jnp.ndim(x.fill), tuple(slice_sizes)
    fill = jnp.asarray(x.fill)
    if lead:  # lax.dynamic_slice would shift negative starts a second time
        arrays = vary_together([fill, *starts[:lead]])
        fill = find_primitive("dynamic_slice").bind(*arrays, slice_sizes=sizes[:lead])
    return Constant(fill, sizes[lead:])


# Products.


@register("dot_general")
def _(
    x: Constant | ArrayLike,
    y: Constant | ArrayLike,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    **params: Any,
) -> Any:
    if out_sharding is not None:
        return NotImplemented
    operands = [v if isinstance(v, Constant) else Constant(v) for v in (x, y)]
    dtype = preferred_element_type or jnp.result_type(operands[0].dtype, operands[1].dtype)
    fills = [jnp.asarray(v.fill, jnp.promote_types(_widen(v.dtype), dtype)) for v in operands]

    # Label the axes with numbers, as in einsum. Pairs of contracted and batch axes share a label.
    x_labels, y_labels = (
        list(range(i, i + v.ndim)) for i, v in zip((0, 100), operands, strict=True)
    )
    (contracted, _), (batch, _) = dimension_numbers
    for pair in dimension_numbers:
        for i, j in zip(*pair, strict=True):
            y_labels[j] = x_labels[i]
    sizes = dict(zip(x_labels + y_labels, operands[0].shape + operands[1].shape, strict=True))
    summed, batched = [x_labels[i] for i in contracted], [x_labels[i] for i in batch]
    out = batched + [n for n in x_labels + y_labels if n not in (*summed, *batched)]

    # The fills have only the leading axes. `einsum` sums over these. The sum over any other axis
    # has equal terms, so it is a multiplication by the number of terms.
    stored = [labels[: f.ndim] for labels, f in zip((x_labels, y_labels), fills, strict=True)]
    kept = [n for n in out if n in stored[0] + stored[1]]
    counted = [n for n in summed if n not in stored[0] + stored[1]]
    if not math.prod(sizes[n] for n in summed):
        counted = summed  # a sum of no terms
    product = jnp.einsum(fills[0], stored[0], fills[1], stored[1], kept, precision=precision)
    product = _multiply_by_count(product, math.prod(sizes[n] for n in counted)).astype(dtype)
    shape = tuple(sizes[n] for n in out)
    if isinstance(x, Constant) and isinstance(y, Constant) and kept == out[: len(kept)]:
        return Constant(product, shape[len(kept) :])
    return lax.broadcast_in_dim(product, shape, [out.index(n) for n in kept])
