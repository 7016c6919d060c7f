"""`Constant`: an array all of whose entries are the same number."""

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
    operand is NaN. A matmul sums the entries of the dense operand, and multiplies the sum by
    `fill`. A matmul of two dense arrays multiplies each entry by `fill` before the sum. If `fill`
    is infinite or such a product overflows, the matmul of two dense arrays can be NaN where the
    matmul with a `Constant` is a number or infinite.

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

    metadata_is_meaning = False  # which of the axes are the fill's is no matter of meaning
    is_label = False

    def __post_init__(self) -> None:
        try:
            jax.typeof(self.fill)
        except (TypeError, RuntimeError):  # the latter of an implicit array
            raise TypeError(
                f"Constant takes a number or an array to fill with, not {self.fill!r}"
            ) from None
        sizes: Any = self.trailing
        if not (isinstance(sizes, tuple) and all(map(_is_size, sizes))):
            raise TypeError(f"Constant takes a tuple of sizes, not {sizes!r}")

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any = float) -> "Constant":
        """Return a `Constant` of zeros.

        **Arguments:**

        - `shape`: a tuple of sizes.
        - `dtype`: the dtype. The default is JAX's default float.
        """
        return cls(jnp.zeros((), dtype), shape)

    @classmethod
    def ones(cls, shape: tuple[int, ...], dtype: Any = float) -> "Constant":
        """Return a `Constant` of ones.

        **Arguments:**

        - `shape`: a tuple of sizes.
        - `dtype`: the dtype. The default is JAX's default float.
        """
        return cls(jnp.ones((), dtype), shape)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape `(*fill.shape, *trailing)` and the dtype of `fill`."""
        fill = jax.typeof(self.fill)
        return jax.core.ShapedArray((*fill.shape, *self.trailing), fill.dtype)

    def materialise(self) -> Any:
        """Return the dense array."""
        return _broadcast(self.fill, self.shape)


def _is_size(n: Any) -> bool:
    return is_symbolic_dim(n) or (isinstance(n, int) and n >= 0)


def _broadcast(fill: Any, shape: Sequence[int]) -> Any:
    """A fill of the leading axes as an array, whose sizes there may be 1."""
    return lax.broadcast_in_dim(fill, shape, range(jnp.ndim(fill)))


# Elementwise.


def _elementwise(primitive: Primitive) -> None:
    @register(primitive)
    def _(*operands: Constant | ArrayLike, **params: Any) -> Any:
        bind = lambda xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        shapes = [jnp.shape(x) if not isinstance(x, Constant) else x.shape for x in operands]
        shape = jnp.broadcast_shapes(*shapes)
        numbers = [s == () for s in shapes]  # as they may stand beside arrays in some primitives
        if not all(isinstance(x, Constant) or n for x, n in zip(operands, numbers, strict=True)):
            return bind([_beside_arrays(x, shape) for x in operands])
        fills = [x.fill if isinstance(x, Constant) else x for x in operands]
        lead = max(map(jnp.ndim, fills))
        fills = [
            x if n else _broadcast(x, shape[:lead]) for x, n in zip(fills, numbers, strict=True)
        ]
        return Constant(bind(fills), shape[lead:])


def _beside_arrays(x: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(x, Constant):
        return x
    return x.fill if x.shape == () else _broadcast(x.fill, shape)


for _primitive in ELEMENTWISE:
    _elementwise(_primitive)


# Reductions: along leading axes of the fill, and along the others of one number.


def _sum(fill: Any, count: int) -> Any:
    wide = _wide(fill.dtype)  # the count may be too large for a half
    return _times(fill.astype(wide), count).astype(fill.dtype)


def _times(x: Any, count: int) -> Any:
    if not count:  # none of infinity is 0
        return jnp.zeros_like(x)
    if jnp.issubdtype(x.dtype, jnp.integer):  # which wraps around, as the sum does
        count %= 1 << jnp.iinfo(x.dtype).bits
    number = np.array(count).astype(x.dtype)  # too large for JAX to take, perhaps
    return x * jnp.asarray(number)


def _product(fill: Any, count: int) -> Any:
    return lax.integer_pow(fill.astype(_wide(fill.dtype)), count).astype(fill.dtype)


def _same(fill: Any, count: int) -> Any:
    del count
    return fill


def _wide(dtype: Any) -> Any:
    halves = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if halves else dtype


def _reduction(name: str, of_equals: Callable[[Any, int], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Constant, *, axes: Any, **params: Any) -> Any:
        fill = jnp.asarray(x.fill)
        kept, reduced = _split(x, axes)
        leading = tuple(axis for axis in axes if axis < fill.ndim)
        if 0 in reduced and of_equals is _same:
            return NotImplemented  # of no entries: what the primitive says of those
        fill = primitive.bind(fill, axes=leading, **params) if leading else fill
        count = math.prod(reduced)
        return Constant(of_equals(fill, count) if count != 1 else fill, kept)


def _split(x: Constant, axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trailing sizes without those of some axes, and those."""
    lead = jnp.ndim(x.fill)
    kept = (n for i, n in enumerate(x.trailing, lead) if i not in axes)
    return tuple(kept), tuple(x.shape[i] for i in axes if i >= lead)


for _name, _of_equals in {
    "reduce_sum": _sum,
    "reduce_prod": _product,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_and", "reduce_or"), _same),
}.items():
    _reduction(_name, _of_equals)


def _position(primitive: Primitive) -> None:
    @register(primitive)
    def _(x: Constant, *, axes: Any, index_dtype: Any, **params: Any) -> Any:
        kept, reduced = _split(x, axes)
        fill = jnp.asarray(x.fill)
        if not reduced:
            index = primitive.bind(fill, axes=axes, index_dtype=index_dtype, **params)
            return Constant(index, kept)
        return Constant(jnp.zeros(fill.shape, index_dtype), kept)  # the first


for _primitive in (lax.argmax_p, lax.argmin_p):
    _position(_primitive)


# Layout: the fill's axes must stay the leading ones.


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
    leading = [i for i in dimensions if i < jnp.ndim(x.fill)]
    return Constant(lax.squeeze(jnp.asarray(x.fill), leading), _split(x, dimensions)[0])


@register("rev")
def _(x: Constant, *, dimensions: Any) -> Any:
    leading = [i for i in dimensions if i < jnp.ndim(x.fill)]
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
    if lead:  # lax.dynamic_slice would count negative starts from the end once more
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
    fills = [jnp.asarray(v.fill, jnp.promote_types(_wide(v.dtype), dtype)) for v in operands]

    # Each axis has a number, the same where two are contracted or are batch axes.
    of_x, of_y = (list(range(i, i + v.ndim)) for i, v in zip((0, 100), operands, strict=True))
    (contracted, _), (batch, _) = dimension_numbers
    for pair in dimension_numbers:
        for i, j in zip(*pair, strict=True):
            of_y[j] = of_x[i]
    sizes = dict(zip(of_x + of_y, operands[0].shape + operands[1].shape, strict=True))
    summed, first = [of_x[i] for i in contracted], [of_x[i] for i in batch]
    out = first + [n for n in of_x + of_y if n not in (*summed, *first)]

    stored = [axes[: fill.ndim] for axes, fill in zip((of_x, of_y), fills, strict=True)]
    kept = [n for n in out if n in stored[0] + stored[1]]
    terms = [part for pair in zip(fills, stored, strict=True) for part in pair]
    unseen = [n for n in summed if n not in stored[0] + stored[1]]
    count = math.prod(sizes[n] for n in (unseen if math.prod(sizes[n] for n in summed) else summed))
    product = _times(jnp.einsum(*terms, kept, precision=precision), count).astype(dtype)
    shape = tuple(sizes[n] for n in out)
    if isinstance(x, Constant) and isinstance(y, Constant) and kept == out[: len(kept)]:
        return Constant(product, shape[len(kept) :])
    return lax.broadcast_in_dim(product, shape, [out.index(n) for n in kept])
