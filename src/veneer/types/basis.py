"""Arrays stored in another basis along some axes: `Permuted` and `Scaled`.

If a matrix `T` transforms an axis of an array into the basis, the dense array is `T.T @ stored`. A
product that contracts this axis transforms its other operand, `(x @ T.T) @ stored`. Other products
transform their result back. The rules are written for the base class, `InBasis`. `Rotated`, in the
module `rotated`, is another such type.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core.leaf_axes import LeafAxis, Movement, aligned_axes
from .._core.primitives.axes import DotDimensionNumbers, reshape_groups
from .._core.rules import register
from .._core.surface import Leaf, check_arrays
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import aval_of, materialise_one
from .._jax.primitives import find_primitive

#: Maps axes of a stored array to the corresponding axes of an operand or a result.
Places = Mapping[int, int]


class InBasis(ImplicitArray, abstract=True):
    """The base class of arrays that are stored in another basis along some axes.

    The field `array` has the stored array. Along such an axis, the dense array is `T.T @ array`,
    with an orthogonal or diagonal matrix `T`. A product that contracts the axis transforms its
    other operand instead of the stored array: `(T.T @ array).T @ x` is `array.T @ (T @ x)`.
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)

    array: Any

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the axes along which the array is transformed, counted from the front.

        **Arguments:**

        - `batch`: the batch axes of a product. Each index of these axes can have its own
          transformation.

        **Returns:** a set of axes. None if the transformation varies along an axis that is neither
        in this set nor in `batch`, which the rules do not support.
        """
        raise NotImplementedError

    def into_basis(self, x: Any, places: Places) -> Any:
        """Multiply `x` by the matrix `T` along the transformed axes.

        `x` is, for example, the other operand of a product that contracts these axes.

        **Arguments:**

        - `x`: a floating array, dense or implicit.
        - `places`: a dict from the axes of `self` to the corresponding axes of `x`.
        """
        raise NotImplementedError

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """Transform a dense array from the basis of this array back: the transpose of `into_basis`.

        `x` is, for example, the result of a product with this array, which keeps the transformed
        axes. `places` is the same as in `into_basis`.
        """
        raise NotImplementedError

    def with_array(self, array: Any) -> Any:
        """Return a copy with another field `array`, which must already be in the basis."""
        return dataclasses.replace(self, array=array)

    def stored(self, dense: Any) -> Any:
        """Transform a dense array of the same shape to the form that the field `array` stores."""
        return self.into_basis(dense, {axis: axis for axis in range(self.ndim)})

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> Any:
        """Return this array after a reshape, or None if the type cannot represent the result.

        **Arguments:**

        - `array`: the reshaped field `array`.
        - `groups`: pairs of a list of old axes and the list of new axes that they become. Axes of
          size 1 are left out.
        - `new`: the new shape.
        """
        raise NotImplementedError

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `array`."""
        return aval_of(self.array)

    def materialise(self) -> jax.Array:
        """Return the dense array."""
        dense = jnp.asarray(materialise_one(self.array))
        return self.out_of_basis(dense, {axis: axis for axis in range(self.ndim)})


def _align(leaf: ArrayLike, places: Places, ndim: int) -> jax.Array:
    """Transpose a leaf so that it broadcasts with an operand that has `ndim` axes.

    `places` maps axes of the leaf to axes of the operand. Other axes of the leaf have size 1.
    """
    leaf = jnp.asarray(leaf)
    ordered = sorted(places, key=lambda axis: places[axis])
    others = [axis for axis in range(leaf.ndim) if axis not in places]
    sizes = [1] * ndim
    for axis in ordered:
        sizes[places[axis]] = leaf.shape[axis]
    return leaf.transpose(*ordered, *others).reshape(sizes)


def _broadcasts_to(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether `sizes` is as long as `shape`, and each item is 1 or the item of `shape`."""
    pairs = zip(sizes, shape, strict=False)
    return len(sizes) == len(shape) and all(n in (1, size) for n, size in pairs)


def _axes_of_factor(leaf: Any, shape: tuple[int, ...]) -> list[LeafAxis]:
    """Return a `LeafAxis` per axis of a leaf that broadcasts to the shape of an array.

    Along axes where the leaf has size 1, all slices of the array share its entry.
    """
    return [
        axis if size == shape[axis.axis] else axis._replace(block="shared")
        for axis, size in zip(aligned_axes(len(shape)), leaf.shape, strict=True)
    ]


@register("dot_general")
def _(lhs: InBasis | ArrayLike, rhs: InBasis | ArrayLike, **params: Any) -> Any:
    basis_first = isinstance(lhs, InBasis)
    w: Any = lhs if basis_first else rhs
    x: Any = rhs if basis_first else lhs
    if isinstance(x, InBasis):
        return NotImplemented
    numbers = DotDimensionNumbers.from_lax(params["dimension_numbers"])
    (w_contracted, x_contracted), (w_batch, x_batch) = numbers if basis_first else numbers.swapped
    axes = w.basis_axes(w_batch)
    if axes is None or axes & {*w_batch} or params.get("out_sharding") is not None:
        return NotImplemented
    contracted, free = axes & {*w_contracted}, axes - {*w_contracted}
    if contracted and free:
        return NotImplemented
    if contracted:
        x_axes = dict(zip((*w_contracted, *w_batch), (*x_contracted, *x_batch), strict=True))
        x = w.into_basis(x, {axis: x_axes[axis] for axis in (*contracted, *w_batch)})
    dot = lambda lhs, rhs: find_primitive("dot_general").bind(lhs, rhs, **params)
    out = redispatch(dot, *((w.array, x) if basis_first else (x, w.array)))
    if contracted:
        return out
    # The result has batch axes, free axes of the first operand, free axes of the second operand.
    n_before = len(w_batch) if basis_first else jnp.ndim(x) - len(x_contracted)
    w_free = [axis for axis in range(w.ndim) if axis not in (*w_contracted, *w_batch)]
    places = {axis: i for i, axis in enumerate(w_batch)}
    return w.out_of_basis(out, places | {axis: n_before + w_free.index(axis) for axis in free})


@register("convert_element_type")
def _(w: InBasis, **params: Any) -> Any:
    if not jnp.issubdtype(params["new_dtype"], jnp.inexact):
        return NotImplemented
    convert = find_primitive("convert_element_type").bind
    return w.with_array(redispatch(lambda x: convert(x, **params), w.array))


@register("reshape")
def _(w: InBasis, **params: Any) -> Any:
    new = tuple(params["new_sizes"])
    if params["dimensions"] is not None or not w.size:
        return NotImplemented
    bind = lambda x: find_primitive("reshape").bind(x, **params)
    reshaped = w.regrouped(redispatch(bind, w.array), [*reshape_groups(w.shape, new)], new)
    return NotImplemented if reshaped is None else reshaped


@register("gather")
def _(w: InBasis, indices: ArrayLike, **params: Any) -> Any:
    """Look up rows of the stored array, and transform the rows back to the dense basis.

    Return NotImplemented if the rows are sliced along a transformed axis.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    axes = w.basis_axes()
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axes is None or axes & removed or any(sizes[axis] != w.shape[axis] for axis in axes):
        return NotImplemented
    # Rows out of bounds are transformed, too. Only zeros and NaN stay the same.
    if params["fill_value"] not in (None, 0):
        return NotImplemented
    look_up = lambda array, indices: find_primitive("gather").bind(array, indices, **params)
    rows = jnp.asarray(materialise_one(redispatch(look_up, w.array, indices)))
    left = [axis for axis in range(w.ndim) if axis not in removed]
    return w.out_of_basis(rows, {axis: int(numbers.offset_dims[left.index(axis)]) for axis in axes})


class Permuted(InBasis):
    """An array `[...]` whose slices along one axis are stored in another order.

    Along the axis, entry `order[k]` of the dense array is stored as entry `k` of `array`. GPTQ with
    `desc_act` (Frantar et al., arXiv 2210.17323) sorts the input channels of a weight by
    importance. Channels of similar importance then share a scale. Such a weight is a `Permuted` of
    a `QArray`.

    If a product contracts the permuted axis, the other operand is permuted, and then multiplied
    with `array`. If a product contracts other axes, the other operand is multiplied with `array`,
    and then the result is permuted.

    **Keeps the structure:** transposes, floating dtype conversions, and slices and reshapes along
    axes that are not permuted. Row lookups along another axis return dense rows in the original
    order.

    **Materializes:** elementwise functions, sums, and slices along the permuted axis.

    **Arguments:**

    - `array`: the stored array, of any shape and dtype, dense or implicit, such as a `QArray`.
    - `order`: an integer array with the rank of `array`. Along `axis` it must be a permutation,
      which is not checked. Along each other axis its size is 1 if all indices of that axis share
      the permutation. Otherwise it is the size of `array`.
    - `axis`: the permuted axis, a negative number; static.

    **Raises:**

    - `TypeError` if `array` or `order` is not an array, or `order` does not contain integers.
    - `ValueError` if `order` has another shape than stated above, or `axis` is not between
      `-array.ndim` and -1.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Permuted(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2, 0, 1]]))
    >>> w.materialise().tolist(), (jnp.array([10.0, 1.0, 0.1]) @ w.T).tolist()
    ([[2.0, 3.0, 1.0]], [23.1...])
    """

    array: Any
    order: jax.Array | np.ndarray
    axis: int = static(default=-1)

    def __post_init__(self) -> None:
        check_arrays(self, Leaf, "array", "order")
        shape, sizes = tuple(self.array.shape), tuple(self.order.shape)
        if not jnp.issubdtype(self.order.dtype, jnp.integer):
            raise TypeError(f"order must hold integers, not {self.order.dtype.name}")
        if not -len(shape) <= self.axis < 0:
            raise ValueError(
                f"axis must be negative, for an array of shape {shape}, not {self.axis}"
            )
        if not _broadcasts_to(sizes, shape) or sizes[self.axis] != shape[self.axis]:
            raise ValueError(
                f"order has shape {sizes}, but must have the rank of the array {shape}, its size "
                f"along axis {self.axis}, and 1 or its size along other axes"
            )

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return a set with the permuted axis. None if `order` varies along axes not in `batch`."""
        axis = self.ndim + self.axis
        varies = {i for i, n in enumerate(self.order.shape) if n != 1 and i != axis}
        return {axis} if varies <= {*batch} else None

    def into_basis(self, x: Any, places: Places) -> Any:
        order = _align(self.order, places, jnp.ndim(x))
        return _take(x, order, places[self.ndim + self.axis])

    def out_of_basis(self, x: Any, places: Places) -> Any:
        axis = places[self.ndim + self.axis]
        return _take(x, jnp.argsort(_align(self.order, places, jnp.ndim(x)), axis), axis)

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Permuted | None":
        """Return this array after a reshape, given the reshaped field `array`.

        Return None if the reshape splits or merges the permuted axis, or if `order` has more than
        one entry along another axis. The arguments are the same as in `InBasis.regrouped`.
        """
        if self.order.size != self.order.shape[self.axis]:
            return None
        for old_axes, (axis, *others) in groups:
            if old_axes == [self.ndim + self.axis] and not others:
                sizes = [self.order.size if i == axis else 1 for i in range(len(new))]
                return Permuted(array, jnp.reshape(self.order, sizes), axis - len(new))
        return None

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of each leaf. The permuted axis cannot be sliced."""
        leaves = aligned_axes(self.ndim), _axes_of_factor(self.order, self.shape)
        keep_whole = lambda x: x._replace(block="whole") if x.axis == self.axis else x
        return [[*map(keep_whole, axes)] for axes in leaves]

    def _moved(self, movement: Movement) -> Any:
        axis = movement.axes[self.axis]
        if axis is None:  # the permuted axis had size 1 and was removed
            return NotImplemented
        # Without the constructor: the leaves can be a PartitionSpec, which has no rank.
        new = object.__new__(Permuted)
        axis = int(axis) - len(movement.shape)
        new.__dict__.update(array=self.array, order=self.order, axis=axis)
        return new


def _take(x: Any, indices: jax.Array, axis: int) -> Any:
    """Take slices of `x` at indices along an axis. The indices can vary along other axes."""
    if indices.size == indices.shape[axis]:
        take = lambda x, i: jnp.take(x, i, axis, mode="clip", unique_indices=True)
        return redispatch(take, x, indices.reshape(-1))
    take_along_axis = lambda x, i: jnp.take_along_axis(x, i, axis, mode="clip")
    return redispatch(take_along_axis, x, indices)


class Scaled(InBasis):
    """An array `array * factor`, stored as `array` and a factor per channel.

    If a product contracts the channel axis, along which `factor` varies, the other operand is
    multiplied by `factor`, and then multiplied with `array`. Otherwise the other operand is
    multiplied with `array`, and then the result is multiplied by `factor`. Two calibration methods
    use this. AWQ (Lin et al., arXiv 2306.00978) scales up the channels with large activations
    before it rounds the weight, so the rounding errors of these channels are smaller. SmoothQuant
    (Xiao et al., arXiv 2211.10438) divides large activations by a factor, and multiplies their
    weights by the same factor.

    **Keeps the structure:** transposes, slices, reshapes, row lookups, and floating dtype
    conversions.

    **Materializes:** elementwise functions and sums.

    **Arguments:**

    - `array`: a floating array of any shape, dense or implicit, such as a `QArray`.
    - `factor`: a floating array with the rank of `array`. Along each axis, its size is 1 or the
      size of `array`.

    **Raises:**

    - `TypeError` if `array` or `factor` is not a floating array.
    - `ValueError` if `factor` has another shape than stated above.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Scaled(jnp.ones((3, 2)), jnp.array([[1.0], [10.0], [100.0]]))
    >>> (jnp.array([1.0, 2.0, 3.0]) @ w).tolist()
    [321.0, 321.0]
    """

    trainable: ClassVar[tuple[str, ...] | None] = ("array", "factor")

    array: Any
    factor: jax.Array | np.ndarray

    def __post_init__(self) -> None:
        check_arrays(self, Leaf, "array", "factor")
        shape, sizes = tuple(self.array.shape), tuple(self.factor.shape)
        for name in ("array", "factor"):
            dtype = getattr(self, name).dtype
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(f"{name} must be floating, not {dtype.name}")
        if not _broadcasts_to(sizes, shape):
            raise ValueError(
                f"factor has shape {sizes}, but must have the rank of the array {shape}, and "
                "along each axis its size or 1"
            )

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the axes outside of `batch` along which `factor` has more than one entry."""
        return {i for i, n in enumerate(self.factor.shape) if n != 1 and i not in batch}

    def into_basis(self, x: Any, places: Places) -> Any:
        multiply = lambda x, factor: (x * factor).astype(x.dtype)
        return redispatch(multiply, x, _align(self.factor, places, jnp.ndim(x)))

    def out_of_basis(self, x: Any, places: Places) -> Any:
        return self.into_basis(x, places)

    def stored(self, dense: Any) -> Any:
        """Divide a dense array by the factors."""
        return (dense / self.factor).astype(dense.dtype)

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Scaled":
        """Return this array after a reshape, given the reshaped field `array`.

        If axes are split or merged, and `factor` has several entries along one of them, `factor` is
        first broadcast to the sizes of these axes. The arguments are the same as in
        `InBasis.regrouped`.
        """
        sizes, broadcast = [1] * len(new), list(self.factor.shape)
        for old_axes, new_axes in groups:
            if math.prod(broadcast[axis] for axis in old_axes) != 1:
                for axis in old_axes:
                    broadcast[axis] = self.shape[axis]
                for axis in new_axes:
                    sizes[axis] = new[axis]
        return Scaled(array, jnp.broadcast_to(self.factor, broadcast).reshape(sizes))

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of each leaf.

        A slice of the array slices `factor` too, except along axes where `factor` has size 1.
        """
        return [aligned_axes(self.ndim), _axes_of_factor(self.factor, self.shape)]

    def _moved(self, movement: Movement) -> "Scaled":
        # Metadata of the array in the field, such as the format of a `QArray`, has no axes.
        return self
