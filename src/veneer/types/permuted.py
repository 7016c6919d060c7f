"""`Permuted`: an array whose entries along an axis are stored in another order."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core.leaf_axes import LeafAxis, Movement, aligned
from .._core.primitives.dimension_numbers import DotDimensionNumbers
from .._core.primitives.reshaping import reshape_groups
from .._core.rules import register
from .._core.surface.array import ImplicitArray
from .._core.transform import redispatch
from .._core.tree import static
from .._core.value import Value, materialise_one
from .._jax.primitives import find_primitive


class Permuted(ImplicitArray):
    """An array of which slices along an axis are stored in another order, as those of a tile side
    by side: entry `order[k]` along the axis is entry `k` of `array`.

    A product that sums over the axis permutes its other operand, once, and multiplies by `array` as
    it lies; one that does not permutes its result. So is a quantised weight kept whose columns were
    sorted by their importance before they were put in groups.

    **Algebra:** products; transposes, slices of other axes and other movements; conversions; rows
    that are looked up come out in order. Everything else is dense.

    **Arguments:**

    - `array`: of any rank, dense or implicit, as a `QArray`.
    - `order`: int32, a permutation along `axis`, of the rank of `array`, and of size 1 or that of
      `array` along each other axis.
    - `axis`: counted from the end.

    **Raises:** `TypeError` for an order that is no array of integers; `ValueError` where its shape
    does not fit, or the axis is none.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Permuted(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2, 0, 1]]))
    >>> w.materialise().tolist(), (jnp.array([10.0, 1.0, 0.1]) @ w.T).tolist()
    ([[2.0, 3.0, 1.0]], [23.1...])
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)

    array: Any
    order: jax.Array | np.ndarray
    axis: int = static(default=-1)

    def __post_init__(self) -> None:
        shape, axes = tuple(self.array.shape), tuple(self.order.shape)
        if not jnp.issubdtype(self.order.dtype, jnp.integer):
            raise TypeError(f"order is a permutation, of integers, not {self.order.dtype.name}")
        if not -len(shape) <= self.axis < 0:
            raise ValueError(f"axis is negative, of an array of shape {shape}, not {self.axis}")
        others = list(axes)
        if len(axes) == len(shape):
            others[self.axis] = shape[self.axis] if axes[self.axis] == shape[self.axis] else -1
        if len(axes) != len(shape) or any(
            n not in (1, m) for n, m in zip(others, shape, strict=True)
        ):
            raise ValueError(
                f"order has shape {axes}, which is not that of {shape} along axis {self.axis}, and "
                "1 or the same along others"
            )

    def aval(self) -> jax.core.ShapedArray:
        """The shape and dtype of `array`."""
        return self.array.aval() if isinstance(self.array, Value) else jax.typeof(self.array)

    def materialise(self) -> jax.Array:
        """The dense array, in its order."""
        return in_order(jnp.asarray(materialise_one(self.array)), self.order, self.axis)

    def leaf_axes(self) -> Any:
        """The axis is whole; of others, `order` has those along which it differs."""
        axis = self.ndim + self.axis

        def whole(at: LeafAxis, size: int) -> LeafAxis:
            if at.axis == self.axis:
                return at._replace(block="whole")
            return at if size == self.shape[at.axis] else at._replace(block="shared")

        axes = aligned(self.ndim)
        array = [whole(at, size) for at, size in zip(axes, self.shape, strict=True)]
        assert array[axis].block == "whole"
        return [array, list(map(whole, axes, self.order.shape))]

    def _moved(self, movement: Movement) -> "Permuted":
        """This array, whose leaves were moved, permuted along the axis that now is."""
        # By the movement: leaves may be specs here, of which no rank is known.
        axis = movement.axes[self.axis]
        assert axis is not None
        new = object.__new__(Permuted)
        parts = {"array": self.array, "order": self.order, "axis": int(axis) - len(movement.shape)}
        new.__dict__.update(parts)
        return new


def in_order(x: jax.Array, order: ArrayLike, axis: int) -> jax.Array:
    """Undoes a permutation along an axis: `order` is of the rank of `x`, as that of `Permuted`."""
    return _taken(x, jnp.argsort(jnp.asarray(order), axis), axis)


def _taken(x: Any, indices: jax.Array, axis: int) -> Any:
    """The slices of x at indices along an axis, which differ along axes that are not of size 1."""
    if indices.size == indices.shape[axis]:
        take = lambda x, i: jnp.take(x, i, axis, mode="clip", unique_indices=True)
        return redispatch(take, x, indices.reshape(-1))
    along = lambda x, i: jnp.take_along_axis(x, i, axis, mode="clip")
    return redispatch(along, x, indices)


def _dot_general(w: Permuted, x: Any, params: dict[str, Any], *, first: bool) -> Any:
    """The product of w, which is the first operand or the second, with x."""
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    (of_w, of_x), (batch_w, batch_x) = numbers if first else numbers.swapped
    axis, order = w.ndim + w.axis, jnp.asarray(w.order)
    varies = {i for i, n in enumerate(order.shape) if n > 1 and i != axis}
    if params.get("out_sharding") is not None or axis in batch_w or not varies <= set(batch_w):
        return NotImplemented
    bind = lambda a, b: find_primitive("dot_general").bind(a, b, **params)
    product = lambda x: redispatch(bind, *((w.array, x) if first else (x, w.array)))
    free = [i for i in range(w.ndim) if i not in of_w and i not in batch_w]
    if axis in of_w:
        sizes, place = [1] * jnp.ndim(x), of_x[of_w.index(axis)]
        sizes[place] = order.shape[axis]
        for i, j in zip(batch_w, batch_x, strict=True):
            sizes[j] = order.shape[i]
        # The axes of order in the order of those of x that they go with.
        place_of = dict(zip((*of_w, *batch_w), (*of_x, *batch_x), strict=True))
        with_x = sorted([axis, *batch_w], key=lambda i: place_of[i])
        rest = [i for i in range(w.ndim) if i not in with_x]
        return product(_taken(x, order.transpose(*with_x, *rest).reshape(sizes), place))
    out = product(x)
    before = len(batch_w) + (0 if first else jnp.ndim(x) - len(of_x) - len(batch_x))
    place = before + free.index(axis)
    sizes = [1] * jnp.ndim(out)
    sizes[place] = order.shape[axis]
    for j, i in enumerate(batch_w):
        sizes[j] = order.shape[i]
    rest = [i for i in range(w.ndim) if i != axis and i not in batch_w]
    return in_order(out, order.transpose(*batch_w, axis, *rest).reshape(sizes), place)


@register("dot_general")
def _permuted_first(w: Permuted, x: ArrayLike, **params: Any) -> Any:
    return _dot_general(w, x, params, first=True)


@register("dot_general")
def _permuted_second(x: ArrayLike, w: Permuted, **params: Any) -> Any:
    return _dot_general(w, x, params, first=False)


@register("convert_element_type")
def _convert_element_type(w: Permuted, **params: Any) -> Any:
    convert = find_primitive("convert_element_type").bind
    return Permuted(redispatch(lambda x: convert(x, **params), w.array), w.order, w.axis)


@register("reshape")
def _reshape(w: Permuted, **params: Any) -> Any:
    """Of other axes, as where outputs are split into heads."""
    new, axis = params["new_sizes"], w.ndim + w.axis
    if params["dimensions"] is not None or w.order.size != w.order.shape[axis] or not w.size:
        return NotImplemented
    for old_axes, new_axes in reshape_groups(w.shape, new):
        if old_axes == [axis] and len(new_axes) == 1:
            bind = lambda x: find_primitive("reshape").bind(x, **params)
            sizes = [w.order.size if i == new_axes[0] else 1 for i in range(len(new))]
            order = jnp.reshape(w.order, sizes)
            return Permuted(redispatch(bind, w.array), order, new_axes[0] - len(new))
    return NotImplemented


@register("gather")
def _gather(w: Permuted, indices: ArrayLike, **params: Any) -> Any:
    """Rows that are looked up: whole along the axis, which is put in order."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    axis, order = w.ndim + w.axis, jnp.asarray(w.order)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axis in gone or sizes[axis] != w.shape[axis] or order.size != order.shape[axis]:
        return NotImplemented
    bind = lambda x, i: find_primitive("gather").bind(x, i, **params)
    rows = jnp.asarray(materialise_one(redispatch(bind, w.array, indices)))
    left = [i for i in range(w.ndim) if i not in gone]
    place = numbers.offset_dims[left.index(axis)]
    sizes = [order.size if i == place else 1 for i in range(rows.ndim)]
    return in_order(rows, order.reshape(sizes), place)
