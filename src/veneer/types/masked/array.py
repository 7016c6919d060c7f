"""`Masked`: an array with invalid entries, which computations skip."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core.surface.array import ImplicitArray
from ..axes import Array, check_arrays

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
        dtype = jnp.result_type(float) if not is_inexact(entries) else entries.dtype
        wide = entries.astype(
            jnp.promote_types(dtype, jnp.float32)
        )  # 16-bit floats are summed in f32
        total = jnp.sum(wide, axis, where=jnp.asarray(self.mask), keepdims=keepdims)
        count = self.count(axis, keepdims=keepdims) - ddof
        return Masked((total / jnp.maximum(count, 1)).astype(dtype), count > 0)


def is_inexact(x: Any) -> bool:
    """Return whether an array is floating or complex."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
