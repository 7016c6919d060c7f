"""`Masked`: an array with invalid entries, which computations skip, and its rules."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.rules import add_rule, register
from .._core.surface import Array, check_arrays
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._jax.primitives import Primitive, find_primitive, jaxpr_as_fun
from .._jax.tracing import is_eager, known_entries, vary_together
from .elementwise import ELEMENTWISE

Axis = int | Sequence[int] | None


class Masked(ImplicitArray):
    """An array `[...]` with a mask that is True where an entry is valid.

    This is the opposite of `numpy.ma`, where True means invalid. An invalid entry, such as a NaN,
    affects no valid result and no derivative.

    - The result of an elementwise function is valid where all operands are valid. In `jnp.where`,
      only the condition and the chosen operand must be valid.
    - Reductions, cumulative functions and matmuls skip invalid entries. The result of a reduction
      is valid if at least one of the reduced entries is valid. An entry of a matmul is valid if at
      least one of its terms multiplies two valid entries.
    - Sorts put invalid entries last. `argmax` and `argmin` return the index of a valid entry, if
      any entry is valid.
    - Slices, transposes and other operations that move entries also move the mask. Padding, and
      entries written from a dense array, are valid. Reads out of bounds are invalid.

    `x.mean()`, `x.var()`, `x.std()` and `x.count()` use only the valid entries. `jnp.mean` and
    other statistics of `jax.numpy` divide by the number of all entries, so they raise `TypeError`.

    A sum divided by the number of all entries, such as `x.sum() / x.size`, is not the mean of the
    valid entries. In `vn.implicit(f)(x)`, this division also raises `TypeError`. The mistake is not
    detected in `jax.jit(vn.implicit(f))(x)`, in operators outside of `vn.implicit`, or if the sum
    is multiplied by the reciprocal of the number.

    **Materializes:** nothing. A primitive without a rule raises `TypeError`. Call `filled` to get a
    dense array.

    The mask is not floating, so `jax.grad(vn.implicit(f))` with respect to a `Masked` needs
    `allow_int=True`. Or differentiate with respect to `value`, and create the `Masked` in the
    function.

    **Arguments:**

    - `value`: a dense array `[...]` of any dtype. Invalid entries can have any value.
    - `mask`: a boolean array of the same shape, True where an entry is valid.

    **Raises:**

    - `TypeError` if `value` or `mask` is not a dense array, or `mask` is not boolean.
    - `ValueError` if the shapes of `value` and `mask` differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> x = vn.types.Masked(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))
    >>> y = vn.implicit(lambda x: jnp.log(x).sum())(x)
    >>> y.filled().item(), x.mean().filled().item()
    (1.0986..., 2.0)
    """

    value: jax.Array | np.ndarray  # [...]
    mask: jax.Array | np.ndarray  # bool[...]

    def __post_init__(self) -> None:
        check_arrays(self, Array, "value", "mask")
        if self.mask.dtype != bool:
            raise TypeError(
                f"Masked takes a boolean mask, True where entries are valid; got {self.mask.dtype}"
            )
        if self.mask.shape != self.value.shape:
            raise ValueError(
                "Masked takes a mask of the shape of its value, got value "
                f"{self.value.shape}, mask {self.mask.shape}. Use jax.numpy.broadcast_to."
            )

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the value."""
        value = jax.typeof(self.value)
        return jax.core.ShapedArray(value.shape, value.dtype)

    def materialise(self) -> Any:
        """Raise `TypeError`, because invalid entries have no value. Use `filled` instead."""
        raise TypeError(
            f"{self!r} has no dense form, because invalid entries have no value. Use x.filled(0.0)."
        )

    def filled(self, fill: ArrayLike = 0) -> jax.Array:
        """Return a dense array, with `fill` in place of invalid entries."""
        value = jnp.asarray(self.value)
        return jnp.where(self.mask, value, jnp.asarray(fill, value.dtype))

    def count(self, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
        """Return the number of valid entries, in total or along `axis`, as int32."""
        return jnp.sum(self.mask, axis, dtype="int32", keepdims=keepdims)

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> "Masked":
        """Return the mean of the valid entries. A mean without valid entries is invalid."""
        return self._mean_of(self.filled(), axis, keepdims, ddof=0)

    def var(self, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> "Masked":
        """Return the variance of the valid entries.

        **Arguments:**

        - `axis`, `keepdims`: as in `jax.numpy.var`.
        - `ddof`: the divisor is the number of valid entries minus `ddof`. If the divisor is not
          positive, the result is invalid.
        """
        mean = self.mean(axis, keepdims=True).value
        return self._mean_of(jnp.abs(self.filled() - mean) ** 2, axis, keepdims, ddof)

    def std(self, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> "Masked":
        """Return the standard deviation of the valid entries. It takes the arguments of `var`."""
        var = self.var(axis, ddof=ddof, keepdims=keepdims)
        return Masked(jnp.sqrt(var.filled(1)), var.mask)

    def _mean_of(self, entries: jax.Array, axis: Axis, keepdims: bool, ddof: int) -> "Masked":
        dtype = jnp.result_type(float) if not _is_inexact(entries) else entries.dtype
        wide = entries.astype(
            jnp.promote_types(dtype, jnp.float32)
        )  # 16-bit floats are summed in f32
        total = jnp.sum(wide, axis, where=jnp.asarray(self.mask), keepdims=keepdims)
        count = self.count(axis, keepdims=keepdims) - ddof
        return Masked((total / jnp.maximum(count, 1)).astype(dtype), count > 0)


def _is_inexact(x: Any) -> bool:
    """Return whether an array is floating or complex."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value(x: Any) -> jax.Array:
    return jnp.asarray(x.value if isinstance(x, Masked) else x)


def _mask(x: Any) -> jax.Array:
    return jnp.asarray(x.mask) if isinstance(x, Masked) else jnp.ones(jnp.shape(x), bool)


def _fill_zero(x: Any) -> jax.Array:
    return x.filled(0) if isinstance(x, Masked) else jnp.asarray(x)


# Elementwise functions. Invalid entries are first replaced by a number at which every function and
# its derivative are finite. Otherwise derivatives of valid entries could be NaN, as 0 * NaN.

_FINITE_AT = {"acosh": 2.0}


def _register_elementwise(primitive: Primitive) -> None:
    finite_at = _FINITE_AT.get(primitive.name, 0.5)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        if primitive is lax.div_p:
            _reject_mean_of_all(*operands)
        values = [_value(x) for x in operands]
        shape = jnp.broadcast_shapes(*map(jnp.shape, values))
        mask = jnp.ones(shape, bool)
        for x in operands:
            if isinstance(x, Masked):
                new_axes = (1,) * (len(shape) - jnp.ndim(x.mask))
                mask = mask & jnp.reshape(x.mask, new_axes + jnp.shape(x.mask))
        safe = []
        for x, value in zip(operands, values, strict=True):
            valid = mask if value.shape == shape else _mask(x)
            fill = jnp.array(finite_at if _is_inexact(value) else 1)
            safe.append(jnp.where(valid, value, fill.astype(value.dtype)))
        out = Masked(primitive.bind(*safe, **primitive.get_bind_params(params)), mask)
        remains_sum = primitive.name in ("convert_element_type", "neg")
        return _note_sum(out, _summed_entries(operands[0]) if remains_sum else None)


for _primitive in ELEMENTWISE:
    if _primitive is not lax.select_n_p:
        _register_elementwise(_primitive)


@register("select_n")
def _(which: Masked | ArrayLike, *cases: Masked | ArrayLike) -> Any:
    value = lax.select_n(_value(which), *map(_value, cases))
    mask = lax.select_n(_value(which), *map(_mask, cases))
    return Masked(value, mask & _mask(which))


# Primitives that move entries. They also move the entries of the mask.


def _register_movement(name: str, n_arrays: int | None) -> None:
    """Register the rule of a primitive whose first `n_arrays` operands are arrays.

    The other operands are indices. None means that all operands are arrays.
    """
    primitive = find_primitive(name)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        arrays, indices = operands[:n_arrays], operands[n_arrays:] if n_arrays else ()
        if any(isinstance(i, Masked) for i in indices):
            return NotImplemented
        value, mask = (
            primitive.bind(*vary_together([*map(leaf, arrays), *indices]), **params)
            for leaf in (_value, _mask)
        )
        if primitive.multiple_results:
            return [Masked(*pair) for pair in zip(value, mask, strict=True)]
        return _note_sum(Masked(value, mask), _summed_entries(arrays[0]) if n_arrays == 1 else None)


for _name, _n_arrays in {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "tile"), 1),
    **dict.fromkeys(("slice", "dynamic_slice", "split", "unstack"), 1),
    **{"concatenate": None, "stack": None, "pad": None, "dynamic_update_slice": 2},
}.items():
    _register_movement(_name, _n_arrays)


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
    update_jaxpr: Any,
    update_consts: Any,
    **params: Any,
) -> Any:
    del update_jaxpr, update_consts  # `lax.scatter` creates them, for numbers and for booleans
    write = lambda array, entries: lax.scatter(array, indices, entries, **params)
    return Masked(write(_value(x), _value(updates)), write(_mask(x), _mask(updates)))


# Reductions. Invalid entries are first replaced by the neutral element, which changes no result.


def _neutral(operation: str, dtype: Any) -> Any:
    """Return the neutral element of a reduction: for example, 0 for "sum" and -inf for "max"."""
    if operation in ("max", "min", "logsumexp"):
        is_min = operation == "min"
        if jnp.issubdtype(dtype, jnp.bool_):
            return is_min
        if jnp.issubdtype(dtype, jnp.inexact):
            return jnp.inf if is_min else -jnp.inf
        return jnp.iinfo(dtype).max if is_min else jnp.iinfo(dtype).min
    if operation == "and":
        return ~np.zeros((), dtype)
    return 1 if operation == "prod" else 0


def _register_reduction(operation: str) -> None:
    primitive = find_primitive(f"reduce_{operation}")

    @register(primitive)
    def _(x: Masked, *, axes: Any, **params: Any) -> Any:
        filled = x.filled(_neutral(operation, x.dtype))
        out = Masked(primitive.bind(filled, axes=axes, **params), jnp.any(x.mask, axes))
        count = math.prod(x.shape[axis] for axis in axes) * (_summed_entries(x) or 1)
        return _note_sum(out, count) if operation == "sum" and count > 1 else out


def _register_cumulative(operation: str) -> None:
    primitive = find_primitive(f"cum{operation}")

    @register(primitive)
    def _(x: Masked, **params: Any) -> Any:
        return Masked(primitive.bind(x.filled(_neutral(operation, x.dtype)), **params), x.mask)


def _register_position(operation: str) -> None:
    """Register the rule of `argmax` or `argmin`. `operation` is "max" or "min"."""
    primitive = find_primitive(f"arg{operation}")

    @register(primitive)
    def _(x: Masked, *, axes: Any, index_dtype: Any) -> Any:
        (axis,) = axes
        mask = jnp.asarray(x.mask)
        filled = x.filled(_neutral(operation, x.dtype))
        position = primitive.bind(filled, axes=axes, index_dtype=index_dtype)
        # If all valid entries equal the neutral element, the position can be an invalid entry.
        is_valid = jnp.take_along_axis(mask, jnp.expand_dims(position, axis), axis).squeeze(axis)
        first_valid = lax.argmax(mask, axis, index_dtype)
        return Masked(jnp.where(is_valid, position, first_valid), jnp.any(x.mask, axis))


for _name in ("sum", "prod", "max", "min", "and", "or", "xor"):
    _register_reduction(_name)
for _name in ("sum", "prod", "max", "min", "logsumexp"):
    _register_cumulative(_name)
for _name in ("max", "min"):
    _register_position(_name)


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
    return Masked(dot(_fill_zero(x), _fill_zero(y), **params), count > 0)


@register("sort")
def _(*operands: Masked | ArrayLike, num_keys: int, **params: Any) -> list[Any]:
    # Before each key with a mask, sort by a key that is True for invalid entries.
    keys: list[Any] = []
    others: list[Any] = []
    for i, x in enumerate(operands):
        arrays = keys if i < num_keys else others
        if isinstance(x, Masked):
            arrays.append(~_mask(x))
        arrays.append(_fill_zero(x))
    sort = find_primitive("sort").bind
    out = iter(sort(*keys, *others, num_keys=len(keys), **params))
    results: list[Any] = []
    for x in operands:
        invalid = next(out) if isinstance(x, Masked) else None
        value = next(out)
        results.append(value if invalid is None else Masked(value, ~invalid))
    return results


# Means that count invalid entries raise. A sum remembers the number of its entries, so that a
# division by this number is detected, as long as the program uses the same object.


def _note_sum(x: Masked, count: int | None) -> Masked:
    """Record in `x` that it is a sum of `count` entries, valid and invalid, and return `x`.

    `_reject_mean_of_all` reads the number. If `count` is None, return `x` unchanged.
    """
    if count is not None:
        x.__dict__["_entries"] = count
    return x


def _summed_entries(x: Any) -> int | None:
    """Return how many valid and invalid entries were summed to compute `x`.

    Return None if `x` is not the result of a sum.
    """
    return getattr(x, "_entries", None)


def _reject_mean_of_all(total: Any, divisor: Any) -> None:
    """Raise `TypeError` if `total` is a sum, and `divisor` the number of its entries.

    The number includes invalid entries, so the quotient is not the mean of the valid entries.
    """
    count = _summed_entries(total)
    known = None if isinstance(divisor, Masked) else known_entries(divisor)
    if count is not None and known is not None and (known == count).all():
        raise _mean_error("this mean", "x.mean(axis)")


def _mean_error(function: str, replacement: str) -> TypeError:
    return TypeError(
        f"{function} of a Masked counts all entries, including invalid ones. Use {replacement}, or "
        "x.sum(axis) and x.count(axis)."
    )


#: Functions of jax.numpy that count all entries or ignore NaN, and their replacements.
_STATISTICS = {
    **dict.fromkeys(("_mean", "_average", "nanmean"), "x.mean(axis)"),
    **{"_var": "x.var(axis)", "_std": "x.std(axis)"},
    **dict.fromkeys(("median", "quantile", "percentile"), "jnp.nanquantile of x.filled(jnp.nan)"),
}

_FEW_EQUATIONS = 4  # as many as in the sums and the divisions of jax.numpy


def _call_jitted(*operands: Masked | ArrayLike, name: str, jaxpr: Any, **params: Any) -> Any:
    if name in _STATISTICS:
        raise _mean_error(f"jax.numpy.{name.strip('_')}", _STATISTICS[name])
    # The result of a compiled sum is a new object, which does not have the number of entries.
    if is_eager() and len(jaxpr.eqns) <= _FEW_EQUATIONS:
        return redispatch(jaxpr_as_fun(jaxpr), *operands)
    return NotImplemented


add_rule(_call_jitted, [find_primitive("jit")], structural=True, conditional=True)
