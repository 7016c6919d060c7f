"""`InBasis`: an array whose entries along some axes are stored in another basis, and its rules.

With T for what takes an array into the basis, the array is `T.T @ stored`. So a product that sums
over the axis takes its other operand into the basis, `x @ T.T @ stored`, and one that does not
takes its result back.
"""

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
from ..._core.value import Value, materialise_one
from ..._jax.primitives import find_primitive

#: For axes of an array, those of another operand or of a result that go with them.
Places = Mapping[int, int]


class InBasis(ImplicitArray, abstract=True):
    """An array stored as `array`, in another basis along some axes."""

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)

    array: Any

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the axes along which the basis differs, counted from the front.

        **Arguments:**

        - `batch`: the axes that are batch axes of a product, along which the basis may vary.

        **Returns:** a set of axes, or None if the basis varies along an axis outside of `batch`.
        """
        raise NotImplementedError

    def into_basis(self, x: Any, places: Places) -> Any:
        """Transform a floating array `x` into the basis.

        **Arguments:**

        - `x`: a floating array, dense or implicit.
        - `places`: maps axes of this array to axes of `x`.
        """
        raise NotImplementedError

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """Transform a floating array `x` out of the basis: the transpose of `into_basis`.

        **Arguments:**

        - `x`: a floating array, dense or implicit.
        - `places`: maps axes of this array to axes of `x`.
        """
        raise NotImplementedError

    def with_array(self, array: Any) -> Any:
        """Return a copy with another stored array of the same shape."""
        raise NotImplementedError

    def stored(self, dense: Any) -> Any:
        """Return the stored form of a dense array of the same shape."""
        raise NotImplementedError

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> Any:
        """Reshape this array, or return None if the reshape would materialize it.

        **Arguments:**

        - `array`: the stored array, which is already reshaped.
        - `groups`: pairs of a list of old axes and the list of new axes that they become. Axes of
          size 1 are left out.
        - `new`: the new shape.
        """
        raise NotImplementedError

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `array`."""
        return self.array.aval() if isinstance(self.array, Value) else jax.typeof(self.array)

    def materialise(self) -> jax.Array:
        """Return the dense array."""
        dense = jnp.asarray(materialise_one(self.array))
        return self.out_of_basis(dense, {axis: axis for axis in range(self.ndim)})


def alongside(leaf: ArrayLike, places: Places, ndim: int) -> jax.Array:
    """Returns a leaf, of the rank of its array, with the axes of another operand of `ndim`.

    Those that have no place are of size 1.
    """
    leaf = jnp.asarray(leaf)
    ordered = sorted(places, key=lambda axis: places[axis])
    others = [axis for axis in range(leaf.ndim) if axis not in places]
    sizes = [1] * ndim
    for axis in ordered:
        sizes[places[axis]] = leaf.shape[axis]
    return leaf.transpose(*ordered, *others).reshape(sizes)


def _dot_general(w: InBasis, x: Any, params: dict[str, Any], *, first: bool) -> Any:
    """The product of w, which is the first operand or the second, with x."""
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    (of_w, of_x), (batch_w, batch_x) = numbers if first else numbers.swapped
    axes = w.basis_axes(batch_w)
    if axes is None or axes & {*batch_w} or params.get("out_sharding") is not None:
        return NotImplemented
    summed, left = axes & {*of_w}, axes - {*of_w}
    if summed and left:
        return NotImplemented
    bind = lambda a, b: find_primitive("dot_general").bind(a, b, **params)
    if summed:
        place = dict(zip((*of_w, *batch_w), (*of_x, *batch_x), strict=True))
        x = w.into_basis(x, {axis: place[axis] for axis in (*summed, *batch_w)})
        return redispatch(bind, *((w.array, x) if first else (x, w.array)))
    out = redispatch(bind, *((w.array, x) if first else (x, w.array)))
    before = len(batch_w) + (0 if first else jnp.ndim(x) - len(of_x) - len(batch_x))
    free = [axis for axis in range(w.ndim) if axis not in of_w and axis not in batch_w]
    places = {axis: i for i, axis in enumerate(batch_w)}
    return w.out_of_basis(out, places | {axis: before + free.index(axis) for axis in left})


@register("dot_general")
def _in_basis_first(w: InBasis, x: ArrayLike, **params: Any) -> Any:
    return _dot_general(w, x, params, first=True)


@register("dot_general")
def _in_basis_second(x: ArrayLike, w: InBasis, **params: Any) -> Any:
    return _dot_general(w, x, params, first=False)


@register("convert_element_type")
def _convert_element_type(w: InBasis, **params: Any) -> Any:
    if not jnp.issubdtype(params["new_dtype"], jnp.inexact):
        return NotImplemented
    convert = find_primitive("convert_element_type").bind
    return w.with_array(redispatch(lambda x: convert(x, **params), w.array))


@register("reshape")
def _reshape(w: InBasis, **params: Any) -> Any:
    """Of other axes, as where outputs are split into heads."""
    new = tuple(params["new_sizes"])
    if params["dimensions"] is not None or not w.size:
        return NotImplemented
    bind = lambda x: find_primitive("reshape").bind(x, **params)
    moved = w.regrouped(redispatch(bind, w.array), [*reshape_groups(w.shape, new)], new)
    return NotImplemented if moved is None else moved


@register("gather")
def _gather(w: InBasis, indices: ArrayLike, **params: Any) -> Any:
    """Rows that are looked up: whole along the axes, which are taken out of the basis."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    axes = w.basis_axes()
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axes is None or axes & gone or any(sizes[axis] != w.shape[axis] for axis in axes):
        return NotImplemented
    # What is out of bounds is taken out of the basis with the rest: of what fills it, zeros and NaN
    # alone are the same there.
    if params["fill_value"] not in (None, 0):
        return NotImplemented
    bind = lambda x, i: find_primitive("gather").bind(x, i, **params)
    rows = jnp.asarray(materialise_one(redispatch(bind, w.array, indices)))
    left = [axis for axis in range(w.ndim) if axis not in gone]
    place = lambda axis: int(numbers.offset_dims[left.index(axis)])
    return w.out_of_basis(rows, {axis: place(axis) for axis in axes})
