"""What a program does with its weights: which of their axes its products contract.

The program is traced, on shapes and dtypes alone. In place of each weight stands a `TrackedWeight`,
which remembers where its axes have gone, and notes each product and each look-up that it meets.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.dtypes import canonicalize_dtype
from jax.typing import ArrayLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.rules import register
from ..._core.surface.arguments import check_parameters
from ..._core.surface.implicit import implicit
from ..._core.transform import redispatch
from ..._core.tree import static
from ..._core.value import is_value
from ..._jax.primitives import Primitive, find_primitive
from ..._jax.sharding import replicated_sharding
from ..._jax.source_lines import user_line, warn_user
from ..formats.tiles import Shape
from ..weights.product_weights import Factors, ProductWeight, reshape_factors
from .rules import flatten_with_paths

LOOK_UP = "gather"  # the primitive that a look-up is

Axes = frozenset[int]  # of a weight as it is stored, counted from the end


class Use(NamedTuple):
    """What a program does with a weight, at a line.

    **Arguments:**

    - `primitive`: a product; `LOOK_UP`, of rows; or another, which makes it dense.
    - `contracted`: the axes that a product sums over; of a look-up, those of what is looked up.
    - `free`: those that the result has, or along which something is looked up. All others are of a
      batch, or of a stack of weights of which this is one.
    - `line`: the user's.
    """

    primitive: str
    contracted: Axes
    free: Axes
    line: str

    @property
    def is_product(self) -> bool:
        """Whether it is a product."""
        return self.primitive in _CONTRACTIONS

    @property
    def says_axes(self) -> bool:
        """Return whether the use shows which axes share a scale. An outer product does not."""
        return bool(self.contracted) and (self.is_product or self.primitive == LOOK_UP)

    def __str__(self) -> str:
        axes = ", ".join(map(str, sorted(self.contracted)))
        if self.is_product:
            return f"{self.primitive} contracts axis {axes} at {self.line}"
        if self.primitive == LOOK_UP:
            return f"rows along axis {axes} are looked up at {self.line}"
        return f"{self.primitive} at {self.line}"


_tokens = itertools.count()
_uses: dict[int, dict[str, list[Use]]] = {}


class TrackedAxes(NamedTuple):
    """Where the axes of a tracked array come from.

    **Arguments:**

    - `path`: the path of the weight.
    - `factors`: the factors of each axis of the array. Their origins are sets of axes of the
      weight, counted from the end. `factors` is indexed from the end too, because a scan removes
      and adds axes at the front.
    - `looked_up`: the axes of the weight along which rows were looked up.
    """

    path: str
    factors: tuple[Factors, ...]
    looked_up: Axes = Axes()

    def of(self, axes: Collection[int], ndim: int) -> Axes:
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
    """A weight, or some put together, that notes what a program does with it."""

    array: Any
    contracting: tuple[int, ...] = static()  # always empty: `tracks` has the axes
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
        least two axes of the weight: then the look-up selected one weight of a stack.

        **Arguments:**

        - `primitive`: the name of the primitive.
        - `contracted`, `batch`: the axes of a product, counted from the front.
        """
        line = user_line()
        is_product = primitive in _CONTRACTIONS
        for track in self.tracks:
            summed = track.of(contracted, self.ndim)
            free = track.of([i for i in range(self.ndim) if i not in batch], self.ndim) - summed
            use = Use(primitive, summed, free, line)
            # A looked-up row is data. A slice with two or more axes is a weight of a stack.
            if track.looked_up and (len(summed | free) < 2 or not is_product):
                use = Use(LOOK_UP, summed | free, track.looked_up, line)
            of_all = _uses[self.token]
            uses = of_all[track.path]
            if not uses:  # so that weights are in the order of the program
                of_all[track.path] = of_all.pop(track.path)
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
                axes_of = _CONTRACTIONS.get(primitive.name, lambda i, params: ())
                x.note(primitive.name, *axes_of(i, params))
        return ProductWeight.default(primitive, values, params)


def _of_dot_general(i: int, params: Mapping[str, Any]) -> Sequence[Collection[int]]:
    contracted, batch = DotDimensionNumbers.of(params["dimension_numbers"])
    return contracted[i], batch[i]


def _of_ragged_dot_general(i: int, params: Mapping[str, Any]) -> Sequence[Collection[int]]:
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    return contracted[i], (*batch[i], *(numbers.rhs_group_dimensions if i == 1 else ()))


def _of_convolution(i: int, params: Mapping[str, Any]) -> Sequence[Collection[int]]:
    spec = params["dimension_numbers"][i]
    return (spec[1:],) if i == 1 else (spec[1:2],)


#: By product, the axes that it contracts of an operand of a number, and those of a batch.
_CONTRACTIONS: dict[str, Callable[..., Sequence[Collection[int]]]] = {
    "dot_general": _of_dot_general,
    "ragged_dot_general": _of_ragged_dot_general,
    "conv_general_dilated": _of_convolution,
}


@register("gather")
def _gather(w: TrackedWeight, indices: ArrayLike, **params: Any) -> Any:
    """Look up a layer, an expert or a row. The next use shows which of them (see `note`)."""
    numbers = params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    places: list[Sequence[int]] = [() for _ in range(w.ndim)]
    left = (axis for axis in range(w.ndim) if axis not in gone)
    for i, axis in zip(numbers.offset_dims, left, strict=True):
        places[axis] = (i,)
    bind = find_primitive("gather").bind
    array = redispatch(lambda x, i: bind(x, i, **params), w.array, indices)
    sizes, shape = params["slice_sizes"], w.shape
    rows = {i for i in range(w.ndim) if sizes[i] < shape[i]} - {*numbers.operand_batching_dims}
    tracks = [
        track.moved(places, array.shape)._replace(
            looked_up=track.looked_up | track.of(rows, w.ndim)
        )
        for track in w.tracks
    ]
    return w.changed(array=array, tracks=tuple(tracks))


@register("concatenate")
def _concatenate(*operands: TrackedWeight, dimension: int) -> TrackedWeight:
    """Of weights, as of those of query, key and value, which meet the same operand."""
    join = partial(redispatch, lambda *xs: lax.concatenate(xs, dimension))
    array = join(*(w.array for w in operands))
    stay = [(axis,) for axis in range(array.ndim)]
    tracks = (track.moved(stay, array.shape) for w in operands for track in w.tracks)
    return operands[0].changed(array=array, tracks=tuple(dict.fromkeys(tracks)))


@register("select_n")
def _select(which: ArrayLike, *cases: TrackedWeight) -> TrackedWeight:
    """Select between weights, as `vmap` of `cond` does. Any of them may be chosen."""
    array = redispatch(lax.select_n, which, *(w.array for w in cases))
    tracks = (track for w in cases for track in w.tracks)
    return cases[0].changed(array=array, tracks=tuple(dict.fromkeys(tracks)))


def parameters_and_program(model: Any, params: Any, call: str) -> tuple[Any, Callable]:
    """Return the parameters, also of a module, and the program.

    **Arguments:**

    - `model`: a function of the parameters and other arguments, or a module that has them.
    - `params`: the parameters, or None for a module.
    - `call`: how both are passed.

    **Raises:** `TypeError` if the model is not callable, or `params` is missing. `ValueError` if
    the parameters hold no arrays.
    """
    name = type(model).__name__
    if not callable(model):
        raise TypeError(f"the model must be a function or a module, not a {name}. Call {call}")
    if params is None and jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
        raise TypeError(
            f"the model, a {name}, holds no parameters. Call {call}, where the model is called as "
            "model(params, batch)"
        )
    params, function = (model, None) if params is None else (params, model)
    check_parameters(params, call)
    program = program_of(params, function, (), None)
    assert program is not None
    return params, program


def program_of(params: Any, model: Callable | None, args: Any, kwargs: Any) -> Callable | None:
    """Returns the program of parameters and arguments that a caller gives, or None for none.

    **Raises:** `TypeError` for what is no program, or no sequence of arguments.
    """
    if isinstance(args, str) or not isinstance(args, Sequence | None):
        raise TypeError(
            "args must be a tuple of the arguments after the parameters, such as (x,), not "
            f"{type(args).__name__}"
        )
    if model is not None:
        if not callable(model):
            raise TypeError(
                f"model must be a function of params and args, not a {type(model).__name__}"
            )
        return model
    if args is None and kwargs is None:
        return None
    if not callable(params):
        raise TypeError(
            f"args needs model=, because a {type(params).__name__} cannot be called. Pass the "
            "function that is called as model(params, *args)"
        )
    return lambda params, *args, **kwargs: params(*args, **kwargs)


def uses_of(
    call: Callable,
    params: Any,
    is_weight: Callable[[str, Any], bool],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[Use]]:
    """Returns what a program does with its weights, by their paths, each in its order.

    What it does nothing with comes first.

    **Arguments:**

    - `call`: the program, a function of the parameters and of `args` and `kwargs`. It is traced on
      the shapes and dtypes of arrays; other leaves are as they are.
    - `params`: a tree.
    - `is_weight`: of the path and the leaf, which may be implicit, whether its uses are asked for.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant.models.uses import uses_of
    >>> params = {"table": jnp.ones((50, 8)), "kernel": jnp.ones((8, 2, 4))}
    >>> def model(params, ids):
    ...     return jnp.einsum("td,dhk->thk", params["table"][ids], params["kernel"])
    >>> uses = uses_of(model, params, lambda path, leaf: True, (jnp.arange(3),))
    >>> {path: [sorted(use.contracted) for use in uses] for path, uses in uses.items()}
    {'table': [[-1]], 'kernel': [[-3]]}
    """
    paths, leaves, treedef = flatten_with_paths(params)
    token = next(_tokens)
    weights = {
        i for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)) if is_weight(path, leaf)
    }
    uses: dict[str, list[Use]] = {path: [] for i, path in enumerate(paths) if i in weights}

    def tracked(i: int, x: Any) -> Any:
        if i not in weights:
            return x
        factors = tuple(((Axes([axis - x.ndim]), size),) for axis, size in enumerate(x.shape))
        tracks = (TrackedAxes(paths[i], factors),)
        return TrackedWeight(array=x, contracting=(), token=token, tracks=tracks)

    def run(leaves: Any, args: Any, kwargs: Any) -> None:
        params = jax.tree.unflatten(treedef, [tracked(i, x) for i, x in enumerate(leaves)])
        out = implicit(call)(params, *args, **kwargs)
        for x in jax.tree.leaves(out, is_leaf=is_value):
            if isinstance(x, TrackedWeight):
                x.note("return")

    stand_ins = [
        leaf.aval() if is_value(leaf) and i in weights else leaf for i, leaf in enumerate(leaves)
    ]
    _uses[token] = uses
    try:
        _traced(run, stand_ins, tuple(args), dict(kwargs or {}))
    except Exception as error:
        if _is_of_linen(error) or _is_of_linen(call):
            error.add_note(
                "For a module of Flax linen, pass all its variables, and model=module.apply: "
                "quantize_tree(variables, rules, model=module.apply, args=(x,))."
            )
        raise
    finally:
        del _uses[token]
    return uses


def _is_of_linen(x: Any) -> bool:
    """Return whether something is a module of Flax linen, or an error if one has no variables."""
    names = {f"{cls.__module__}.{cls.__name__}" for cls in type(x).__mro__}
    return not names.isdisjoint(_LINEN)


_LINEN = frozenset(
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


def telling(uses: Sequence[Use]) -> list[Use]:
    """Returns the uses that say which axes are contracted: products, and then look-ups."""
    return sorted((use for use in uses if use.says_axes), key=lambda use: not use.is_product)


def can_be_rotated(use: Use) -> bool:
    """Returns whether a use takes a weight that is stored rotated, and does not make it dense."""
    return use.primitive in ("dot_general", LOOK_UP)


def use_for_axes(path: str, uses: Sequence[Use]) -> Use | None:
    """Returns the first of the uses that say which axes are contracted, or None.

    Warns with `UserWarning` where another disagrees.
    """
    found = telling(uses)
    for other in found[1:]:
        first = found[0]
        if other.contracted != first.contracted:
            warn_user(
                f"{path} is used in two ways, and the first decides its scales: {first}, and "
                f"{other}. To choose, add a rule for it with a tile_axis"
            )
            break
    return found[0] if found else None


def _traced(function: Callable, *trees: Any) -> None:
    """Traces a function of trees, whose arrays are abstract and whose other leaves are not."""
    of_arrays, avals = abstracted(function, *trees)
    jax.eval_shape(of_arrays, avals)


def abstracted(function: Callable, *trees: Any) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Return a function of trees as one of the arrays in them, and the types of those arrays.

    All other leaves are as they are in the trees.
    """
    leaves, treedef = jax.tree.flatten(trees)
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def of_arrays(arrays: Sequence[Any]) -> Any:
        full = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            full[i] = array
        return function(*jax.tree.unflatten(treedef, full))

    return of_arrays, [_type_of(leaves[i]) for i in at]


def _type_of(array: Any) -> jax.ShapeDtypeStruct:
    # JAX 0.12 warns of a dtype that it does not have, as that of int64 arrays of NumPy.
    dtype = canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    cut = isinstance(array, jax.Array) and replicated_sharding(array) is not None
    sharding = jax.typeof(array).sharding if cut else None
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
