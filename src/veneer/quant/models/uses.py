"""Find the axes of each weight that the products of a program contract, and choose default rules.

`find_uses` traces the program on shapes and dtypes, with a `TrackedWeight` in place of each weight.
A `TrackedWeight` follows the axes of the weight through transposes, reshapes and slices. Its rules
record products and look-ups.

The default rules are for language models. They follow from a format and the uses of the weights.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.implicit import implicit
from ..._core.trace import redispatch
from ..._core.tree import static
from ..._core.value import is_value
from ..._jax.frames import user_line
from ..._jax.primitives import Primitive, find_primitive
from ..formats import get_format
from ..formats.tiles import Shape
from ..product_weights import (
    PRODUCTS,
    Factors,
    ProductWeight,
    product_axes,
    reshape_factors,
)
from .arguments import abstract_arrays, can_be_quantized, flatten_with_paths
from .rules import SMALLEST_TILE, Rule, split_tile

LOOK_UP = "gather"  # the primitive of an embedding look-up

Axes = frozenset[int]  # axes of a weight in the tree of parameters, counted from the end


class Use(NamedTuple):
    """A place in a program where a primitive, such as a product, has a weight as an operand.

    All axes are axes of the weight, counted from the end. Axes that are neither in `contracted` nor
    in `free_axes` are batch axes, or axes that stack several weights.
    """

    primitive: str  # its name, or "return" if the program returns the weight
    contracted: Axes  # the axes that a product contracts; in a look-up, the axes of a row
    free_axes: Axes  # the axes that the result keeps; in a look-up, the indexed axes
    line: str  # file and line of the program

    @property
    def is_product(self) -> bool:
        """True if the primitive is a product."""
        return self.primitive in PRODUCTS

    @property
    def has_axes(self) -> bool:
        """True if this is a product or a look-up, and `contracted` is not empty."""
        return bool(self.contracted) and (self.is_product or self.primitive == LOOK_UP)

    def __str__(self) -> str:
        axes = ", ".join(map(str, sorted(self.contracted)))
        if self.is_product:
            return f"{self.primitive} contracts axis {axes} at {self.line}"
        if self.primitive == LOOK_UP:
            return f"rows along axis {axes} are looked up at {self.line}"
        return f"{self.primitive} at {self.line}"


def uses_with_axes(uses: Sequence[Use]) -> list[Use]:
    """Return the uses whose `has_axes` is True: products first, then look-ups."""
    return sorted((use for use in uses if use.has_axes), key=lambda use: not use.is_product)


def find_uses(
    call: Callable,
    params: Any,
    is_weight: Callable[[str, Any], bool],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[Use]]:
    """Return a dict from the path of each weight to the list of its uses in a program.

    Weights without a use come first. The others follow in the order of their first use.

    **Arguments:**

    - `call`: the program, called as `call(params, *args, **kwargs)`.
    - `params`: a pytree, whose leaves may be implicit arrays.
    - `is_weight`: a function of a path and a leaf, which returns True for weights.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant.models.uses import find_uses
    >>> params = {"table": jnp.ones((50, 8)), "kernel": jnp.ones((8, 2, 4))}
    >>> def model(params, ids):
    ...     return jnp.einsum("td,dhk->thk", params["table"][ids], params["kernel"])
    >>> uses = find_uses(model, params, lambda path, leaf: True, (jnp.arange(3),))
    >>> {path: [sorted(use.contracted) for use in uses] for path, uses in uses.items()}
    {'table': [[-1]], 'kernel': [[-3]]}
    """
    paths, leaves, treedef = flatten_with_paths(params)
    is_tracked = [is_weight(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    trace_id = next(_trace_ids)
    _uses_by_trace[trace_id] = {path: [] for path in itertools.compress(paths, is_tracked)}

    def track(path: str, x: Any) -> TrackedWeight:
        factors = tuple(((Axes([axis - x.ndim]), size),) for axis, size in enumerate(x.shape))
        tracked_axes = (TrackedAxes(path, factors),)
        return TrackedWeight(array=x, contracting=(), trace_id=trace_id, tracked_axes=tracked_axes)

    def run(leaves: Any, args: Any, kwargs: Any) -> None:
        new = [
            track(path, x) if tracked else x
            for path, x, tracked in zip(paths, leaves, is_tracked, strict=True)
        ]
        out = implicit(call)(jax.tree.unflatten(treedef, new), *args, **kwargs)
        for x in jax.tree.leaves(out, is_leaf=is_value):
            if isinstance(x, TrackedWeight):
                x.record_use("return")

    # An implicit weight is traced as the dense array that it represents.
    leaves = [
        leaf.aval() if tracked and is_value(leaf) else leaf
        for leaf, tracked in zip(leaves, is_tracked, strict=True)
    ]
    try:
        function, arrays = abstract_arrays(run, leaves, tuple(args), dict(kwargs or {}))
        jax.eval_shape(function, arrays)
    except Exception as error:
        _add_hints(error, call, params)
        raise
    finally:
        uses = _uses_by_trace.pop(trace_id)
    return uses


def _add_hints(error: Exception, call: Callable, params: Any) -> None:
    """Add notes to an error of a traced program: how the program is called, and likely mistakes."""
    if _is_from_linen(error) or _is_from_linen(call):
        error.add_note(
            "For a module of Flax linen, pass all its variables, and model=module.apply: "
            "quantize_tree(variables, rules, model=module.apply, args=(x,))."
        )
    error.add_note(
        "This error was raised while the program was traced on shapes. It is called as "
        "model(params, *args, **kwargs), or as params(*args, **kwargs) without a model."
    )
    words = ("shape", "rank", "dimension", "axis", "axes", "ndim", "unpack", "vmap")
    is_of_shapes = any(word in str(error).lower() for word in words)
    if callable(params) and isinstance(error, TypeError | ValueError) and is_of_shapes:
        error.add_note(
            "If the module takes one example and these arguments are a batch, pass "
            "model=lambda m, x: jax.vmap(m)(x)."
        )


def _is_from_linen(x: Any) -> bool:
    """Return whether an object is a module of Flax linen, or an error for missing variables."""
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(x).__mro__]
    return any(re.match(r"flax\.(linen\.|errors\.(ApplyScope|Call|Scope))", name) for name in names)


#: Each call of `find_uses` takes a number from `_trace_ids`. Tracked weights hold this number
#: instead of the lists of uses, because their metadata must be hashable.
_trace_ids = itertools.count()
_uses_by_trace: dict[int, dict[str, list[Use]]] = {}  # by the number of a trace, and then by path


class TrackedAxes(NamedTuple):
    """For an array computed from a weight: the axes of the weight that its axes come from.

    An example of such an array is the transposed or reshaped weight. Each axis of the array has
    factors: `(origins, size)` pairs, whose sizes multiply to the size of the axis. `origins` is a
    set of axes of the weight, counted from the end. If a reshape merges two axes of the weight, the
    new axis has two factors.
    """

    path: str  # of the weight
    #: The factors of each axis of the array. If the array has another rank, the last axes
    #: correspond, because a scan removes and adds axes at the front.
    factors: tuple[Factors, ...]
    looked_up: Axes = Axes()  # the axes of the weight along which rows were looked up

    def origins(self, axes: Collection[int], ndim: int) -> Axes:
        """Return the axes of the weight, counted from the end, that axes of the array come from.

        The array is the one that this object describes.
        `axes` are the axes of the array, counted from the front. `ndim` is its rank.
        """
        factors = itertools.chain(*(self._factors_of(axis, ndim) for axis in axes))
        return Axes().union(*(origin for origin, _ in factors))

    def moved(self, places: Sequence[Sequence[int]], shape: Shape) -> "TrackedAxes":
        """Return the tracked axes of the array after a transpose, slice or broadcast.

        `places[i]` lists the new axes that replace axis `i`. `shape` is the new shape.
        """
        factors: list[Factors] = [()] * len(shape)
        for axis, new_axes in enumerate(places):
            for i in new_axes:
                factors[i] = self._resized_factors(axis, len(places), shape[i])
        return self._replace(factors=tuple(factors))

    def reshaped(self, old: Shape, new: Shape) -> "TrackedAxes":
        """Return the tracked axes of the array after a reshape from shape `old` to `new`."""
        factors = [self._resized_factors(axis, len(old), size) for axis, size in enumerate(old)]
        return self._replace(factors=tuple(reshape_factors(factors, old, new)))

    def _factors_of(self, axis: int, ndim: int) -> Factors:
        index = len(self.factors) - ndim + axis
        return self.factors[index] if index >= 0 else ()

    def _resized_factors(self, axis: int, ndim: int, size: int) -> Factors:
        """Return the factors of an axis of the array, whose new size is `size`.

        `axis` and `ndim` are the index of the axis and the rank of the array. Merge the factors
        into one if their sizes do not multiply to `size`, as after a slice.
        """
        factors = self._factors_of(axis, ndim)
        if math.prod(n for _, n in factors) == size:
            return factors
        return ((Axes().union(*(origin for origin, _ in factors)), size),)


class TrackedWeight(ProductWeight):
    """A weight, or a concatenation of weights, that records the primitives that use it.

    `find_uses` passes it to the traced program. `trace_id` is the number of that trace.
    """

    array: Any
    contracting: tuple[int, ...] = static()  # always empty, because `tracked_axes` has the axes
    trace_id: int = static()
    tracked_axes: tuple[TrackedAxes, ...] = static()  # one entry per concatenated weight
    factors: tuple[Factors, ...] | None = static(default=None, repr=False, kw_only=True)

    def with_axes(self, places: Sequence[Sequence[int]], shape: Shape) -> "TrackedWeight":
        """Return a copy with new `tracked_axes`, after a transpose, slice or broadcast.

        `places[i]` lists the new axes that replace axis `i`. `shape` is the new shape.
        """
        return self.changed(tracked_axes=tuple(x.moved(places, shape) for x in self.tracked_axes))

    def with_reshaped_axes(self, sizes: Shape) -> "TrackedWeight":
        """Return a copy with new `tracked_axes`, after a reshape to the shape `sizes`."""
        new = (axes.reshaped(self.shape, sizes) for axes in self.tracked_axes)
        return self.changed(tracked_axes=tuple(new))

    def record_use(
        self, primitive: str, contracted: Collection[int] = (), batch: Collection[int] = ()
    ) -> None:
        """Record that a primitive uses the weight.

        `contracted` and `batch` are the axes of this array that a product contracts and its batch
        axes, counted from the front. If this array is the result of a look-up, as of rows of an
        embedding, record the look-up instead. But if the primitive is a product in which two or
        more axes of the weight are left, the look-up only selected a layer from a stack. Then the
        product is recorded.
        """
        line = user_line()
        kept = [axis for axis in range(self.ndim) if axis not in batch]
        uses_by_path = _uses_by_trace[self.trace_id]
        for axes in self.tracked_axes:
            contracted_axes = axes.origins(contracted, self.ndim)
            free_axes = axes.origins(kept, self.ndim) - contracted_axes
            use = Use(primitive, contracted_axes, free_axes, line)
            row_axes = contracted_axes | free_axes
            if axes.looked_up and (len(row_axes) < 2 or not use.is_product):
                use = Use(LOOK_UP, row_axes, axes.looked_up, line)
            uses = uses_by_path[axes.path]
            if not uses:  # Move the weight to the end, because the dict is ordered by first uses.
                uses_by_path[axes.path] = uses_by_path.pop(axes.path)
            if use not in uses:
                uses.append(use)

    def materialise(self) -> Any:
        """Record that an operation materializes the weight, and return the dense weight."""
        self.record_use("materialise")
        return super().materialise()

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Record a use of each weight in `values`, and apply the primitive to their arrays."""
        for i, x in enumerate(values):
            if isinstance(x, TrackedWeight):
                is_product = primitive.name in PRODUCTS
                axes = _product_axes(primitive.name, i, params) if is_product else ()
                x.record_use(primitive.name, *axes)
        return ProductWeight.default(primitive, values, params)


def _product_axes(
    primitive: str, i: int, params: Mapping[str, Any]
) -> tuple[Collection[int], Collection[int]]:
    """Return the axes of operand `i` that a product contracts, and the batch axes of operand `i`.

    Operand 0 of a product is the left one, and operand 1 the right one.
    """
    contracted, batch = product_axes(primitive, params)
    if primitive == "conv_general_dilated" and i == 0:  # images keep their spatial axes
        return contracted[i][-1:], ()
    if primitive == "ragged_dot_general" and i == 1:
        groups = params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        return contracted[i], (*batch[i], *groups)
    return contracted[i], batch[i]


@register("gather")
def _gather(w: TrackedWeight, indices: ArrayLike, **params: Any) -> Any:
    """Index a weight without recording a use, and add the indexed axes to its `looked_up` axes.

    The result can be a row of an embedding, or a layer or an expert of a stack. When a primitive
    uses the result, `record_use` decides which one it is.
    """
    bind = find_primitive("gather").bind
    array = redispatch(lambda x, i: bind(x, i, **params), w.array, indices)
    numbers = params["dimension_numbers"]
    batch_axes = {*numbers.operand_batching_dims}
    removed = {*numbers.collapsed_slice_dims, *batch_axes}
    kept = [axis for axis in range(w.ndim) if axis not in removed]
    new_axes = dict(zip(kept, numbers.offset_dims, strict=True))  # from axes of `w` to the result's
    places = [[new_axes[axis]] if axis in new_axes else [] for axis in range(w.ndim)]
    sizes = enumerate(zip(w.shape, params["slice_sizes"], strict=True))
    indexed = {axis for axis, (size, slice_size) in sizes if slice_size < size} - batch_axes
    tracked_axes = (
        axes.moved(places, array.shape)._replace(
            looked_up=axes.looked_up | axes.origins(indexed, w.ndim)
        )
        for axes in w.tracked_axes
    )
    return w.changed(array=array, tracked_axes=tuple(tracked_axes))


@register("concatenate")
def _concatenate(*operands: TrackedWeight, dimension: int) -> TrackedWeight:
    """Concatenate weights, such as query, key and value. A use of the result is a use of each."""
    join = lambda *xs: lax.concatenate(xs, dimension)
    array = redispatch(join, *(w.array for w in operands))
    places = [(axis,) for axis in range(array.ndim)]
    tracked_axes = (axes.moved(places, array.shape) for w in operands for axes in w.tracked_axes)
    return operands[0].changed(array=array, tracked_axes=tuple(dict.fromkeys(tracked_axes)))


@register("select_n")
def _select(which: ArrayLike, *cases: TrackedWeight) -> TrackedWeight:
    """Select between weights, as `vmap` of `cond` does. A use of the result is a use of each."""
    array = redispatch(lax.select_n, which, *(w.array for w in cases))
    tracked_axes = (axes for w in cases for axes in w.tracked_axes)
    return cases[0].changed(array=array, tracked_axes=tuple(dict.fromkeys(tracked_axes)))


#: The format of embeddings and heads, if other weights have fewer than 8 bits.
VOCABULARY_QTYPE = "int8"
#: The default rules leave arrays with fewer values than this dense.
SMALL = 4096


def default_tile(qtype: str) -> int | None:
    """Return the default tile size of a format.

    None means one scale per channel, or the tile of a format with a fixed tile size.

    >>> from veneer.quant.models.uses import default_tile
    >>> [default_tile(name) for name in ("int8", "nf4", "int3", "mxfp4")]
    [None, 64, 32, None]
    """
    format = get_format(qtype)
    if format.bits >= 8 or format.tile_size is not None:
        return None
    return 64 if format.bits >= 4 else 32


def default_rules(
    qtype: str, weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]
) -> dict[str, Rule]:
    """Return the default rules of the weights to quantize, as a dict from paths to rules.

    `weights` is a dict from paths to weights, and `uses` a dict from paths to their uses in the
    program.

    | weight | format |
    |---|---|
    | contracted by products | `qtype`, with `default_tile` (64 as in QLoRA, arXiv 2305.14314) |
    | embeddings and heads | `qtype`, or int8 with a scale per row if `qtype` has fewer bits |
    | fewer than 4,096 values, or not in a product | dense |

    A head is a weight whose product has as many outputs as an embedding has rows, which is the size
    of the vocabulary. But if any product contracts axes of that size, the size is only a width of
    the model, and the weight is not a head.

    The rules have no `tile_axis`. `fit_default_rule` sets it later.

    **Raises:** `ValueError` if the format is unknown.
    """
    bits, tile = get_format(qtype).bits, default_tile(qtype)
    shapes = {path: leaf.shape for path, leaf in weights.items() if can_be_quantized(leaf)}
    size_along = lambda path, axes: math.prod(shapes[path][axis] for axis in axes)
    look_ups = {path: use for path in shapes for use in uses[path] if use.primitive == LOOK_UP}
    first_uses = {path: relevant[0] for path in shapes if (relevant := uses_with_axes(uses[path]))}
    products = {path: use for path, use in first_uses.items() if use.is_product}
    widths = {size_along(path, use.contracted) for path, use in products.items()}
    # The free axes of a look-up are the indexed axes, so their size is the number of rows.
    vocabulary_sizes = {size_along(path, use.free_axes) for path, use in look_ups.items()} - widths
    rules = {}
    for path, shape in shapes.items():
        if math.prod(shape) < SMALL:
            continue
        use = first_uses.get(path)
        is_head = use is not None and size_along(path, use.free_axes) in vocabulary_sizes
        if bits < 8 and (path in look_ups or is_head):
            rules[path] = Rule(re.escape(path), VOCABULARY_QTYPE)
        else:
            rules[path] = Rule(re.escape(path), qtype, tile_size=tile)
    return rules


def fit_default_rule(rule: Rule, contracted: Collection[int], shape: Sequence[int]) -> Rule:
    """Fit a default rule to the shape of a weight, and set `tile_axis` to the contracted axes.

    If no contracted axis is a multiple of the fixed tile size of a format, the format becomes int8.
    If no tile of 8 or more values divides these axes, the weight gets one scale per channel.
    """
    fixed_tile = get_format(rule.qtype or VOCABULARY_QTYPE).tile_size
    sizes = [shape[axis] for axis in sorted(contracted)]
    if fixed_tile is not None and not any(size % fixed_tile == 0 for size in sizes):
        rule = dataclasses.replace(rule, qtype=VOCABULARY_QTYPE)
    tile = rule.tile_size
    if isinstance(tile, int) and math.prod(split_tile(sizes, tile)) < SMALLEST_TILE:
        rule = dataclasses.replace(rule, tile_size=None)
    return rule.along(contracted, shape)
