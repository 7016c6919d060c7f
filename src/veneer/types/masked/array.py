"""`Masked`: an array some of whose entries are invalid, and are left out of what is computed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core.surface.array import ImplicitArray

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
        dtype = jnp.result_type(float) if not is_inexact(entries) else entries.dtype
        wide = entries.astype(jnp.promote_types(dtype, jnp.float32))  # as jax.numpy sums halves
        total = jnp.sum(wide, axis, where=jnp.asarray(self.mask), keepdims=keepdims)
        count = self.count(axis, keepdims=keepdims) - ddof
        return Masked((total / jnp.maximum(count, 1)).astype(dtype), count > 0)


def is_inexact(x: Any) -> bool:
    """Whether an array is floating or complex."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def value_of(x: Any) -> Any:
    """The value of a masked array, or a dense array itself."""
    return jnp.asarray(x.value if isinstance(x, Masked) else x)


def mask_of(x: Any) -> jax.Array:
    """Which entries are valid: all those of a dense array."""
    return jnp.asarray(x.mask) if isinstance(x, Masked) else jnp.ones(jnp.shape(x), bool)


def filled_with(x: Any, fill: Any) -> jax.Array:
    """The array, with `fill` where entries are invalid."""
    return x.filled(fill) if isinstance(x, Masked) else jnp.asarray(x)
