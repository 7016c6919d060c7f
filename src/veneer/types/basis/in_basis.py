"""`InBasis`: an array stored in another basis along some axes, and its rules.

If `T` transforms an array into the basis, the dense array is `T.T @ stored`. A product that
contracts the axis transforms its other operand, `(x @ T.T) @ stored`. Other products transform
their result back.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.primitives.reshaping import reshape_groups
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._core.value import aval_of, materialise_one
from ..._jax.primitives import find_primitive

#: Maps axes of a stored array to the corresponding axes of an operand or a result.
Places = Mapping[int, int]


class InBasis(ImplicitArray, abstract=True):
    """An array stored as `array`, in another basis along some axes.

    Along such an axis, the dense array is `T.T @ array`, with an orthogonal or diagonal matrix `T`.
    A product that contracts the axis transforms its other operand instead of the array: `(T.T @
    array).T @ x` is `array.T @ (T @ x)`.
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)

    array: Any

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the axes along which `T` transforms the array, counted from the front.

        **Arguments:**

        - `batch`: the batch axes of a product. Each index of these axes can have its own `T`.

        **Returns:** a set of axes. None if the indices of an axis that is neither in this set nor
        in `batch` have different `T`, which the rules do not support.
        """
        raise NotImplementedError

    def into_basis(self, x: Any, places: Places) -> Any:
        """Transform an array into the basis, such as the operand of a product.

        **Arguments:**

        - `x`: a floating array, dense or implicit.
        - `places`: a dict from axes of this array to the corresponding axes of `x`.
        """
        raise NotImplementedError

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """Transform an array out of the basis, such as the result of a product.

        This is the transpose of `into_basis`, with the same arguments.
        """
        raise NotImplementedError

    def with_array(self, array: Any) -> Any:
        """Return a copy that stores `array`, which must already be in the basis."""
        return dataclasses.replace(self, array=array)

    def stored(self, dense: Any) -> Any:
        """Return the stored form of a dense array of the same shape."""
        return self.into_basis(dense, {axis: axis for axis in range(self.ndim)})

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> Any:
        """Return the result of a reshape, or None if the type cannot store the result.

        **Arguments:**

        - `array`: the field `array` of the result, in the new shape.
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


def align(leaf: ArrayLike, places: Places, ndim: int) -> jax.Array:
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


@register("dot_general")
def _(w: InBasis, x: ArrayLike, **params: Any) -> Any:
    return _dot_general(w, x, params, basis_first=True)


@register("dot_general")
def _(x: ArrayLike, w: InBasis, **params: Any) -> Any:
    return _dot_general(w, x, params, basis_first=False)


def _dot_general(w: InBasis, x: Any, params: dict[str, Any], *, basis_first: bool) -> Any:
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
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
    """Look up rows that are not sliced along transformed axes, and transform them back."""
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
