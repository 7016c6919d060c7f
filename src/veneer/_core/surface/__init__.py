"""The API that users subclass and call, on top of the core and its rules for primitives.

array             ImplicitArray, the class that users subclass, and its display
operators         its operators and methods, like those in `jax.Array`
implicit          implicit: the transformation with filters, policies and captured arrays
operands          implicit arrays that JAX functions get although `implicit` did not wrap them
straight_through  `ste`: run a function with the derivative of the identity

The functions here check arguments that several public functions take.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax


def check_parameters(params: Any, call: str) -> None:
    """Raise `ValueError` if a tree of parameters holds no arrays. `call` is an example call."""
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
    """Raise `TypeError` if a regex is not a string, and `ValueError` if it is not valid.

    `name` is the name of the argument, and `kinds` the allowed types, for the error message.
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
    """Join the first four of some paths for an error message."""
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "") or "(the tree is empty)"
