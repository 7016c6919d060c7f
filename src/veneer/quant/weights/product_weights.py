"""`ProductWeight`, the base class of weights with their own rules for products.

A product weight consists of the weight and its *companions*: arrays that describe the weight along
some of its axes, such as the scales of activations. A companion has the rank of the weight. The
size of each of its axes is 1 or the size in the weight.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ..._core.leaf_axes import LeafAxis, Movement, aligned_axes
from ..._core.primitives.reshaping import reshape_groups
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._core.value import Value
from ..._jax.primitives import Primitive, find_primitive
from ..formats.tiles import Leaf, Shape

#: The factors of an axis as pairs (origin, size), the slowest-varying first. The origin is a set of
#: axes of the weight, or a bool: whether the factor is contracted.
Factors = tuple[tuple[Any, int], ...]


def reshape_factors(factors: Sequence[Factors], old: Shape, new: Shape) -> list[Factors]:
    """Return the factors of each axis after a reshape.

    An axis of size 1 has no factors. If a new axis would split a factor unevenly, or if a size is
    symbolic, that axis and the later axes of its reshape group each get one factor. Its origin is
    the union of all origins in the group.

    **Arguments:**

    - `factors`: the factors of each axis of `old`. Origins are sets or bools, combined by `|`.
    - `old`, `new`: the shape before and after the reshape.

    >>> k, n = frozenset("k"), frozenset("n")
    >>> reshape_factors([((k, 64),), ((n, 32),)], (64, 32), (16, 128))[0]
    ((frozenset({'k'}), 16),)
    """
    result: list[Factors] = [()] * len(new)
    for old_axes, new_axes in reshape_groups(old, new):
        left = [factor for axis in old_axes for factor in factors[axis]]
        union = functools.reduce(operator.or_, (origin for origin, _ in left))
        for axis in new_axes:
            taken = _take_factors(left, new[axis])
            result[axis] = ((union, new[axis]),) if taken is None else taken
    return result


def _have_size(factors: Factors, size: int) -> bool:
    return bool(factors) and math.prod(n for _, n in factors) == size


def _take_factors(left: list[tuple[Any, int]], size: int) -> Factors | None:
    """Remove the first factors of `left` whose product is `size`, and return them.

    Return None and clear `left` if this would split a factor unevenly, or if a size is symbolic.
    """
    taken: list[tuple[Any, int]] = []
    while left and isinstance(size, int) and isinstance(left[0][1], int) and size > 1:
        origin, n = left.pop(0)
        part = math.gcd(n, size)
        if part not in (n, size):
            break
        size //= part
        if part < n:
            left.insert(0, (origin, n // part))
        if taken and taken[-1][0] == origin:
            part *= taken.pop()[1]
        taken.append((origin, part))
    if size == 1:
        return tuple(taken)
    left.clear()
    return None


class ProductWeight(ImplicitArray, abstract=True):
    """A weight, dense or implicit, with its own rules for products.

    Subclasses have the fields `array`, their companions, `contracting` and `factors`. `contracting`
    holds the axes that products with activations contract, counted from the end. A product that
    contracts other axes belongs to a derivative: its other operand is a cotangent. Transposes,
    reshapes and slices keep the type. All other primitives act on `array`.
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)
    default_precedence: ClassVar[int] = 2
    is_label: ClassVar[bool | None] = False
    #: The names of the fields that are companions; each may be None.
    companions: ClassVar[tuple[str, ...]] = ()

    array: Any
    contracting: tuple[int, ...]
    #: The factors of each axis, whose origins say whether they are contracted. None if no axis
    #: mixes contracted and other factors.
    factors: tuple[Factors, ...] | None

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `array`."""
        return self.array.aval() if isinstance(self.array, Value) else jax.typeof(self.array)

    def materialise(self) -> Any:
        """Return the weight, which can be an implicit array."""
        return self.array

    def partition(self, spec: PartitionSpec, shape: Shape) -> Any:
        """Partition the weight by `spec`, and each companion along its axes of size above 1."""
        array = self.array.partition(spec, shape) if isinstance(self.array, Value) else spec
        if array is None:
            return None

        specs = {}
        for name, leaf in self._companions().items():
            pairs = zip(spec, leaf.shape, strict=True)
            specs[name] = PartitionSpec(*(None if n == 1 else entry for entry, n in pairs))
        return self.changed(array=array, **specs)

    def leaf_axes(self) -> list[Sequence[LeafAxis]]:
        """Return the axes of each leaf. A companion of size 1 is shared along the whole axis."""
        axes, shape = aligned_axes(self.ndim), self.shape
        all_axes: list[Sequence[LeafAxis]] = [axes]
        for leaf in self._companions().values():
            pairs = zip(axes, leaf.shape, strict=True)
            shared = [a if n == shape[a.axis] else a._replace(block="shared") for a, n in pairs]
            all_axes.append(shared)
        return all_axes

    def _moved(self, movement: Movement) -> Any:
        """Return the weight with `contracting` and `factors` updated, after its leaves moved."""
        before = len(movement.axes)
        places = [() if i is None else (int(i),) for i in movement.axes]
        new = self.with_axes(places, movement.shape)
        swapped = (*range(before - 2), before - 1, before - 2)
        return new.turned_over() if movement.axes == swapped else new

    def changed(self, **changes: Any) -> Any:
        """Return a copy in which some fields have new values, without checks."""
        new = object.__new__(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(new, field.name, changes.get(field.name, getattr(self, field.name)))
        return new

    def with_axes(self, places: Sequence[Sequence[int]], shape: Shape) -> Any:
        """Return the weight with `contracting` and `factors` updated to moved axes.

        **Arguments:**

        - `places`: for each old axis, the new axes that replace it, counted from the front.
        - `shape`: the new shape. An axis of another size has lost its factors.
        """
        ndim = len(shape)
        axes = [i - ndim for axis in self.contracting for i in places[axis]]
        factors: list[Factors] = [()] * ndim
        for axis, new in enumerate(places):
            of_axis = self._factors_of(axis, len(places))
            for i in new:
                factors[i] = of_axis if _have_size(of_axis, shape[i]) else ()
        return self.changed(
            contracting=tuple(dict.fromkeys(axes)), factors=tuple(factors) if any(factors) else None
        )

    def with_reshaped_axes(self, sizes: Shape) -> Any:
        """Return the weight with `contracting` and `factors` updated to a reshape to `sizes`."""
        old: list[Factors] = []
        for axis, size in enumerate(self.shape):
            factors = self._factors_of(axis, self.ndim)
            if not _have_size(factors, size):
                factors = ((axis - self.ndim in self.contracting, size),)
            old.append(factors)
        new = reshape_factors(old, self.shape, sizes)
        kinds = [{is_contracted for is_contracted, _ in factors} for factors in new]
        axes = tuple(axis - len(kinds) for axis, of_axis in enumerate(kinds) if True in of_axis)
        is_mixed = any(len(of_axis) > 1 for of_axis in kinds)
        return self.changed(contracting=axes, factors=tuple(new) if is_mixed else None)

    def _factors_of(self, axis: int, ndim: int) -> Factors:
        # Axes of a stack are added and removed at the front, so factors are counted from the end.
        index = len(self.factors or ()) - ndim + axis
        return self.factors[index] if self.factors and index >= 0 else ()

    def turned_over(self) -> Any:
        """Return the weight after a swap of its last two axes. Subclasses can record the swap."""
        return self

    def sums_over(self, axes: Sequence[int]) -> bool:
        """Return whether a product contracts all axes of `contracting`.

        Return False within a user's `custom_jvp` rule, where the other operand may be a tangent.

        **Arguments:**

        - `axes`: the axes of this weight that the product contracts, counted from the front.
        """
        contracting = {axis + self.ndim for axis in self.contracting}
        return bool(contracting) and contracting <= set(axes) and not may_be_tangents()

    def _companions(self) -> dict[str, Leaf]:
        leaves = {name: getattr(self, name) for name in self.companions}
        return {name: leaf for name, leaf in leaves.items() if leaf is not None}

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Apply a primitive that has no rule to the arrays of the weights."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        return redispatch(bind, *(x.array if isinstance(x, ProductWeight) else x for x in values))


# Rules for the primitives that leaf axes do not cover.


def _broadcast(w: ProductWeight, leaf: Leaf) -> jax.Array:
    return jnp.broadcast_to(leaf, w.shape)


@register("convert_element_type")
def _convert_element_type(w: ProductWeight, **params: Any) -> Any:
    if not jnp.issubdtype(params["new_dtype"], jnp.floating):
        return NotImplemented
    convert = partial(find_primitive("convert_element_type").bind, **params)
    return w.changed(array=redispatch(convert, w.array))


@register("gather")
def _gather(w: ProductWeight, indices: ArrayLike, **params: Any) -> Any:
    """Select one weight of a stack by a single index. Looked-up rows become plain arrays."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(w.ndim) if axis not in removed]
    gather = partial(find_primitive("gather").bind, **params)
    array = redispatch(gather, w.array, indices)
    takes_whole_axes = all(sizes[axis] == w.shape[axis] for axis in kept)
    if jnp.ndim(indices) != 1 or len(kept) < 2 or not takes_whole_axes:
        return array
    leaves = {k: gather(_broadcast(w, leaf), indices) for k, leaf in w._companions().items()}
    places = [(kept.index(axis),) if axis in kept else () for axis in range(w.ndim)]
    return w.with_axes(places, array.shape).changed(array=array, **leaves)


@register("reshape")
def _reshape(w: ProductWeight, **params: Any) -> Any:
    sizes, order = params["new_sizes"], params["dimensions"]
    if params["sharding"] is not None or w.size == 0:
        return NotImplemented
    if order is not None:
        w = redispatch(lambda w: lax.transpose(w, order), w)
        params |= {"dimensions": None}
    leaves = {}
    for name, leaf in w._companions().items():
        if leaf.size == 1:  # Keep one entry per matrix.
            shape = (*sizes[:-2], *(1 for _ in sizes[-2:]))
            leaves[name] = jnp.broadcast_to(jnp.reshape(leaf, ()), shape)
        else:
            leaves[name] = lax.reshape(_broadcast(w, leaf), sizes)
    array = redispatch(partial(find_primitive("reshape").bind, **params), w.array)
    return w.with_reshaped_axes(sizes).changed(array=array, **leaves)


@register("concatenate")
def _concatenate(*operands: ProductWeight, dimension: Any) -> Any:
    """Concatenate weights with equal static fields, such as the query, key and value weights."""

    def concatenate(*leaves: Leaf) -> jax.Array:
        others = [(*x.shape[:dimension], 1, *x.shape[dimension + 1 :]) for x in leaves]
        sizes = list(np.broadcast_shapes(*others))
        parts = []
        for leaf, w in zip(leaves, operands, strict=True):
            sizes[dimension] = w.shape[dimension]
            parts.append(jnp.broadcast_to(leaf, sizes))
        return lax.concatenate(parts, dimension)

    return _combine(operands, lambda *xs: lax.concatenate(xs, dimension), concatenate)


@register("select_n")
def _select(which: ArrayLike, *cases: ProductWeight) -> Any:
    """Select between weights of one kind, as `vmap` of `cond` does with a weight and itself."""
    select = partial(lax.select_n, which)
    return _combine(cases, select, lambda *leaves: select(*map(_broadcast, cases, leaves)))


def _combine(
    weights: Sequence[ProductWeight], combine: Callable, combine_companions: Callable[..., Any]
) -> Any:
    """Combine weights with equal static fields into one. Factors are lost if they differ."""
    first = weights[0]
    if any(_static_fields(w) != _static_fields(first) for w in weights):
        return NotImplemented
    array = redispatch(combine, *(w.array for w in weights))
    companions: dict[str, Any] = {
        name: combine_companions(*(getattr(w, name) for w in weights))
        for name in first._companions()
    }
    new = first
    if array.shape != first.shape:
        new = first.with_axes([(axis,) for axis in range(first.ndim)], array.shape)
    if any(w.factors != first.factors for w in weights):
        companions["factors"] = None
    return new.changed(array=array, **companions)


def _static_fields(w: ProductWeight) -> Any:
    names = [f.name for f in dataclasses.fields(w) if f.metadata.get("static")]
    values = [getattr(w, name) for name in names if name != "factors"]
    return type(w), values, tuple(w._companions())
