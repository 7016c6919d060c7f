"""The axes of each weight that the products of a program contract.

`find_uses` traces the program on shapes and dtypes. A `TrackedWeight` takes the place of each
weight. It follows the weight's axes through transposes, reshapes and slices, and records products
and look-ups.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import ArrayLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.rules import register
from ..._core.surface.implicit import implicit
from ..._core.transform import redispatch
from ..._core.tree import static
from ..._core.value import is_value
from ..._jax.primitives import Primitive, find_primitive
from ..._jax.source_lines import user_line
from ..formats.tiles import Shape
from ..weights.activations import PRODUCTS
from ..weights.product_weights import Factors, ProductWeight, reshape_factors
from .matching import flatten_with_paths
from .programs import abstract_arrays

LOOK_UP = "gather"  # the primitive of an embedding look-up

Axes = frozenset[int]  # axes of the stored weight, counted from the end


class Use(NamedTuple):
    """A use of a weight in a program.

    Axes that are neither contracted nor free are batch axes, or stack several weights.
    """

    primitive: str
    contracted: Axes  # the axes that a product contracts; in a look-up, the axes of a row
    free: Axes  # the other axes that the result has; in a look-up, the indexed axes
    line: str  # in the user's code

    @property
    def is_product(self) -> bool:
        """Return whether the primitive is a product."""
        return self.primitive in PRODUCTS

    @property
    def has_axes(self) -> bool:
        """Return whether the use shows which axes share a scale. An outer product does not."""
        return bool(self.contracted) and (self.is_product or self.primitive == LOOK_UP)

    @property
    def supports_rotation(self) -> bool:
        """Return whether the use takes a rotated weight without materializing it."""
        return self.primitive in ("dot_general", LOOK_UP)

    def __str__(self) -> str:
        axes = ", ".join(map(str, sorted(self.contracted)))
        if self.is_product:
            return f"{self.primitive} contracts axis {axes} at {self.line}"
        if self.primitive == LOOK_UP:
            return f"rows along axis {axes} are looked up at {self.line}"
        return f"{self.primitive} at {self.line}"


def uses_with_axes(uses: Sequence[Use]) -> list[Use]:
    """Return the uses that show which axes share a scale, products before look-ups."""
    return sorted((use for use in uses if use.has_axes), key=lambda use: not use.is_product)


def find_uses(
    call: Callable,
    params: Any,
    is_weight: Callable[[str, Any], bool],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[Use]]:
    """Return the uses of each weight in a program, by path.

    Weights are in the order of their first use, after weights without a use.

    **Arguments:**

    - `call`: the program, called as `call(params, *args, **kwargs)`.
    - `params`: a pytree, whose leaves may be implicit arrays.
    - `is_weight`: a function of the path and the leaf. Uses are recorded if it returns True.

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
    weights = [is_weight(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    token = next(_tokens)
    _uses[token] = {path: [] for path, is_one in zip(paths, weights, strict=True) if is_one}

    def track(path: str, x: Any) -> TrackedWeight:
        factors = tuple(((Axes([axis - x.ndim]), size),) for axis, size in enumerate(x.shape))
        tracks = (TrackedAxes(path, factors),)
        return TrackedWeight(array=x, contracting=(), token=token, tracks=tracks)

    def run(leaves: Any, args: Any, kwargs: Any) -> None:
        tracked = [
            track(path, x) if is_one else x
            for path, x, is_one in zip(paths, leaves, weights, strict=True)
        ]
        out = implicit(call)(jax.tree.unflatten(treedef, tracked), *args, **kwargs)
        for x in jax.tree.leaves(out, is_leaf=is_value):
            if isinstance(x, TrackedWeight):
                x.note("return")

    # An implicit weight is traced as the dense array that it represents.
    leaves = [
        leaf.aval() if is_one and is_value(leaf) else leaf
        for leaf, is_one in zip(leaves, weights, strict=True)
    ]
    try:
        function, arrays = abstract_arrays(run, leaves, tuple(args), dict(kwargs or {}))
        jax.eval_shape(function, arrays)
    except Exception as error:
        _add_hints(error, call, params)
        raise
    finally:
        uses = _uses.pop(token)
    return uses


def _add_hints(error: Exception, call: Callable, params: Any) -> None:
    """Add notes to an error of a traced program: how it is called, and frequent mistakes."""
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
    """Return whether an object is a module of Flax linen, or its error for missing variables."""
    names = {f"{cls.__module__}.{cls.__name__}" for cls in type(x).__mro__}
    return not names.isdisjoint(_LINEN_CLASSES)


_LINEN_CLASSES = frozenset(
    (
        "flax.linen.module.Module",
        "flax.errors.ApplyScopeInvalidVariablesStructureError",
        "flax.errors.ApplyScopeInvalidVariablesTypeError",
        "flax.errors.CallCompactUnboundModuleError",
        "flax.errors.CallSetupUnboundModuleError",
        "flax.errors.ScopeCollectionNotFound",
        "flax.errors.ScopeParamNotFoundError",
        "flax.errors.ScopeVariableNotFoundError",
    )
)


#: Each trace takes a token. Tracked weights hold it instead of their uses, because their metadata
#: must be hashable.
_tokens = itertools.count()
_uses: dict[int, dict[str, list[Use]]] = {}  # by token, and then by path


class TrackedAxes(NamedTuple):
    """The origin of the axes of a tracked array.

    The origins of `factors` are sets of axes of the weight, counted from the end. `factors` is
    indexed from the end too, because a scan removes and adds axes at the front.
    """

    path: str  # of the weight
    factors: tuple[Factors, ...]  # per axis of the array
    looked_up: Axes = Axes()  # the axes of the weight along which rows were looked up

    def origins(self, axes: Collection[int], ndim: int) -> Axes:
        """Return the axes of the weight that `axes`, of an array of rank `ndim`, come from.

        `axes` are counted from the front, and the result from the end.
        """
        before = len(self.factors) - ndim
        known = [self.factors[before + axis] for axis in axes if before + axis >= 0]
        return Axes().union(*(origin for factors in known for origin, _ in factors))

    def moved(self, places: Sequence[Sequence[int]], shape: Shape) -> "TrackedAxes":
        """Return the tracked axes after a move, with the arguments of `ProductWeight.with_axes`."""
        factors: list[Factors] = [()] * len(shape)
        for axis, new in enumerate(places):
            for i in new:
                factors[i] = self._of_axis(axis, len(places), shape[i])
        return self._replace(factors=tuple(factors))

    def reshaped(self, old: Shape, new: Shape) -> "TrackedAxes":
        """Return the axes of an array that was reshaped."""
        factors = [self._of_axis(axis, len(old), size) for axis, size in enumerate(old)]
        return self._replace(factors=tuple(reshape_factors(factors, old, new)))

    def _of_axis(self, axis: int, ndim: int, size: int) -> Factors:
        """Return the factors of an axis, which become one if its size has changed."""
        before = len(self.factors) - ndim
        factors = self.factors[before + axis] if before + axis >= 0 else ()
        if math.prod(n for _, n in factors) == size:
            return factors
        return ((Axes().union(*(origin for origin, _ in factors)), size),)


class TrackedWeight(ProductWeight):
    """A weight, or several that were concatenated, that records its uses."""

    array: Any
    contracting: tuple[int, ...] = static()  # always empty, because `tracks` has the axes
    token: int = static()
    tracks: tuple[TrackedAxes, ...] = static()
    factors: tuple[Factors, ...] | None = static(default=None, repr=False, kw_only=True)

    def with_axes(self, places: Sequence[Sequence[int]], shape: Shape) -> "TrackedWeight":
        """Return the weight with its tracks updated to moved axes."""
        return self.changed(tracks=tuple(track.moved(places, shape) for track in self.tracks))

    def with_reshaped_axes(self, sizes: Shape) -> "TrackedWeight":
        """Return the weight with its tracks updated to a reshape to `sizes`."""
        return self.changed(
            tracks=tuple(track.reshaped(self.shape, sizes) for track in self.tracks)
        )

    def note(
        self, primitive: str, contracted: Collection[int] = (), batch: Collection[int] = ()
    ) -> None:
        """Record a product or another use of the weight.

        If rows were looked up before, record a look-up instead. The exception is a product with at
        least two axes of the weight: then the look-up selected one weight of a stack. `contracted`
        and `batch` are the axes of a product, counted from the front.
        """
        line = user_line()
        for track in self.tracks:
            contracted_axes = track.origins(contracted, self.ndim)
            others = [i for i in range(self.ndim) if i not in batch]
            free = track.origins(others, self.ndim) - contracted_axes
            use = Use(primitive, contracted_axes, free, line)
            if track.looked_up and (len(contracted_axes | free) < 2 or not use.is_product):
                use = Use(LOOK_UP, contracted_axes | free, track.looked_up, line)
            uses_by_path = _uses[self.token]
            uses = uses_by_path[track.path]
            if not uses:  # move the weight to the end: the dict is in the order of the program
                uses_by_path[track.path] = uses_by_path.pop(track.path)
            if use not in uses:
                uses.append(use)

    def materialise(self) -> Any:
        """Record that an operation materializes the weight, and return the weight."""
        self.note("materialise")
        return super().materialise()

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Record the use of each tracked weight, and apply the primitive to the weights."""
        for i, x in enumerate(values):
            if isinstance(x, TrackedWeight):
                is_product = primitive.name in PRODUCTS
                axes = _product_axes(primitive.name, i, params) if is_product else ()
                x.note(primitive.name, *axes)
        return ProductWeight.default(primitive, values, params)


def _product_axes(
    primitive: str, i: int, params: Mapping[str, Any]
) -> tuple[Collection[int], Collection[int]]:
    """Return the axes of operand `i` that a product contracts, and its batch axes."""
    if primitive == "conv_general_dilated":
        spec = params["dimension_numbers"][i]
        return (spec[1:] if i == 1 else spec[1:2]), ()
    if primitive == "dot_general":
        contracted, batch = DotDimensionNumbers.of(params["dimension_numbers"])
        return contracted[i], batch[i]
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    return contracted[i], (*batch[i], *(numbers.rhs_group_dimensions if i == 1 else ()))


@register("gather")
def _gather(w: TrackedWeight, indices: ArrayLike, **params: Any) -> Any:
    """Look up a layer, an expert or a row. The next use shows which it is (see `note`)."""
    numbers = params["dimension_numbers"]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    places: list[Sequence[int]] = [() for _ in range(w.ndim)]
    kept = (axis for axis in range(w.ndim) if axis not in removed)
    for i, axis in zip(numbers.offset_dims, kept, strict=True):
        places[axis] = (i,)
    bind = find_primitive("gather").bind
    array = redispatch(lambda x, i: bind(x, i, **params), w.array, indices)
    sizes, shape = params["slice_sizes"], w.shape
    rows = {i for i in range(w.ndim) if sizes[i] < shape[i]} - {*numbers.operand_batching_dims}
    tracks = [
        track.moved(places, array.shape)._replace(
            looked_up=track.looked_up | track.origins(rows, w.ndim)
        )
        for track in w.tracks
    ]
    return w.changed(array=array, tracks=tuple(tracks))


@register("concatenate")
def _concatenate(*operands: TrackedWeight, dimension: int) -> TrackedWeight:
    """Concatenate weights, such as query, key and value. Each gets the uses of the result."""
    join = partial(redispatch, lambda *xs: lax.concatenate(xs, dimension))
    array = join(*(w.array for w in operands))
    places = [(axis,) for axis in range(array.ndim)]
    tracks = (track.moved(places, array.shape) for w in operands for track in w.tracks)
    return operands[0].changed(array=array, tracks=tuple(dict.fromkeys(tracks)))


@register("select_n")
def _select(which: ArrayLike, *cases: TrackedWeight) -> TrackedWeight:
    """Select between weights, as `vmap` of `cond` does. Any of them may be chosen."""
    array = redispatch(lax.select_n, which, *(w.array for w in cases))
    tracks = (track for w in cases for track in w.tracks)
    return cases[0].changed(array=array, tracks=tuple(dict.fromkeys(tracks)))
