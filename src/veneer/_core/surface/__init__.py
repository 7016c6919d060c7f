"""The API that users subclass and call, on top of the core and its rules for primitives.

array             ImplicitArray, the class that users subclass, and its display
operators         the operators and methods of ImplicitArray, like those in `jax.Array`
implicit          implicit: the transformation with filters, policies and captured arrays
operands          implicit arrays that JAX functions get although `implicit` did not wrap them
straight_through  `ste`: run a function with the derivative of the identity

The functions here check arguments that several public functions take, and the fields of arrays.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..value import Value


def check_parameters(params: Any, call: str) -> None:
    """Raise `ValueError` if a tree of parameters holds no arrays.

    `call` is the text of a correct call, for the error message.
    """
    if not any(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise ValueError(
            f"params, a {type(params).__name__}, holds no arrays. Pass the parameters, a tree of "
            f"arrays: {call}"
        )


def check_key(key: Any) -> None:
    """Raise `TypeError` if `key` is not a PRNG key of JAX, typed or raw."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key and not (dtype == "uint32" and key.ndim == 1):
        shown = repr(key) if dtype is None else f"an array {dtype.name}{list(key.shape)}"
        raise TypeError(f"key must be a JAX PRNG key, such as jax.random.key(0), not {shown}")


def check_regex(regex: Any, name: str, kinds: str = "a string that is a regex") -> None:
    """Raise `TypeError` if `regex` is not a string or pattern, and `ValueError` if it is not valid.

    For the error message, `name` is the name of the user's argument, and `kinds` describes the
    values that it can have.
    """
    if not isinstance(regex, str | re.Pattern):
        raise TypeError(f"{name} must be {kinds}, not {regex!r}")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"{name}={regex!r} is not a regex: {error}") from None


def path_matches(regex: str | re.Pattern, path: str) -> bool:
    """Return whether a regex matches a whole path, or the path without a final `.value`.

    Variables of `flax.nnx` have paths that end in `.value`, which is not a name in the model.

    >>> from veneer._core.surface import path_matches
    >>> path_matches(".*kernel", "layer.kernel.value")
    True
    """
    return any(re.fullmatch(regex, part) for part in (path, path.removesuffix(".value")))


def some_of(paths: Sequence[str]) -> str:
    """Join the first four paths for an error message, with "..." if there are more."""
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "") or "(the tree is empty)"


# The fields of array types, which constructors check.


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
      b="r n")`. Axes with the same name must have the same size. A number in
      place of a name is the required size.

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
    """Check that fields of the implicit array `value` hold arrays.

    `fields` are the names of the fields. `kinds` are the types that a field can have, as in
    `check_axes`.

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
