"""`Masked`: an array some of whose entries are invalid, and are left out of what is computed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.array import ImplicitArray
from .._core.jax_internals import (
    Primitive,
    find_primitive,
    is_eager,
    jaxpr_as_fun,
    known_entries,
)
from .._core.rules import add_rule, register
from .._core.transform import implicit
from .elementwise import ELEMENTWISE

Axis = int | Sequence[int] | None


class Masked(ImplicitArray):
    """An array with a mask that says which of its entries are valid: True where they are.

    That is the opposite of `numpy.ma`, whose mask says which are not. What holds an invalid entry
    (a NaN, say) reaches no valid result, nor any derivative.

    - Elementwise, an entry is valid where all operands are; of `jnp.where`, where the one that is
      chosen is.
    - Reductions and products leave invalid entries out, as if they were not there; a result is
      valid if any entry, or any pair of them, was. So do cumulative ones, at valid places.
    - Sorted, invalid entries come last; `argmax` and `argmin` find a valid one, if there is any.
    - What moves entries moves the mask; what is padded or written in counts as valid; what is read
      out of bounds does not.

    It has no dense form: what has no rule is refused. `filled` gives one.

    `x.mean()`, `x.var()`, `x.std()` and `x.count()` are of the valid entries. `jnp.mean` and other
    statistics of `jax.numpy` count all entries, so they are refused, as is a sum that is divided by
    the number of its entries. (One that is multiplied by its reciprocal is not recognised.)

    `jax.grad(vn.implicit(f))` wants `allow_int=True` for the mask, or a function of the value.

    **Arguments:**

    - `value`: `[...]`; whatever it holds where it is not valid.
    - `mask`: `bool[...]`, of the same shape.

    **Raises:** TypeError for what is no dense array, and for a mask that is not boolean; ValueError
    for one of another shape.

    >>> import jax.numpy as jnp, veneer as vn
    >>> x = Masked(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))
    >>> y = vn.implicit(lambda x: jnp.log(x).sum())(x)
    >>> y.filled().item(), x.mean().filled().item()
    (1.0986..., 2.0)
    """

    value: jax.Array | np.ndarray  # [...]
    mask: jax.Array | np.ndarray  # bool[...]

    def __post_init__(self) -> None:
        for name in ("value", "mask"):
            leaf = getattr(self, name)
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise TypeError(
                    f"Masked takes an array for {name}, not {leaf!r}; jax.numpy.asarray makes one"
                )
        if self.mask.dtype != bool:
            raise TypeError(
                f"Masked takes a boolean mask, True where entries are valid; got {self.mask.dtype}"
            )
        if self.mask.shape != self.value.shape:
            raise ValueError(
                "Masked takes a mask of its value's shape; got value "
                f"{self.value.shape}, mask {self.mask.shape}. jax.numpy.broadcast_to makes one."
            )

    def aval(self) -> jax.core.ShapedArray:
        """The shape and dtype of the value."""
        value = jax.typeof(self.value)
        return jax.core.ShapedArray(value.shape, value.dtype)

    def materialise(self) -> Any:
        """Refuses: an invalid entry is no number."""
        raise TypeError(
            f"{self!r} has no dense form, as invalid entries stand for no number; "
            "x.filled(0.0) gives one."
        )

    def filled(self, fill: ArrayLike = 0) -> jax.Array:
        """The dense array, with `fill` where entries are invalid."""
        value = jnp.asarray(self.value)
        return jnp.where(self.mask, value, jnp.asarray(fill, value.dtype))

    def count(self, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
        """How many entries are valid: `int32[...]`, or along some axes."""
        return jnp.sum(self.mask, axis, dtype="int32", keepdims=keepdims)

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> "Masked":
        """The mean of the valid entries; invalid where there are none."""
        return self._mean_of(self.filled(), axis, keepdims, ddof=0)

    def var(self, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> "Masked":
        """The variance of the valid entries: a sum of squares, over their number less `ddof`."""
        mean = self.mean(axis, keepdims=True).value
        return self._mean_of(jnp.abs(self.filled() - mean) ** 2, axis, keepdims, ddof)

    def std(self, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> "Masked":
        """The standard deviation of the valid entries, with the same arguments as `var`."""
        var = self.var(axis, ddof=ddof, keepdims=keepdims)
        return Masked(jnp.sqrt(var.filled(1)), var.mask)

    def _mean_of(self, entries: jax.Array, axis: Axis, keepdims: bool, ddof: int) -> "Masked":
        dtype = jnp.result_type(float) if not _is_inexact(entries) else entries.dtype
        wide = entries.astype(jnp.promote_types(dtype, jnp.float32))  # as jax.numpy sums halves
        total = jnp.sum(wide, axis, where=jnp.asarray(self.mask), keepdims=keepdims)
        count = self.count(axis, keepdims=keepdims) - ddof
        return Masked((total / jnp.maximum(count, 1)).astype(dtype), count > 0)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value(x: Any) -> Any:
    return jnp.asarray(x.value if isinstance(x, Masked) else x)


def _mask(x: Any) -> jax.Array:
    """Which entries are valid: all those of a dense array."""
    return jnp.asarray(x.mask) if isinstance(x, Masked) else jnp.ones(jnp.shape(x), bool)


def _filled(x: Any, fill: Any) -> jax.Array:
    return x.filled(fill) if isinstance(x, Masked) else jnp.asarray(x)


# Elementwise. Invalid entries are first replaced by one where every function and its derivative are
# finite: a NaN there would pass the mask in a derivative, as 0 times NaN.

_INSIDE = {"acosh": 2}


def _elementwise(primitive: Primitive) -> None:
    inside = _INSIDE.get(primitive.name, 0.5)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        if primitive is lax.div_p:
            _refuse_mean(*operands)
        shape = jnp.broadcast_shapes(*map(jnp.shape, map(_value, operands)))
        mask = jnp.ones(shape, bool)
        for x in operands:
            if isinstance(x, Masked):
                mask = mask & _leading_ones(x.mask, shape)
        safe = []
        for x in operands:
            valid = mask if jnp.shape(_value(x)) == shape else _mask(x)
            fill = jnp.array(inside if _is_inexact(_value(x)) else 1)
            safe.append(jnp.where(valid, _value(x), fill.astype(_value(x).dtype)))
        out = Masked(primitive.bind(*safe, **primitive.get_bind_params(params)), mask)
        still_a_sum = primitive.name in ("convert_element_type", "neg")
        return _as_sum(out, getattr(operands[0], "_entries", None) if still_a_sum else None)


def _refuse_mean(total: Any, divisor: Any) -> None:
    """Refuses a sum that is divided by the number of entries, of which some may be invalid."""
    count = getattr(total, "_entries", None)
    known = None if isinstance(divisor, Masked) else known_entries(divisor)
    if count is not None and known is not None and (known == count).all():
        raise TypeError(_counts_all("mean", "x.mean(axis)"))


def _counts_all(what: str, instead: str) -> str:
    return (
        f"a {what} of a Masked that counts all entries, also the invalid ones: use {instead}, or "
        "x.sum(axis) and x.count(axis)"
    )


def _leading_ones(mask: Any, shape: Sequence[int]) -> Any:
    return jnp.reshape(mask, (1,) * (len(shape) - jnp.ndim(mask)) + jnp.shape(mask))


for _primitive in ELEMENTWISE:
    if _primitive is not lax.select_n_p:
        _elementwise(_primitive)


@register("select_n")
def _(which: Masked | ArrayLike, *cases: Masked | ArrayLike) -> Any:
    value = lax.select_n(_value(which), *map(_value, cases))
    mask = lax.select_n(_value(which), *map(_mask, cases))
    return Masked(value, mask & _mask(which))


# Reductions, and cumulative ones: invalid entries are replaced by what changes no result.


def _zero(dtype: Any) -> Any:
    return 0


def _one(dtype: Any) -> Any:
    return 1


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _all_ones(dtype: Any) -> Any:
    return True if jnp.issubdtype(dtype, jnp.bool_) else ~np.zeros((), dtype)


def _reduction(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *, axes: Any, **params: Any) -> Any:
        filled = x.filled(neutral(x.dtype))
        out = Masked(primitive.bind(filled, axes=axes, **params), jnp.any(x.mask, axes))
        count = math.prod(x.shape[axis] for axis in axes) * getattr(x, "_entries", 1)
        return _as_sum(out, count) if name == "reduce_sum" and count > 1 else out


def _as_sum(x: Masked, count: int | None) -> Masked:
    """Notes of how many entries a value is the sum, for as long as a program keeps that object."""
    if count is not None:
        x.__dict__["_entries"] = count
    return x


def _cumulative(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, **params: Any) -> Any:
        return Masked(primitive.bind(x.filled(neutral(x.dtype)), **params), x.mask)


def _position(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *, axes: Any, index_dtype: Any) -> Any:
        (axis,) = axes
        find = lambda of: primitive.bind(of, axes=axes, index_dtype=index_dtype)
        found = find(x.filled(neutral(x.dtype)))
        # An invalid one is found where no valid entry is better than its fill: then the first.
        index = jnp.expand_dims(found, axis)
        is_valid = jnp.take_along_axis(jnp.asarray(x.mask), index, axis).squeeze(axis)
        first = lax.argmax(jnp.asarray(x.mask), axis, index_dtype)
        return Masked(jnp.where(is_valid, found, first), jnp.any(x.mask, axis))


for _name, _neutral in {
    "reduce_sum": _zero,
    "reduce_prod": _one,
    "reduce_max": _lowest,
    "reduce_min": _highest,
    "reduce_and": _all_ones,
    "reduce_or": _zero,
    "reduce_xor": _zero,
}.items():
    _reduction(_name, _neutral)

for _name, _neutral in {
    "cumsum": _zero,
    "cumprod": _one,
    "cummax": _lowest,
    "cummin": _highest,
    "cumlogsumexp": _lowest,
}.items():
    _cumulative(_name, _neutral)

_position("argmax", _lowest)
_position("argmin", _highest)


@register("dot_general")
def _(
    x: Masked | ArrayLike,
    y: Masked | ArrayLike,
    *,
    dimension_numbers: Any,
    out_sharding: Any,
    **params: Any,
) -> Any:
    def dot(x: Any, y: Any, **params: Any) -> Any:
        return lax.dot_general(x, y, dimension_numbers, out_sharding=out_sharding, **params)

    count = dot(*(_mask(v).astype(jnp.float32) for v in (x, y)))
    return Masked(dot(_filled(x, 0), _filled(y, 0), **params), count > 0)


@register("sort")
def _(*operands: Masked | ArrayLike, num_keys: int, **params: Any) -> list[Any]:
    # An invalid key is greater than any other: whether it is so is a key before it.
    keys: list[Any] = []
    rest: list[Any] = []
    for i, x in enumerate(operands):
        into = keys if i < num_keys else rest
        if isinstance(x, Masked):
            into.append(~_mask(x))
        into.append(_filled(x, 0))
    primitive = find_primitive("sort")
    out = iter(primitive.bind(*keys, *rest, num_keys=len(keys), **params))
    results: list[Any] = []
    for x in operands:
        invalid = next(out) if isinstance(x, Masked) else None
        results.append(next(out) if invalid is None else Masked(value=next(out), mask=~invalid))
    return results


# Layout: the same of the mask.


def _layout(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *indices: ArrayLike, **params: Any) -> Any:
        both = [primitive.bind(jnp.asarray(v), *indices, **params) for v in (x.value, x.mask)]
        if primitive.multiple_results:
            return [Masked(*pair) for pair in zip(*both, strict=True)]
        return _as_sum(Masked(*both), getattr(x, "_entries", None))


def _of_several(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        # Indices come last, and are the same for both.
        arrays = operands if name != "dynamic_update_slice" else operands[:2]
        indices = operands[len(arrays) :]
        if any(isinstance(i, Masked) for i in indices):
            return NotImplemented
        value = primitive.bind(*map(_value, arrays), *indices, **params)
        return Masked(value, primitive.bind(*map(_mask, arrays), *indices, **params))


for _name in (
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "tile"),
    *("slice", "dynamic_slice", "split", "unstack"),
):
    _layout(_name)

for _name in ("concatenate", "stack", "pad", "dynamic_update_slice"):
    _of_several(_name)


@register("gather")
def _(x: Masked, indices: ArrayLike, *, fill_value: Any, **params: Any) -> Any:
    bind = find_primitive("gather").bind
    value = bind(jnp.asarray(x.value), indices, fill_value=fill_value, **params)
    return Masked(value, bind(jnp.asarray(x.mask), indices, fill_value=False, **params))


@register("scatter")
def _(
    x: Masked | ArrayLike,
    indices: ArrayLike,
    updates: Masked | ArrayLike,
    *,
    dimension_numbers: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: Any,
    **params: Any,
) -> Any:
    def write(into: Any, entries: Any) -> Any:
        return lax.scatter(
            into,
            indices,
            entries,
            dimension_numbers,
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            mode=mode,
        )

    return Masked(write(_value(x), _value(updates)), write(_mask(x), _mask(updates)))


# Functions of jax.numpy that count all entries, or take a NaN for an invalid one.

_STATISTICS = {
    **{"_mean": "x.mean(axis)", "_var": "x.var(axis)", "_std": "x.std(axis)"},
    **{"_average": "x.mean(axis)", "nanmean": "x.mean(axis)"},
    **dict.fromkeys(("median", "quantile", "percentile"), "jnp.nanquantile of x.filled(jnp.nan)"),
}


_SMALL = 4  # equations: those of jax.numpy's sum, or its division


def _jit(*operands: Masked | ArrayLike, name: str, jaxpr: Any, **params: Any) -> Any:
    if name in _STATISTICS:
        raise TypeError(_counts_all(f"jax.numpy.{name.strip('_')}", _STATISTICS[name]))
    # Compiled for itself, a sum would come back as an object that knows nothing of its entries.
    if is_eager() and len(jaxpr.eqns) <= _SMALL:
        return implicit(jaxpr_as_fun(jaxpr))(*operands)
    return NotImplemented


add_rule(_jit, [find_primitive("jit")], structural=True, conditional=True)
