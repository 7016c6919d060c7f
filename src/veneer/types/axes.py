"""Checks of the fields of array types, for constructors: arrays with matching shapes."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._core.value import Value

if TYPE_CHECKING:
    Leaf = Any
    Array = Any
else:
    #: The type of a dense leaf.
    Array = jax.Array | np.ndarray

    #: The type of a leaf that is dense, traced or implicit.
    Leaf = jax.Array | np.ndarray | Value


def check_axes(value: Any, kinds: Any = Leaf, /, **axes: str) -> None:
    """Check that the fields of an array have the given trailing axes, and the same leading axes.

    **Arguments:**

    - `value`: the implicit array whose fields are checked.
    - `kinds`: the types that a field can have. `Array` accepts dense and traced arrays, `Leaf` also
      accepts implicit arrays.
    - `axes`: for each field, the names of its trailing axes, as in `check_axes(self, a="m r",
      b="r n")`. Axes with the same name have the same size. A number is a size.

    **Raises:**

    - `TypeError` if a field is not an array of type `kinds`.
    - `ValueError` if a field has too few axes, or sizes differ.
    """
    check_arrays(value, kinds, *axes)

    def error(reason: str) -> ValueError:
        wanted = ", ".join(f"{field} [..., {', '.join(n.split())}]" for field, n in axes.items())
        shapes = ", ".join(f"{field} {tuple(getattr(value, field).shape)}" for field in axes)
        same = " with the same leading axes" if len(axes) > 1 else ""
        return ValueError(f"{type(value).__name__} takes {wanted}{same}, got {shapes}: {reason}")

    sizes: dict[str, int] = {}
    leading: tuple[int, ...] | None = None
    for field, axis_names in axes.items():
        shape, names = tuple(getattr(value, field).shape), axis_names.split()
        if len(shape) < len(names):
            raise error(f"{field} has too few axes")
        split = len(shape) - len(names)
        if leading is not None and shape[:split] != leading:
            raise error("the leading axes differ")
        leading = shape[:split]
        for name, size in zip(names, shape[split:], strict=True):
            expected = int(name) if name.isdecimal() else sizes.setdefault(name, size)
            if size != expected:
                raise error(f"axis {name} of {field} is {size}, not {expected}")


def check_arrays(value: Any, kinds: Any, /, *fields: str) -> None:
    """Check that the fields with these names hold arrays.

    `value` and `kinds` are the same as in `check_axes`.

    **Raises:** `TypeError` if a field holds anything else.
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
