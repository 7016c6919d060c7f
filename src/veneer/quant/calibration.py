"""Calibration: from the values of a tile to its scale and zero point."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .formats import Format
from .scales import usable


def _absmax(x: jax.Array, axes: tuple[int, ...], bound: float) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=axes, initial=0) / bound


def _absmean(x: jax.Array, axes: tuple[int, ...], bound: float) -> jax.Array:
    del bound  # the mean magnitude is what a code of 1 stands for
    return jnp.mean(jnp.abs(x), axis=axes)


# From values, the axes of a tile and the format's bound to the scale.
SYMMETRIC: dict[str, Callable[[jax.Array, tuple[int, ...], float], jax.Array]] = {
    "absmax": _absmax,
    "absmean": _absmean,
}
CALIBRATIONS = (*SYMMETRIC, "minmax")


def check_calibration(method: str, format: Format) -> None:
    """Raises `ValueError` where there is no such method, or the format cannot follow it."""
    if method not in CALIBRATIONS:
        raise ValueError(
            f"unknown calibration_method {method!r}; the methods are {', '.join(CALIBRATIONS)}"
        )
    if method == "minmax" and not (format.is_integer and format.bits >= 2):
        raise ValueError(f"{format.name} has no zero_point, which calibration_method {method!r} needs")


def calibrate(
    tiles: jax.Array, axes: tuple[int, ...], format: Format, method: str
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale of each tile, and its zero point where the method has one.

    A tile with a NaN or an infinity in it has scale NaN.

    **Arguments:**

    - `tiles`: values of at least f32, from which `axes`, those of a tile, are reduced.
    - `format`, `method`: what codes there are, and which of `CALIBRATIONS`.
    """
    zero_point = None
    if method == "minmax":
        low = jnp.min(tiles, axis=axes, initial=0)
        high = jnp.max(tiles, axis=axes, initial=0)
        least, largest = format.code_range
        scale = (high - low) / (largest - least)
        zero_point = jnp.round(least - low / usable(scale))
        zero_point = jnp.clip(zero_point, least, largest)
    else:
        scale = SYMMETRIC[method](tiles, axes, format.bound)
        if not format.signed and format.is_integer:
            middle = 2 ** (int(format.bits) - 1)
            scale = scale * format.bound / (middle - 0.5)
            zero_point = jnp.full(scale.shape, middle, scale.dtype)
    # XLA's reduction to a maximum drops NaN on CPU, in arrays of some size.
    scale = jnp.where(jnp.isnan(tiles).any(axes), jnp.nan, scale)
    return scale, zero_point
