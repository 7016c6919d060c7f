"""Checks of arguments that several public functions take: parameters, keys and path regexes."""

import re
from typing import Any

import jax


def check_parameters(params: Any, call: str) -> None:
    """Check that a tree of parameters holds arrays. `call` shows how they are passed."""
    if not any(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise ValueError(
            f"params, a {type(params).__name__}, holds no arrays. Pass the parameters, a tree of "
            f"arrays: {call}"
        )


def check_key(key: Any) -> None:
    """Check that `key` is a PRNG key of JAX, typed or raw."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key and not (dtype == "uint32" and key.ndim == 1):
        shown = repr(key) if dtype is None else f"an array {dtype.name}{list(key.shape)}"
        raise TypeError(f"key must be a JAX PRNG key, such as jax.random.key(0), not {shown}")


def check_regex(regex: Any, name: str, kinds: str = "a string that is a regex") -> None:
    """Check a regex for paths, the argument `name`, which can be one of `kinds`.

    **Raises:** `TypeError` if it is not a string. `ValueError` if it is not a valid regex.
    """
    if not isinstance(regex, str | re.Pattern):
        raise TypeError(f"{name} must be {kinds}, not {regex!r}")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"{name}={regex!r} is not a regex: {error}") from None


def path_matches(regex: str | re.Pattern, path: str) -> bool:
    """Return whether a regex matches the whole of a path, with or without a final `.value`.

    The path of a variable of `flax.nnx` ends in `.value`, though the model has no such name.

    >>> from veneer._core.surface.arguments import path_matches
    >>> path_matches(".*kernel", "layer.kernel.value")
    True
    """
    return any(re.fullmatch(regex, part) for part in (path, path.removesuffix(".value")))
