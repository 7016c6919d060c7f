"""The check of the axes of a type's leaves, which constructors make."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._core.value import Value

if TYPE_CHECKING:
    Leaf = Any
    Array = Any
else:
    #: What a leaf may be that has to be dense.
    Array = jax.Array | np.ndarray

    #: What a leaf may be: an array, traced or not, or an implicit array that stands for one.
    Leaf = jax.Array | np.ndarray | Value


def check_axes(value: Any, kinds: Any = Leaf, /, **axes: str) -> None:
    """Checks the trailing axes of leaves, by names, and that the leading axes are the same.

    **Arguments:**

    - `value`: the array whose fields are looked at.
    - `kinds`: what they may be: a `Leaf`, implicit or not, or an `Array`, which is dense.
    - `axes`: for each field, the names of its trailing axes, as in `check_axes(self, a="m r",
      b="r n")`. Axes of one name have one size; a number is a size.

    **Raises:** `TypeError` for a field that is no array, or an implicit one; `ValueError` where a
    field has too few axes, or where sizes differ.
    """
    sizes: dict[str, int] = {}
    leading: tuple[int, ...] | None = None
    check_arrays(value, kinds, *axes)
    for field, names in axes.items():
        leaf = getattr(value, field)
        shape, own = tuple(leaf.shape), names.split()
        if len(shape) < len(own):
            raise ValueError(_message(value, axes, f"{field} has too few axes"))
        split = len(shape) - len(own)
        if leading is not None and shape[:split] != leading:
            raise ValueError(_message(value, axes, "the leading axes differ"))
        leading = shape[:split]
        for name, size in zip(own, shape[split:], strict=True):
            expected = int(name) if name.isdecimal() else sizes.setdefault(name, size)
            if size != expected:
                raise ValueError(
                    _message(value, axes, f"axis {name} of {field} is {size}, not {expected}")
                )


def check_arrays(value: Any, kinds: Any, /, *fields: str) -> None:
    """Check that fields of a value hold arrays.

    **Arguments:**

    - `kinds`: the accepted types: `Leaf` or `Array`.

    **Raises:** `TypeError` for a field that holds anything else.
    """
    for field in fields:
        leaf = getattr(value, field)
        if not isinstance(leaf, kinds):
            is_implicit = isinstance(leaf, Value)
            raise TypeError(
                f"{type(value).__name__} takes {'a dense' if is_implicit else 'an'} array for "
                f"{field}, not {leaf!r}. Convert it with "
                f"{'veneer.materialise' if is_implicit else 'jax.numpy.asarray'}."
            )


def _message(value: Any, axes: dict[str, str], what: str) -> str:
    wanted = ", ".join(f"{field} [..., {', '.join(n.split())}]" for field, n in axes.items())
    given = ", ".join(f"{field} {tuple(getattr(value, field).shape)}" for field in axes)
    same = " with the same leading axes" if len(axes) > 1 else ""
    return f"{type(value).__name__} takes {wanted}{same}, got {given}: {what}"
