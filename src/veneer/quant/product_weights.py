"""`ProductWeight`, the base class of weights with their own rules for products."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .._core.leaf_axes import LeafAxis, Movement, aligned_axes
from .._core.primitives.axes import Axes, reshape_groups
from .._core.primitives.scopes import may_be_tangents
from .._core.rules import register
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.value import Value
from .._jax.primitives import Primitive, find_primitive
from .formats.tiles import Leaf, Shape

#: The names of the primitives that are products.
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def product_axes(
    primitive: str, params: Mapping[str, Any]
) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """Return `((lhs contracted, rhs contracted), (lhs batch, rhs batch))`: the axes of a product.

    **Arguments:**

    - `primitive`: a name in `PRODUCTS`. A convolution contracts the spatial axes and, as the last
      axis, the input features. It has no batch axes.
    - `params`: the parameters of the primitive.
    """
    if primitive == "ragged_dot_general":
        return params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    numbers = params["dimension_numbers"]
    if primitive == "dot_general":
        return numbers
    lhs, rhs = ((*space, features) for _, features, *space in numbers[:2])
    return (lhs, rhs), ((), ())


#: The axes that reshapes merged into an axis, as pairs (origin, size), slowest-varying first. The
#: origin is a set of axes of the original weight, or a bool: whether products contract the axis.
Factors = tuple[tuple[Any, int], ...]


def reshape_factors(factors: Sequence[Factors], old: Shape, new: Shape) -> list[Factors]:
    """Return the factors of each axis of an array after a reshape.

    A factor is a smaller axis that a reshape merged into an axis. It is a pair `(origin, size)`.
    The caller chooses the origins, which are sets or bools, to track where an axis comes from. An
    axis of size 1 has no factors. If a size is symbolic, or the boundaries of old factors and new
    axes do not match, a new axis is a single factor, whose origin is the union (`|`) of the origins
    of all axes that are merged.

    **Arguments:**

    - `factors`: for each axis of `old`, a tuple of its factors, the slowest-varying first.
    - `old`, `new`: the shape before and after the reshape.

    >>> k, n = frozenset("k"), frozenset("n")
    >>> reshape_factors([((k, 64),), ((n, 32),)], (64, 32), (16, 128))[0]
    ((frozenset({'k'}), 16),)
    """
    result: list[Factors] = [()] * len(new)
    for old_axes, new_axes in reshape_groups(old, new):
        remaining = [factor for axis in old_axes for factor in factors[axis]]
        united_origin = functools.reduce(operator.or_, (origin for origin, _ in remaining))
        for axis in new_axes:
            taken = _take_factors(remaining, new[axis])
            result[axis] = ((united_origin, new[axis]),) if taken is None else taken
    return result


def _have_size(factors: Factors, size: int) -> bool:
    return bool(factors) and math.prod(n for _, n in factors) == size


def _take_factors(remaining: list[tuple[Any, int]], size: int) -> Factors | None:
    """Remove the first factors from `remaining`, and return them. Their sizes multiply to `size`.

    If the sizes do not match, the last factor that is removed is split in two. If it cannot be
    split, or a size is symbolic, clear `remaining` and return None. A factor is as in
    `reshape_factors`.
    """
    taken: list[tuple[Any, int]] = []
    while remaining and isinstance(size, int) and isinstance(remaining[0][1], int) and size > 1:
        origin, factor_size = remaining.pop(0)
        part = math.gcd(factor_size, size)
        if part not in (factor_size, size):
            break  # neither size divides the other
        size //= part
        if part < factor_size:
            remaining.insert(0, (origin, factor_size // part))
        if taken and taken[-1][0] == origin:  # join factors with the same origin
            part *= taken.pop()[1]
        taken.append((origin, part))
    if size == 1:
        return tuple(taken)
    remaining.clear()
    return None


class ProductWeight(ImplicitArray, abstract=True):
    """A base class of weights, dense or implicit, whose class has rules for products.

    An example is `ActivationQuantized`, whose products quantize the other operand.
    Products with activations contract the axes in `contracting`, which are counted from the end. If
    a product contracts other axes, it is part of a derivative, and multiplies by a cotangent.
    Transposes, reshapes and slices keep the class. All other primitives are applied to `array`.

    A subclass declares the fields `array`, `contracting`, `factors` (see below) and its companions:
    arrays with the rank of the weight that describe it, such as scales. Each axis of a companion
    has size 1 or the size of the weight's axis.
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("array",)
    default_precedence: ClassVar[int] = 2
    is_label: ClassVar[bool | None] = False
    #: The names of the fields that hold companions. Each field may be None.
    companions: ClassVar[tuple[str, ...]] = ()

    array: Any
    contracting: tuple[int, ...]
    #: For each axis, the axes that reshapes merged into it, as pairs: whether products contract the
    #: merged axis, and its size. None if no axis is merged from contracted and other axes.
    factors: tuple[Factors, ...] | None

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `array`."""
        return self.array.aval() if isinstance(self.array, Value) else jax.typeof(self.array)

    def materialise(self) -> Any:
        """Return `array`, which can be an implicit array."""
        return self.array

    def partition(self, spec: PartitionSpec, shape: Shape) -> Any:
        """Return a weight with the `PartitionSpec` of each leaf in place of the leaf.

        `spec` and `shape` are as in `Value.partition`. A companion is replicated along axes of size
        1. Return None if `array` is an implicit array that cannot be sharded like the dense array.
        """
        array = self.array.partition(spec, shape) if isinstance(self.array, Value) else spec
        if array is None:
            return None
        specs = {}
        for name, leaf in self._companions().items():
            pairs = zip(spec, leaf.shape, strict=True)
            specs[name] = PartitionSpec(*(None if n == 1 else entry for entry, n in pairs))
        return self.changed(array=array, **specs)

    def leaf_axes(self) -> list[Sequence[LeafAxis]]:
        """Return a list of `vn.LeafAxis` for `array` and for each companion.

        In a companion, all slices of the weight share the entry of an axis of size 1.
        """
        axes, shape = aligned_axes(self.ndim), self.shape
        align = lambda n, size, axis: axis if n == size else LeafAxis(axis.axis, "shared")
        leaves = self._companions().values()
        return [axes, *([*map(align, leaf.shape, shape, axes)] for leaf in leaves)]

    def _moved(self, movement: Movement) -> Any:
        """Return a copy with new `contracting` and `factors`, after a primitive moved the axes.

        `movement` describes the primitive, such as `transpose`, which was applied to the leaves.
        """
        ndim = len(movement.axes)
        places = [() if axis is None else (int(axis),) for axis in movement.axes]
        new = self.with_axes(places, movement.shape)
        swaps_last_two = movement.axes == (*range(ndim - 2), ndim - 1, ndim - 2)
        return new.turned_over() if swaps_last_two else new

    def changed(self, **changes: Any) -> Any:
        """Return a copy in which some fields have new values, without checks."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__ | changes)
        return new

    def with_axes(self, places: Sequence[Sequence[int]], shape: Shape) -> Any:
        """Return the weight with `contracting` and `factors` updated for new positions of its axes.

        **Arguments:**

        - `places`: for each old axis, the new axes that replace it, counted from the front.
        - `shape`: the new shape. An axis whose size changed loses its factors.
        """
        contracting: list[int] = []
        new_factors: list[Factors] = [()] * len(shape)
        for axis, new_axes in enumerate(places):
            factors = self._factors_of(axis, len(places))
            for new_axis in new_axes:
                new_factors[new_axis] = factors if _have_size(factors, shape[new_axis]) else ()
        for axis in self.contracting:
            contracting += [new_axis - len(shape) for new_axis in places[axis]]
        return self.changed(
            contracting=tuple(dict.fromkeys(contracting)),  # without duplicates
            factors=tuple(new_factors) if any(new_factors) else None,
        )

    def with_reshaped_axes(self, sizes: Shape) -> Any:
        """Return the weight with `contracting` and `factors` updated for a reshape to `sizes`."""
        old_factors: list[Factors] = []
        for axis, size in enumerate(self.shape):
            factors = self._factors_of(axis, self.ndim)
            is_contracted = axis - self.ndim in self.contracting
            old_factors.append(factors if _have_size(factors, size) else ((is_contracted, size),))
        new_factors = reshape_factors(old_factors, self.shape, sizes)
        # The origins are bools. An axis is contracted if any of its factors is.
        origins = [{origin for origin, _ in factors} for factors in new_factors]
        contracting = tuple(i - len(sizes) for i, bools in enumerate(origins) if True in bools)
        is_mixed = any(len(bools) > 1 for bools in origins)
        all_factors = tuple(new_factors) if is_mixed else None
        return self.changed(contracting=contracting, factors=all_factors)

    def _factors_of(self, axis: int, ndim: int) -> Factors:
        """Return the entry of `factors` for an axis of a weight of rank `ndim`, or () without one.

        `axis` is counted from the front.
        `vmap` and `scan` add and remove axes at the front without updating `factors`. For this
        reason, match entries and axes from the end.
        """
        index = len(self.factors or ()) - ndim + axis
        return self.factors[index] if self.factors and index >= 0 else ()

    def turned_over(self) -> Any:
        """Return this weight after a transpose that swapped its last two axes.

        A subclass overrides this method to record the swap.
        """
        return self

    def sums_over(self, axes: Sequence[int]) -> bool:
        """Return whether a product that contracts `axes` multiplies this weight by activations.

        That is True if `axes` include all axes in `contracting`. Other products are part of a
        derivative. The result is False in a user's `custom_jvp` rule, where the other operand of
        the product can be a tangent, and if `contracting` is empty.

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
        """Apply a primitive that has no rule, with the `array` of each weight as operand."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        return redispatch(bind, *(x.array if isinstance(x, ProductWeight) else x for x in values))


# The rules below are for primitives that Veneer cannot derive from `leaf_axes`.


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
    """Select one weight of a stack, such as a layer, and return it with its type and companions.

    Companions are arrays that describe the weight, such as scales (see `ProductWeight`).
    For other look-ups, such as embedding rows, return only the rows of `array`.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(w.ndim) if axis not in removed]
    gather = partial(find_primitive("gather").bind, **params)
    array = redispatch(gather, w.array, indices)
    takes_whole_axes = all(sizes[axis] == w.shape[axis] for axis in kept)
    has_one_index = jnp.ndim(indices) == 1
    if not has_one_index or len(kept) < 2 or not takes_whole_axes:
        return array
    # The slice sizes in `params` are for the shape of the weight, so broadcast companions to it.
    leaves = {k: gather(_broadcast(w, leaf), indices) for k, leaf in w._companions().items()}
    new_axes = [(kept.index(axis),) if axis in kept else () for axis in range(w.ndim)]
    return w.with_axes(new_axes, array.shape).changed(array=array, **leaves)


@register("reshape")
def _reshape(w: ProductWeight, **params: Any) -> Any:
    sizes, order = params["new_sizes"], params["dimensions"]
    if params["sharding"] is not None or w.size == 0:
        return NotImplemented
    if order is not None:  # `lax.reshape` transposes its operand first
        w = redispatch(lambda w: lax.transpose(w, order), w)
        params |= {"dimensions": None}
    leaves = {}
    for name, leaf in w._companions().items():
        if leaf.size == 1:
            # Repeat the entry along the leading axes, so that a matrix of a stack can be selected.
            shape = (*sizes[:-2], *(1 for _ in sizes[-2:]))
            leaves[name] = jnp.broadcast_to(jnp.reshape(leaf, ()), shape)
        else:
            leaves[name] = lax.reshape(_broadcast(w, leaf), sizes)
    array = redispatch(partial(find_primitive("reshape").bind, **params), w.array)
    return w.with_reshaped_axes(sizes).changed(array=array, **leaves)


@register("concatenate")
def _concatenate(*operands: ProductWeight, dimension: Any) -> Any:
    """Concatenate weights, such as query, key and value weights, into one weight.

    Return NotImplemented, which concatenates only the `array` fields, if static fields differ.
    """

    def concatenate_companions(*leaves: Leaf) -> jax.Array:
        # Companions can have size 1 along any axis. Along `dimension`, each gets the size of its
        # weight. Along other axes, all get the same size.
        other_sizes = [(*x.shape[:dimension], 1, *x.shape[dimension + 1 :]) for x in leaves]
        sizes = list(np.broadcast_shapes(*other_sizes))
        parts = []
        for leaf, w in zip(leaves, operands, strict=True):
            sizes[dimension] = w.shape[dimension]
            parts.append(jnp.broadcast_to(leaf, sizes))
        return lax.concatenate(parts, dimension)

    concatenate = lambda *arrays: lax.concatenate(arrays, dimension)
    return _combine(operands, concatenate, concatenate_companions)


@register("select_n")
def _select(which: ArrayLike, *cases: ProductWeight) -> Any:
    """Select between weights. For example, `vmap` of `cond` selects between a weight and itself.

    Return NotImplemented, which selects between the `array` fields, if static fields differ.
    """
    select = partial(lax.select_n, which)
    return _combine(cases, select, lambda *leaves: select(*map(_broadcast, cases, leaves)))


def _combine(
    weights: Sequence[ProductWeight], combine: Callable, combine_companions: Callable[..., Any]
) -> Any:
    """Combine weights into one, whose field `array` is `combine(*arrays)`.

    Each companion, such as the scale, becomes `combine_companions(*companions)`. The result has no
    `factors` if they differ between the weights. Return NotImplemented, which tells the dispatch of
    `vn.implicit` to use the `array` fields, if other static fields differ.
    """
    first = weights[0]
    if any(_static_fields(w) != _static_fields(first) for w in weights):
        return NotImplemented
    changes: dict[str, Any] = {
        name: combine_companions(*(getattr(w, name) for w in weights))
        for name in first._companions()
    }
    changes["array"] = redispatch(combine, *(w.array for w in weights))
    if any(w.factors != first.factors for w in weights):
        changes["factors"] = None
    new = first
    if changes["array"].shape != first.shape:
        new = first.with_axes([(axis,) for axis in range(first.ndim)], changes["array"].shape)
    return new.changed(**changes)


def _static_fields(w: ProductWeight) -> Any:
    """Return a description of a weight without its arrays, to compare weights.

    It has the type, the static fields except `factors`, and the names of the companions that are
    not None.
    """
    names = [f.name for f in dataclasses.fields(w) if f.metadata.get("static")]
    values = [getattr(w, name) for name in names if name != "factors"]
    return type(w), values, tuple(w._companions())
